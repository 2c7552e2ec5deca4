"""Figures of the built-in roles that have specific phrases in `peerd status`, or that the demo reads.

A role shows any figures, under names of its choice: a snapshot has them as a plain dict. `figures_of` decodes those
that have one of the forms below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from peerd.core.decoders import convert
from peerd.status.swarm_status import Figure, StatusPart

S = TypeVar("S", bound=StatusPart)


class AveragingFigures(StatusPart, frozen=True):
    """Counts of a stage peer's averaging rounds, and the last round's duration or failure."""

    rounds: int = 0
    failed: int = 0
    last_s: Figure = None  # duration of the last round
    last_failure: str | None = None


class MicrobatchFigures(StatusPart, frozen=True):
    """Numbers of a trainer's microbatches by outcome."""

    counted: int = 0
    in_flight: int = 0
    redone: int = 0  # repeated only on the stage whose peer was lost
    requeued: int = 0  # restarted at the first stage
    lost: int = 0
    not_finite: int = 0


class HandoverFigures(StatusPart, frozen=True):
    """Microbatches that a stage peer holds. `next`: how calls to each peer of the next stage travel."""

    in_flight: int = 0
    queue: int = 0
    kept_bytes: int = 0
    room_bytes: int = 0
    refused_full: int = 0
    next: dict[str, str] = msgspec.field(default_factory=dict)


class StalenessFigures(StatusPart, frozen=True):
    """Staleness of expert updates: the updates that others made between a forward and its backward."""

    mean: Figure = None
    most: int = 0


class CallTotals(StatusPart, frozen=True):
    """Numbers of a trainer's calls to experts, and of updates lost with their hosts."""

    forwards: int = 0
    backwards: int = 0
    lost_updates: int = 0


class TrainerExpertFigures(StatusPart, frozen=True):
    """Counts of a trainer's expert updates, and of its microbatches that pass through experts."""

    updates: int
    in_flight: int = 0
    too_old: int = 0
    not_summed: int = 0
    began_again: dict[str, int] = msgspec.field(default_factory=dict)
    staleness: StalenessFigures | None = None
    calls: CallTotals = CallTotals()


class EvaluationFigures(StatusPart, frozen=True):
    """The validation loss of one evaluation, and the step of the parameters."""

    step: int
    loss: Figure = None


class RoleFigures(StatusPart, frozen=True):
    """Figures of a trainer, a stage peer or a host of experts. Those of the other roles have their defaults."""

    waits_for: str | None = None
    step: int = 0
    loss: Figure = None
    evaluations: Sequence[EvaluationFigures] = ()
    microbatches: MicrobatchFigures = MicrobatchFigures()
    experts: TrainerExpertFigures | None = None
    stage: int = -1  # -1 if it has none
    held_samples: int = 0
    samples_per_s: float = 0.0
    hosted: int = 0
    updates: int = 0
    updates_per_s: float = 0.0
    adopted: int = 0


def figures_of(value: object, kind: type[S]) -> S | None:
    """Decode a figure. Returns None if it has another form, as that of a role that is not built in may have."""
    try:
        return convert(value, kind)
    except (msgspec.ValidationError, OverflowError, SystemError):  # the others: an integer beyond all floats
        return None
