"""State of the demo's swarm, read from the status snapshots of its processes.

The display and the report both use this state, so that they agree. It does no output, and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from peerd.cli.demo.children import Child
from peerd.screen.units import known
from peerd.status.role_status import MicrobatchFigures, RoleFigures, figures_of


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process of the demo, with figures from its last status."""

    name: str
    running: bool
    told: RoleFigures


@dataclass(slots=True)
class Scene:
    """State of the swarm, updated from the processes' status. Losses are in nats per token, by global step."""

    total_steps: int
    tokens_per_step: int
    losses: dict[int, float] = field(default_factory=dict)
    valid_losses: dict[int, float] = field(default_factory=dict)
    step_times: dict[int, float] = field(default_factory=dict)  # when each step was first seen
    step: int = 0
    microbatches: int = 0
    redone: int = 0  # microbatches repeated only on the stage whose peer was lost
    requeued: int = 0  # microbatches restarted at the first stage
    lost: int = 0
    answered: int = 0  # calls to experts
    waits_for: str = ""
    stage_peers: list[ProcessRow] = field(default_factory=list)
    bytes_out: int = 0
    killed: list[str] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)  # seconds since the start, text

    @property
    def work(self) -> tuple[int, int]:
        """Microbatches counted and expert calls answered so far. While they grow, the demo makes progress."""
        return self.microbatches, self.answered

    def read(self, children: dict[str, Child], now_s: float) -> None:
        """Update the state from the processes' last status."""
        trainer = children.get("trainer")
        if trainer is not None:
            self._read_trainer(trainer.role(), now_s)
        self.stage_peers = rows(children, "stage")
        self.bytes_out = sum(child.snapshot.network.bytes_out for child in children.values())

    def _read_trainer(self, told: RoleFigures, now_s: float) -> None:
        if told.step:
            self.step_times.setdefault(told.step, now_s)
        self.step = max(self.step, told.step)
        _note(self.losses, told.step, told.loss)
        for evaluation in told.evaluations:
            _note(self.valid_losses, evaluation.step, evaluation.loss)
        self._count(told.microbatches)
        if told.experts is not None:
            self.answered = max(self.answered, told.experts.calls.forwards + told.experts.calls.backwards)
        self.waits_for = told.waits_for or ""

    def read_log(self, events: Iterable[dict[str, Any]]) -> None:
        """Update the state from the trainer's event log, which has the last evaluation and the final counts."""
        for event in events:
            if event.get("name") == "trainer.evaluated":
                _note(self.valid_losses, int(event["step"]), event.get("loss"))
            elif event.get("name") == "trainer.finished":
                self.step = max(self.step, int(event["step"]))
                _note(self.losses, int(event["step"]), event["loss"])
                self._count(figures_of(event, MicrobatchFigures) or MicrobatchFigures())

    def _count(self, told: MicrobatchFigures) -> None:
        self.microbatches = told.counted or self.microbatches
        self.redone = told.redone or self.redone
        self.requeued = told.requeued or self.requeued
        self.lost = told.lost or self.lost

    def tokens_per_s(self, window_steps: int | None = None) -> float:
        """Trained tokens per second over the last `window_steps` steps, or over all steps."""
        steps = sorted(step for step in self.step_times if step > 0)  # the time to the first step is start-up
        if len(steps) < 2:
            return 0.0
        first = steps[0] if window_steps is None else max(steps[0], steps[-1] - window_steps)
        first = max(s for s in steps if s <= first)
        passed_s = self.step_times[steps[-1]] - self.step_times[first]
        return (steps[-1] - first) * self.tokens_per_step / passed_s if passed_s > 0 else 0.0

    @property
    def loss_start(self) -> float | None:
        """The first validation loss."""
        return self.valid_losses[min(self.valid_losses)] if self.valid_losses else None

    @property
    def loss_end(self) -> float | None:
        """The last validation loss."""
        return self.valid_losses[max(self.valid_losses)] if self.valid_losses else None

    @property
    def seconds(self) -> float:
        """Time from the start to the last step."""
        return max(self.step_times.values(), default=0.0)

    def bytes_per_token(self) -> float:
        """Bytes sent by all processes together, per trained token."""
        return self.bytes_out / (self.step * self.tokens_per_step) if self.step else math.nan

    def victim(self) -> ProcessRow | None:
        """The peer to kill: of those whose stage has another peer, the one with the gradients of the most samples."""
        living = [peer for peer in self.stage_peers if peer.running and peer.told.stage >= 0]
        spare = [peer for peer in living if sum(other.told.stage == peer.told.stage for other in living) > 1]
        return max(spare, key=lambda peer: (peer.told.held_samples, peer.name), default=None)

    def say(self, now_s: float, text: str) -> None:
        self.events.append((now_s, text))


def _note(history: dict[int, float], step: int, loss: object) -> None:
    if (value := known(loss)) is not None:
        history.setdefault(step, value)


def rows(children: dict[str, Child], kind: str) -> list[ProcessRow]:
    """Rows of the processes whose names begin with `kind`."""
    found = [child for name, child in children.items() if name.startswith(kind)]
    return [ProcessRow(child.name, child.running, child.role()) for child in found]
