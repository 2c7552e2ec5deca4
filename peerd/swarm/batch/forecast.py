"""Forecast of when the current batch will be complete, from how fast each trainer was until now.

A trainer's pace is measured where its reports arrive, while it works. Its own claims count for nothing, so a liar makes
a forecast wrong only by being slow. `whole_in_s` distributes what nobody has begun among the trainers at work, as they
will take it; what a departed trainer had begun counts as not begun. Decides nothing that could harm a step: a wrong
forecast costs a connection made too early or a check made too late. Invariants: a forecast is None or finite, never
negative and never beyond FORESEEABLE_S; at a constant pace it is right, up to one microbatch (`tests/swarm`). Extends
the rule of DeDLOC (Diskin et al. 2021, section 3.1), remaining samples over the sum of rates, by what is begun.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peerd.core.limits import FORESEEABLE_S

_KEEP = 0.85  # weight of earlier measurements, at each new one
_LEAST_S = 1e-6


@dataclass(slots=True)
class TrainerPace:
    """Seconds per microbatch of one trainer, while it has some under way; recent ones weigh more."""

    at: float = -math.inf  # when it last finished one
    _count: float = 0.0
    _worked_s: float = 0.0

    def finished(self, now: float, began: float) -> None:
        """Record one more microbatch, begun at `began`. Several in one report share the time since the last report."""
        took = now - max(began, self.at)
        if took > 0 or not self._count:
            self._count *= _KEEP
            self._worked_s = self._worked_s * _KEEP + max(took, 0.0)
        self._count += 1
        self.at = max(now, self.at)

    @property
    def seconds(self) -> float:
        """Measured seconds per microbatch, or 0 if never measured."""
        return max(self._worked_s / self._count, _LEAST_S) if self._count else 0.0


class WorkerPace(NamedTuple):
    """One trainer at work: `begun` microbatches are under way, and none of them was done for `waited_s` seconds."""

    seconds: float  # per microbatch; 0: unknown
    begun: int
    waited_s: float

    def free(self, usual_s: float = _LEAST_S) -> tuple[float, float]:
        """Seconds until it finishes what it has begun, and its seconds for each further microbatch.

        Without a pace it is assumed to need `usual_s`; if it is late, to continue as slowly as so far.
        """
        seconds, waited_s = self.seconds or usual_s, max(self.waited_s, 0.0)
        if not self.begun:
            return 0.0, seconds
        if waited_s > self.begun * seconds:
            return 0.0, waited_s / self.begun
        return self.begun * seconds - waited_s, seconds


def whole_in_s(left: int, workers: Iterable[WorkerPace]) -> float | None:
    """Seconds until `left` microbatches that nobody has begun, and all begun ones, are done, or None if unknown.

    Each worker finishes what it has begun; the rest is divided so that all workers end together. A worker without a
    pace is assumed to be as fast as the others on average, a late one to continue as slowly as so far.
    """
    workers = list(workers)
    if not left and not any(worker.begun for worker in workers):
        return 0.0
    usual_s = _usual_s(workers)
    if not usual_s:
        return None
    ends = sorted(worker.free(usual_s) for worker in workers)
    found = max(_shared_in_s(left, ends), ends[-1][0])
    return found if found <= FORESEEABLE_S else None


def shared_in_s(left: int, workers: Collection[WorkerPace]) -> float | None:
    """Like `whole_in_s`, but only until the `left` ones are done, by the workers that are free before that."""
    usual_s = _usual_s(workers)
    if not usual_s:
        return None
    return _shared_in_s(left, sorted(worker.free(usual_s) for worker in workers))


def _shared_in_s(left: int, ends: Sequence[tuple[float, float]]) -> float:
    """Seconds until `left` more are done. `ends`, sorted: when each worker is free, and its seconds per further one."""
    rate = offset = found = 0.0  # together they have done rate * t - offset by the time t
    for index, (free_s, seconds) in enumerate(ends):
        rate, offset = rate + 1 / seconds, offset + free_s / seconds
        found = (left + offset) / rate
        if index + 1 == len(ends) or found <= ends[index + 1][0]:
            break
    return found


def _usual_s(workers: Iterable[WorkerPace]) -> float:
    """Mean of the known paces, in seconds per microbatch, or 0 if none is known."""
    known = [worker.seconds for worker in workers if worker.seconds > 0]
    return math.fsum(known) / len(known) if known else 0.0
