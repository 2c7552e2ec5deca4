"""Division of a vector into shares by bandwidth, so that a round of averaging ends as early as the lines allow.

Model (DeDLOC, problem (1), for given roles; a vector has length 1, S peers send one): a sender that sums a share w
moves 1 - w as a sender and (S - 1) w as the owner of its share, in each direction: 1 + (S - 2) w in all. A helper that
sends no vector moves S w, a client that sums nothing 1. Up and down loads are equal, so the narrower direction counts.
A round of x seconds per byte then allows every peer a largest share, and the least x at which these shares add up to
one, and at which every sender can send its own vector, is the answer: the shares are filled like water.

The closed form here is for lines that are limited only at their ends; limits between pairs: `shares_lp`. The same
lines give the same bits on every machine and in any order (float64, exact sums, a fixed number of steps, shares in
whole billionths). Lines are what peers say of themselves: one that lies gets more or less work, never a wrong sum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from peerd.core.errors import PeerdError

UNITS = 1_000_000_000  # a share is a whole number of these
_STEPS = 64  # of bisection: more than float64 can tell apart
_WEIGHT_BITS = 52
_COUNT_BITS = 40  # of `apportioned`'s total, amply


class NoSplit(PeerdError):
    """No division of the work lets this round end."""


class Mode(Enum):
    """A peer's part in a round."""

    NODE = "node"  # sends a vector, sums a share
    CLIENT = "client"  # sends a vector, sums nothing: others cannot reach it
    AUX = "aux"  # sends no vector, sums a share


@dataclass(frozen=True, slots=True)
class MemberLine:
    """A peer's line. Rates in bytes/s; None: unknown; 0: it can send, but is never given a share."""

    peer: str
    mode: Mode = Mode.NODE
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    @property
    def sends(self) -> bool:
        return self.mode is not Mode.AUX


@dataclass(frozen=True, slots=True)
class Shares:
    """`fractions` by peer, adding up to one; `xi_s_per_byte`: a round's time over the vector's bytes, at best.

    `xi_s_per_byte` is 0 when nothing is known of any line, and when nothing has to travel. `why`: what sets the pace.
    """

    fractions: dict[str, float]
    xi_s_per_byte: float
    why: str


def shares(lines: Sequence[MemberLine]) -> Shares:
    """The best division of the work among `lines`.

    An unknown line counts as the mean of the known ones; if none is known, all count as equal. Raises NoSplit when
    nobody may sum or nobody sends, ValueError for rates that are no rates and for a peer named twice.
    """
    rates = widths(lines)
    known = any(line.up_bytes_per_s is not None or line.down_bytes_per_s is not None for line in lines)
    senders = sum(line.sends for line in lines)
    owners = [line for line in lines if line.mode is not Mode.CLIENT and rates[line.peer] > 0]
    if not senders:
        raise NoSplit("nobody sends a vector")
    if senders == 1 and any(line.mode is Mode.NODE for line in lines):
        own = {line.peer: 1.0 if line.mode is Mode.NODE else 0.0 for line in lines}
        return Shares(own, 0.0, "there is one sender, and it sums for itself")
    if not owners:
        raise NoSplit("nobody may sum: every peer is a client, or its line carries nothing")
    xi, why = _least_time(lines, rates, senders)
    fractions = proportional({line.peer: _cap(line.mode, rates[line.peer], senders, xi) for line in owners})
    complete = {line.peer: fractions.get(line.peer, 0.0) for line in lines}
    return Shares(complete, xi if known else 0.0, why if known else "no line is known: all count as equal")


def bound_s_per_byte(lines: Sequence[MemberLine], fractions: Mapping[str, float]) -> float:
    """Duration of a round in the model when the work is divided so, in seconds per byte of the vector."""
    rates, senders = widths(lines), sum(line.sends for line in lines)
    loads = [(load(line, fractions[line.peer], senders), rates[line.peer]) for line in lines]
    return max((amount / rate for amount, rate in loads if rate > 0), default=0.0)


def load(line: MemberLine, fraction: float, senders: int) -> float:
    """Load of a peer in each direction, in lengths of the vector."""
    if line.mode is Mode.AUX:
        return senders * fraction
    return 1 + (senders - 2) * fraction


