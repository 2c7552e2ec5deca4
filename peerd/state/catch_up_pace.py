"""Pace of a member that catches up, sans-IO: whether its connection is fast enough to ever reach the swarm's step.

While a member downloads a state, each step of the swarm adds a total (summed gradient) to download, and totals are kept
for a bounded number of steps. So it must receive one total per step, and in addition the state within the steps for
which totals are kept. A member whose downloads were slower gains nothing from another one: after two unsuccessful
states it waits, longer each time, and reports what would help. It tries again at once if another donor appears, or if
steps become slow enough for its connection.

Rates are measured: received bytes of states and totals, and the time between the swarm's steps. Times are arguments, in
seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from peerd.core.limits import STATE_TOTALS, STATE_TRAIL
from peerd.wire.rate.backoff import backoff_s

_IN_VAIN: Final = 2  # unsuccessful states after which a line counts as too slow; one may be due to a disturbance
_SHORTEST_S: Final = 1.0  # shorter downloads do not measure the line
_STEPS: Final = 16  # steps of the swarm over which their duration is measured
_FIRST_PAUSE_S: Final = 30.0  # doubles each time
_LONGEST_PAUSE_S: Final = 900.0


class Sizes(NamedTuple):
    """Bytes of a whole state, and of the total of one step."""

    state: int
    total: int


class CatchUpPace:
    """The pace of one member. `kept`: most totals that a donor keeps."""

    def __init__(self, kept: int = STATE_TOTALS) -> None:
        self._kept = max(1, min(kept, STATE_TOTALS))
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)  # (time, step of the swarm)
        self._rate = 0.0  # bytes per second of the last state
        self._in_vain = 0  # states downloaded since the member last reached the swarm's step
        self._sizes = Sizes(0, 0)
        self._donors: frozenset[str] = frozenset()  # of the last state
        self._pause_s, self._again_at = 0.0, -math.inf

    def swarm_at(self, now: float, step: int) -> None:
        """Record that the swarm has reached `step`."""
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()  # it has gone back
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((now, step))

    def arrived(self) -> None:
        """Record that the member has reached the swarm's step."""
        self._in_vain = 0

    def fetched(self, now: float, sizes: Sizes, received: int, seconds: float, donors: Iterable[str]) -> None:
        """Record a finished download: `received` bytes of a state and of totals in `seconds`.

        `donors`: those that were available.
        """
        if seconds < _SHORTEST_S:
            return
        self._sizes, self._rate, self._donors = sizes, received / seconds, frozenset(donors)
        self._in_vain += 1
        self._pause_s = backoff_s(max(1, self._in_vain - _IN_VAIN + 1), _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._again_at = now + self._pause_s

    def step_s(self, now: float) -> float | None:
        """Seconds between the swarm's steps, or None while fewer than two have been seen."""
        if len(self._steps) < 2:
            return None
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        # The running step counts as soon as it takes longer than the earlier ones.
        return max((ended - began) / (last - first), (now - began) / (last - first + 1))

    def needed_bytes_per_s(self, now: float) -> float | None:
        """The rate at which a member catches up, or None while it is unknown."""
        step_s = self.step_s(now)
        if step_s is None or step_s <= 0 or not self._sizes.state:
            return None
        return (self._sizes.total + self._sizes.state / (self._kept + STATE_TRAIL)) / step_s

    def too_slow(self, now: float, donors: Iterable[str]) -> str | None:
        """Reason why downloading another state now would be useless, and what would help, or None if it may succeed."""
        needed = self.needed_bytes_per_s(now)
        if self._in_vain < _IN_VAIN or needed is None or self._rate >= needed or now >= self._again_at:
            return None
        if not self._donors.issuperset(donors):
            return None
        state, total = self._sizes
        step_s = self.step_s(now) or 1.0
        return (
            f"a faster connection: a state has {_size(state)} and each step adds {_size(total)}, which come from "
            f"{len(self._donors)} peer{'s' * (len(self._donors) != 1)} at {_size(self._rate)}/s, and the swarm makes "
            f"{60 / step_s:.3g} steps a minute, so that this peer never catches up. It would at {_size(needed)}/s: a "
            "faster connection here or at a donor, more donors of its stage, or a larger batch.target_samples. It "
            f"tries again after {self._pause_s:.0f} s, or when one of these changes"
        )


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
