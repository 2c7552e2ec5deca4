"""Answer rule of one round of calls to experts, sans-IO: when the round is over, and whether every sample has enough.

All calls share one deadline. Once every sample has `k_min` answers, the remaining calls have `grace_s` more; later
answers do not count. The round is over at once when all calls have ended, or when a sample can no longer get its
`k_min` answers: then `shortage` names the experts that were asked for it and what became of each.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from peerd.core.errors import LocalError
from peerd.core.limits import RPC_DEADLINE_S
from peerd.run.grid import Uid

OPEN: Final = "has not answered"
_NAMED: Final = 8  # experts in one message
_REASON_CHARS: Final = 160  # of a host's error text

_TIMES: Final = 4.0  # times the median call
_AGAIN, _IN_VAIN_MOST = 2.0, 32.0  # times the limit that was too short; at most this many times the normal limit
_REMEMBERED: Final = 32  # calls
MOST_S: Final = RPC_DEADLINE_S  # no host works on a call for longer


class AnswerRule:
    """Rule of one round. `asks`: for each call, the expert and the numbers of its samples."""

    def __init__(self, asks: Sequence[tuple[Uid, Sequence[int]]], samples: int, k_min: int, grace_s: float) -> None:
        self._asks, self._k_min, self._grace_s = asks, k_min, grace_s
        self._answered, self._possible = [0] * samples, [0] * samples
        for uid, numbers in asks:
            for number in numbers:
                if not 0 <= number < samples:
                    raise LocalError(f"sample {number} of {samples} for expert {uid}")
                self._possible[number] += 1
        self._wanting = sum(k_min > 0 for _ in range(samples))  # samples without enough answers
        self._lost = sum(possible < k_min for possible in self._possible)  # samples that cannot get enough
        self._became: list[str | None] = [OPEN] * len(asks)  # None: it answered
        self._open = len(asks)
        self._ends: float | None = None

    def begin(self, now: float, timeout_s: float) -> None:
        """Set the deadline, `timeout_s` from now, once all calls are sent."""
        self._ends = now + timeout_s
        self._look(now)

    def answered(self, now: float, call: int) -> bool:
        """Record a valid answer to a call; returns False if it does not count, because it is late or a duplicate."""
        if self._became[call] != OPEN or self.over(now):
            return False
        self._became[call] = None
        self._open -= 1
        for number in self._asks[call][1]:
            self._answered[number] += 1
            self._wanting -= self._answered[number] == self._k_min
        self._look(now)
        return True

    def failed(self, now: float, call: int, why: str) -> None:
        """Record that the call has ended without a valid answer."""
        if self._became[call] != OPEN:
            return
        self._became[call] = why
        self._open -= 1
        for number in self._asks[call][1]:
            self._possible[number] -= 1
            self._lost += self._possible[number] == self._k_min - 1
        self._look(now)

    def wake_at(self) -> float:
        """Time at which the round is over at the latest."""
        if self._ends is None:
            raise LocalError("the round has not begun")
        return self._ends

    def over(self, now: float) -> bool:
        """True if the round is over."""
        return now >= self.wake_at()

    def late(self) -> list[int]:
        """Calls that have neither been answered nor failed."""
        return [call for call, became in enumerate(self._became) if became == OPEN]

    def shortage(self) -> str | None:
        """Text on why a sample has fewer than `k_min` answers, once the round is over, or None if all have enough."""
        if not self._wanting:
            return None
        lost = [number for number, possible in enumerate(self._possible) if possible < self._k_min]
        short = lost or [number for number, count in enumerate(self._answered) if count < self._k_min]
        sample = short[0]
        told = list(self._fates(sample))
        more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        fates = "; ".join(told[:_NAMED]) + more if told else "no expert was asked, because none is known to be alive"
        others = f", and {len(short) - 1} more samples have too few" if len(short) > 1 else ""
        return f"sample {sample} has {self._answered[sample]} of {self._k_min} answers{others}: {fates}"

    def check(self) -> None:
        """Raise AssertionError unless the counts match what became of the calls."""
        for number, count in enumerate(self._answered):
            fates = [
                b for (_, numbers), b in zip(self._asks, self._became, strict=True) for n in numbers if n == number
            ]
            assert count == fates.count(None)
            assert self._possible[number] == len([fate for fate in fates if fate in (None, OPEN)])
        assert self._wanting == sum(count < self._k_min for count in self._answered)
        assert self._lost == sum(possible < self._k_min for possible in self._possible)

    def _fates(self, sample: int) -> Iterator[str]:
        for (uid, numbers), became in zip(self._asks, self._became, strict=True):
            if sample in numbers:
                yield f"expert {uid} {'answered' if became is None else became[:_REASON_CHARS]}"

    def _look(self, now: float) -> None:
        if self._ends is None:
            return
        if not self._open or self._lost:
            self._ends = min(self._ends, now)
        elif not self._wanting:
            self._ends = min(self._ends, now + self._grace_s)


class RoundLimit:
    """Time limit of a round of calls to experts, from the durations of recent calls. Sans-IO; times in seconds.

    The run file sets the minimum. Slow or busy machines and connections need more: the limit is several times the
    median call, and doubles after a round that timed out without enough answers. Hostile input: the durations of calls.
    The median counts, so a few slow hosts do not raise the limit. If most hosts are silent, the limit grows to at most
    `_IN_VAIN_MOST` times its normal value.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._last_s = 0.0  # median of the last round
        self._in_vain_s = 0.0

    @property
    def seconds(self) -> float:
        """The limit of the next round, in seconds."""
        usual_s = max(self._last_s, statistics.median(self._took) if self._took else 0.0)
        first_s = max(self._least_s, min(MOST_S, _TIMES * usual_s))
        again_s = min(_AGAIN * self._in_vain_s, _IN_VAIN_MOST * first_s, MOST_S)
        return max(first_s, again_s)

    @property
    def stretch(self) -> float:
        """Ratio of the limit to the minimum in the run file."""
        return self.seconds / self._least_s

    def ended(self, limit_s: float, took: Sequence[float], *, in_vain: bool) -> None:
        """Record the end of a round with this limit. `took`: seconds of each answer; `in_vain`: too few in time."""
        self._took += took
        if in_vain:
            self._in_vain_s = max(self._in_vain_s, limit_s)
        elif took:
            self._in_vain_s, self._last_s = 0.0, statistics.median(took)
