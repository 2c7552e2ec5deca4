"""Size of averaging groups: the rule of DeDLOC's appendix C, and the failure rate that it needs.

Groups of m need d = log_m N rounds for the mean of all, and a group has no failure with probability (1 - p)^m; the
choice minimises d / (1 - p)^m. `topology.GroupTopology` asks it in a run, where a group that fails is repeated alone.
Decides only; the same everywhere for the same numbers.
"""

from __future__ import annotations

import decimal
import functools
from dataclasses import dataclass

from peerd.machine.averaging.moshpit import smallest_side

_EXACT = decimal.Context(prec=28)  # ln is rounded the same way on every machine, unlike a libm's


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Groups of `size` at most, met in `rounds` rounds; both 1 and 0 when there is nobody to meet."""

    size: int
    rounds: int
    why: str


def group_size(peers: int, failure: float, largest: int | None = None) -> GroupSize:
    """The best size for `peers` of which each fails a round with probability `failure` (0 up to below 1).

    `largest`: of a group, if there is such a bound (at least 2). Bandwidth does not enter: all-reduce moves two vectors
    per peer and round in groups of any size. Equal costs: fewer rounds. The same everywhere for the same numbers.
    """
    largest = peers if largest is None else largest
    if peers < 1 or not 0 <= failure < 1 or (peers > 1 and largest < 2):
        raise ValueError(f"no groups of up to {largest} for {peers} peers that fail with {failure}")
    if peers == 1:
        return GroupSize(1, 0, "nobody else is there")
    sizes = ((smallest_side(peers, rounds), rounds) for rounds in range(1, (peers - 1).bit_length() + 1))
    allowed = [(size, rounds) for size, rounds in sizes if size <= largest]
    alive = _ln(_EXACT.subtract(1, decimal.Decimal(repr(float(failure)))))

    def cost(choice: tuple[int, int]) -> decimal.Decimal:
        size, rounds = choice
        return _EXACT.subtract(_ln(decimal.Decimal(rounds)), _EXACT.multiply(size, alive))

    size, rounds = min(allowed, key=cost)  # the first of equals has the fewest rounds
    if rounds == 1:
        why = f"one group of all {peers}: " + ("nobody is expected to fail" if not failure else "few enough to try")
    else:
        why = f"{rounds} rounds in groups of {size}: a group of {size} is whole with {(1 - failure) ** size:.2f}"
        why += (
            f", one of {peers} with {(1 - failure) ** peers:.2f}"
            if largest >= peers
            else f", at most {largest} allowed"
        )
    return GroupSize(size, rounds, why)


@functools.lru_cache(256)
def _ln(value: decimal.Decimal) -> decimal.Decimal:
    return _EXACT.ln(value)


class FailureRate:
    """Estimate of the share of peers that fail in a round, from the last rounds; older rounds fade.

    Begins at `prior`, which counts like `weight` peers seen.
    """

    def __init__(self, prior: float = 0.01, weight: float = 20.0, fade: float = 0.98) -> None:
        self._lost, self._seen, self._fade = prior * weight, weight, fade

    def observe(self, seen: int, lost: int) -> None:
        """A round with `seen` peers, `lost` of which did not end it."""
        if not 0 <= lost <= seen:
            raise ValueError(f"{lost} of {seen} peers cannot be lost")
        self._lost = self._lost * self._fade + lost
        self._seen = self._seen * self._fade + seen

    @property
    def rate(self) -> float:
        """The failure rate, below 1, rounded to thousandths so that noise does not change the groups."""
        return min(0.999, round(self._lost / self._seen, 3))
