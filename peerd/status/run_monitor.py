"""Observes a run through its directory records: the participating peers and the swarm's progress. Not a role.

Records are unverified claims of strangers. The swarm's step is estimated as the lower median of the stage peers' steps
(of the trainers' steps if there are no stage peers), so that a minority of false claims cannot move it out of the range
of the others. Only trainers within 100 steps of this estimate count for the step, the loss and the rates. In a run with
tokens, only members' stage records count. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import DIRECTORY_READ_BYTES
from peerd.messages.progress import (
    StageProgress,
    TrainerProgress,
    decode_trainer,
    foretold_in_s,
    progress_key,
    sum_told,
)
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.status.learning_curve import CurvePoint

MOST_STEPS: Final = 1 << 53  # as in `messages.swarm.StepNumber`
NEAR_STEPS: Final = 100  # largest distance to the swarm's step; records are a few seconds old
FORGET_S: Final = 600.0  # a peer not seen for this long counts as a newcomer again


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A peer that was not present before. `stage` is None for a trainer."""

    peer: PeerId
    stage: int | None


@dataclass(frozen=True, slots=True)
class RunObservation:
    """The result of one read of a run's records."""

    point: CurvePoint | None  # None if no peer is present
    stages: list[list[PeerId]]  # the peers that announce each stage
    newcomers: list[Newcomer]
    due_in_s: float | None = None  # predicted time until the current step ends, if known
    final_step: int | None = None  # step with which the run ends, or None while it continues


class RunMonitor:
    """Observes one run; remembers the peers seen so far, to recognize newcomers."""

    def __init__(self, ctx: RoleContext, services: RunServices) -> None:
        self._ctx, self._services = ctx, services
        self._met: dict[tuple[PeerId, int | None], float] = {}  # when last seen

    async def look(self) -> RunObservation:
        """Read the run's records once. Records that the DHT does not return are missing from the result."""
        announced = await self._services.directory.refresh()
        trainers = await self._trainers()
        stages: list[list[PeerId]] = [[] for _ in range(self._services.run.pipeline.stages)]
        for peer, stage in sorted(announced):
            stages[stage].append(peer)
        steps = [entry.progress.step for entry in announced.values()]
        point = summary([len(peers) for peers in stages], steps, list(trainers.values()), self._ctx.clock.wall())
        present = [Newcomer(peer, stage) for stage, peers in enumerate(stages) for peer in peers]
        newcomers = self._new([*present, *(Newcomer(peer, None) for peer in trainers)])
        told = [(e.peer.text, e.progress.conductor, e.progress.step_at) for e in announced.values()]
        due_in_s = foretold_in_s(told, self._ctx.clock.wall())
        return RunObservation(point, stages, newcomers, due_in_s, final_step([e.progress for e in announced.values()]))

    async def _trainers(self) -> dict[PeerId, TrainerProgress]:
        found = {}
        try:
            key = progress_key(self._services.run.run)
            records = await self._ctx.dht.get(key, most_bytes=DIRECTORY_READ_BYTES)
        except RemoteError:
            return {}
        for record in records:
            try:
                found[record.publisher] = decode_trainer(record.value)
            except ProtocolViolation as error:
                self._ctx.log.event("curve.record_skipped", level="debug", peer=record.publisher, reason=str(error))
        return found

    def _new(self, present: list[Newcomer]) -> list[Newcomer]:
        now = self._ctx.clock.now()
        fresh = [one for one in present if (one.peer, one.stage) not in self._met]
        self._met |= {(one.peer, one.stage): now for one in present}
        self._met = {one: seen for one, seen in self._met.items() if now - seen < FORGET_S}
        return fresh


def summary(
    peers: list[int], stage_steps: Sequence[int], trainers: Sequence[TrainerProgress], wall: float
) -> CurvePoint | None:
    """Summarize the swarm as one point of the learning curve. `peers` is the number of peers in each stage.

    Returns None if there are no records.
    """
    told_by_trainers = [told.step for told in trainers]
    about = _low_median(stage_steps) if stage_steps else _low_median(told_by_trainers)
    if about is None:
        return None
    near = [told for told in trainers if abs(told.step - about) <= NEAR_STEPS]
    step = _low_median([told.step for told in near])
    losses = [told.loss for told in near if math.isfinite(told.loss)]
    judged = [t for t in near if math.isfinite(t.valid_loss) and 0 <= t.valid_step <= about + NEAR_STEPS]
    valid = max(judged, key=lambda told: told.valid_step, default=None)
    return CurvePoint(
        step=about if step is None else step,
        time=wall,
        loss=sum_told(loss / len(losses) for loss in losses) if losses else None,
        valid_loss=valid.valid_loss if valid else None,
        valid_step=valid.valid_step if valid else None,
        peers=peers,
        trainers=len(near),
        samples_per_s=sum_told(told.samples_per_s for told in near),
        tokens_per_s=sum_told(told.tokens_per_s for told in near),
    )


def final_step(told: Sequence[StageProgress]) -> int | None:
    """The step with which a run ends, from its stage peers' records: the lower median of those that end.

    Returns None unless more than half of the records say so, so that a minority cannot make backbones keep a step that
    is not due.
    """
    ending = [one.step for one in told if one.ends]
    return _low_median(ending) if 2 * len(ending) > len(told) else None


def _low_median(steps: Sequence[int]) -> int | None:
    possible = sorted(step for step in steps if 0 <= step < MOST_STEPS)
    return possible[(len(possible) - 1) // 2] if possible else None
