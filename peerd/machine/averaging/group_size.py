"""Size of averaging groups: the rule of DeDLOC's appendix C, and the failure rate that it needs.

Groups of m members need d = log_m N rounds for the mean of all N, and a group has no failure with probability (1 -
p)^m; the rule minimises d / (1 - p)^m. `topology.GroupTopology` applies it in a run, where only a failed group is
repeated. This module only decides, and gives the same result on every machine for the same numbers.
"""

from __future__ import annotations

import decimal
import functools
from dataclasses import dataclass

from peerd.machine.averaging.moshpit import smallest_side

_EXACT = decimal.Context(prec=28)  # its ln is rounded the same way on every machine, unlike libm's


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Groups of at most `size` peers that average in `rounds` rounds; size 1 and 0 rounds for a single peer."""

    size: int
    rounds: int
    why: str


def group_size(peers: int, failure: float, largest: int | None = None) -> GroupSize:
    """The best group size for `peers` peers, each of which fails in a round with probability `failure` (from 0, below
    1).

    `largest`: upper bound of a group's size (at least 2), or None. Bandwidth plays no role: all-reduce moves two
    vectors per peer and round in groups of any size. Of equal costs the fewest rounds win. Raises ValueError for
    invalid arguments.
    """
    largest = peers if largest is None else largest
    if peers < 1 or not 0 <= failure < 1 or (peers > 1 and largest < 2):
        raise ValueError(f"no groups of up to {largest} for {peers} peers with failure probability {failure}")
    if peers == 1:
        return GroupSize(1, 0, "there is no other peer")
    sizes = ((smallest_side(peers, rounds), rounds) for rounds in range(1, (peers - 1).bit_length() + 1))
    allowed = [(size, rounds) for size, rounds in sizes if size <= largest]
    alive = _ln(_EXACT.subtract(1, decimal.Decimal(repr(float(failure)))))

    def cost(choice: tuple[int, int]) -> decimal.Decimal:
        size, rounds = choice
        return _EXACT.subtract(_ln(decimal.Decimal(rounds)), _EXACT.multiply(size, alive))

    size, rounds = min(allowed, key=cost)  # the first of equals has the fewest rounds
    if rounds == 1:
        why = f"one group of all {peers}: " + ("no failures are expected" if not failure else "few enough")
    else:
        why = f"{rounds} rounds in groups of {size}: no failure among {size} peers has p = {(1 - failure) ** size:.2f}"
        why += (
            f", among {peers} peers {(1 - failure) ** peers:.2f}"
            if largest >= peers
            else f", at most {largest} allowed"
        )
    return GroupSize(size, rounds, why)


@functools.lru_cache(256)
def _ln(value: decimal.Decimal) -> decimal.Decimal:
    return _EXACT.ln(value)


class FailureRate:
    """Estimated fraction of peers that fail in a round; older rounds have exponentially less weight.

    The estimate starts at `prior`, which counts like `weight` observed peers. `fade` is the decay per round.
    """

    def __init__(self, prior: float = 0.01, weight: float = 20.0, fade: float = 0.98) -> None:
        self._lost, self._seen, self._fade = prior * weight, weight, fade

    def observe(self, seen: int, lost: int) -> None:
        """Record a round with `seen` peers, of which `lost` did not finish it."""
        if not 0 <= lost <= seen:
            raise ValueError(f"{lost} of {seen} peers cannot be lost")
        self._lost = self._lost * self._fade + lost
        self._seen = self._seen * self._fade + seen

    @property
    def rate(self) -> float:
        """The failure rate, below 1, rounded to thousandths so that noise does not change the groups."""
        return min(0.999, round(self._lost / self._seen, 3))
