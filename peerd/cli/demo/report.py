"""Final reports of the demo, as text or JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from peerd.cli.demo import outcome
from peerd.cli.demo.children import Children
from peerd.cli.demo.scene import Scene
from peerd.run.runfile import RunFile
from peerd.screen import columns
from peerd.screen.units import known


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport(ABC):
    """The figures of both demos. Losses are validation losses in nats per token."""

    loss_start: float | None
    loss_end: float | None
    loss_at_kill: float | None  # training loss of the last step before the kill
    loss_after_kill: float | None  # training loss of the last step
    steps: int
    seconds: float
    tokens_per_s: float
    wire_bytes_per_token: float | None
    killed: int
    data_dir: str
    processes_left: int
    commands: list[str]  # command lines to type next

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Names and values of the lines that only this demo reports."""

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    def text(self) -> str:
        sent = f"{self.wire_bytes_per_token or 0:,.0f} bytes per token, all processes together"
        common = {
            "validation loss": f"{loss_text(self.loss_start)} at the start, {loss_text(self.loss_end)} at the end",
            "steps": f"{self.steps} in {self.seconds:.0f} s, {self.tokens_per_s:,.0f} tokens/s",
            "on the wire": sent,
        }
        next_ = ["to export the model, generate text and evaluate it:", *(f"  {line}" for line in self.commands)]
        return "\n".join([columns.facts(common | self.facts()), *self.more(), *next_])

    def more(self) -> list[str]:
        """Further lines below the facts."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport(DemoReport):
    """Final figures of the demo of a pipeline."""

    started_later: int
    microbatches: int
    microbatches_redone: int  # repeated only on the stage whose peer was lost
    microbatches_requeued: int  # restarted at the first stage
    microbatches_lost: int
    checkpoint: str
    sample: str

    def facts(self) -> dict[str, str]:
        again = f"{self.microbatches_redone} repeated on one stage, {self.microbatches_requeued} restarted"
        return {
            "peers": f"{self.killed} killed, {self.started_later} started later",
            "microbatches": f"{self.microbatches} counted, {again}, {self.microbatches_lost} lost",
            "checkpoint": self.checkpoint,
        }

    def more(self) -> list[str]:
        return ["what the model writes:", *(f"  {line}" for line in self.sample.splitlines())]


def common_figures(scene: Scene, children: Children, kill_step: int | None, run: RunFile) -> dict[str, Any]:
    """Compute the fields of `DemoReport`, which both demos have."""
    at_kill, after = losses_around(scene, kill_step)
    return {
        "loss_start": scene.loss_start,
        "loss_end": scene.loss_end,
        "loss_at_kill": at_kill,
        "loss_after_kill": after,
        "steps": scene.step,
        "seconds": scene.seconds,
        "tokens_per_s": scene.tokens_per_s(),
        "wire_bytes_per_token": known(scene.bytes_per_token()),
        "killed": len(scene.killed),
        "data_dir": str(children.folder),
        "processes_left": sum(child.running for child in children.by_name.values()),
        "commands": outcome.commands(children.folder, run),
    }


def loss_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def losses_around(scene: Scene, kill_step: int | None) -> tuple[float | None, float | None]:
    """Training losses of the last step before the kill, and of the last step. None if unknown."""
    if kill_step is None or not scene.losses:
        return None, None
    before = [step for step in scene.losses if step <= kill_step]
    return (scene.losses[max(before)] if before else None), scene.losses[max(scene.losses)]