def widths(lines: Sequence[MemberLine]) -> dict[str, float]:
    """Each peer's bytes/s in its narrower direction, with the unknown filled in. Errors: see `shares`."""
    found: dict[str, float | None] = {}
    for line in lines:
        rates = [rate for rate in (line.up_bytes_per_s, line.down_bytes_per_s) if rate is not None]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError("a line's rate must be a finite number of bytes/s, not below 0")
        if line.peer in found:
            raise ValueError("a peer has two lines")
        found[line.peer] = min(rates, default=None)
    known = [rate for rate in found.values() if rate]
    mean = math.fsum(known) / len(known) if known else 1.0
    return {peer: mean if rate is None else rate for peer, rate in found.items()}


def proportional(weights: Mapping[str, float]) -> dict[str, float]:
    """Fractions in the proportion of `weights`, in whole UNITS that add up to one, whatever the order of the peers."""
    order = sorted(weights)
    units = apportioned(UNITS, [weights[peer] for peer in order])
    return {peer: count / UNITS for peer, count in zip(order, units, strict=True)}


def apportioned(total: int, scores: Sequence[float]) -> list[int]:
    """`total` things divided in the proportion of `scores`: whole numbers that add up to it.

    Highest averages (Hagenbach-Bischoff): everyone gets the whole part of what is due, and the rest goes one by one to
    the largest score / (count + 1), the first of equals. Exact: in whole numbers of 2^-52 of the largest score.
    """
    if not all(math.isfinite(score) and score >= 0 for score in scores) or max(scores, default=0.0) <= 0:
        raise ValueError("scores must be finite, not below 0, and one of them above")
    top, under = max(scores).as_integer_ratio()
    parts = [score.as_integer_ratio() for score in scores]
    weights = [(above * under << _WEIGHT_BITS) // (below * top) for above, below in parts]
    whole = sum(weights)
    counts = [total * weight // whole for weight in weights]
    rest = total - sum(counts)
    if rest:
        queue = [(-_due(weight, count), i) for i, (weight, count) in enumerate(zip(weights, counts, strict=True))]
        heapq.heapify(queue)
        for _ in range(rest):
            i = queue[0][1]
            counts[i] += 1
            heapq.heapreplace(queue, (-_due(weights[i], counts[i]), i))
    return counts


def _due(weight: int, count: int) -> int:
    """weight / (count + 1), scaled: two such fractions that differ, do so by more than one, and whole numbers are
    compared a hundred times faster. Weights have _WEIGHT_BITS, counts up to _COUNT_BITS."""
    return (weight << 2 * _COUNT_BITS) // (count + 1)


def _least_time(lines: Sequence[MemberLine], rates: Mapping[str, float], senders: int) -> tuple[float, str]:
    """The least seconds per byte at which all can send and somebody sums every element; and what sets it."""
    sending = [(rates[line.peer], line.peer) for line in lines if line.sends and rates[line.peer] > 0]
    slowest = min(sending, default=(math.inf, ""))
    least = 1 / slowest[0]
    owners = [(line.mode, rates[line.peer]) for line in lines if line.mode is not Mode.CLIENT and rates[line.peer] > 0]

    def room(xi: float) -> float:
        return math.fsum(_cap(mode, rate, senders, xi) for mode, rate in owners)

    if room(least) >= 1:
        return least, f"the slowest sender …{slowest[1][-8:]} sets the pace"
    low, high = least, max(least, senders / max(rate for _, rate in owners))
    for _ in range(_STEPS):
        middle = low + (high - low) / 2
        low, high = (low, middle) if room(middle) >= 1 else (middle, high)
    return high, "the lines of all who sum are full"


def _cap(mode: Mode, rate: float, senders: int, xi: float) -> float:
    """The largest share that a line carries in `xi` seconds per byte, when `xi` is enough to send one vector."""
    if mode is Mode.AUX:
        return min(1.0, xi * rate / senders)
    if senders == 2:  # whatever it sums, it sends the rest: one vector in all
        return 1.0
    return min(1.0, max(0.0, (xi * rate - 1) / (senders - 2)))
