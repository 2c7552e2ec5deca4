"""Division of a vector into shares by bandwidth, so that an averaging round ends as early as the peers' lines allow.

Model (DeDLOC, problem (1), for given roles; the vector has length 1 and S peers send one): a sender that sums a share w
moves 1 - w as a sender and (S - 1) w as the owner of its share, in each direction: 1 + (S - 2) w in total. A helper
that sends no vector moves S w, a client that sums nothing 1. Upload and download loads are equal, so the narrower
direction counts. A round of x seconds per byte then allows every peer a largest share. The result is the least x at
which these shares add up to one and every sender can send its own vector (water-filling).

This closed form is for lines that are limited only at their ends; for limits between pairs see `shares_lp`. The same
lines give the same bits on every machine and in any order (float64, exact sums, a fixed number of steps, shares in
whole billionths). Rates are the peers' own reports: a false one changes the amount of work, but never the sum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from peerd.core.errors import PeerdError

UNITS = 1_000_000_000  # a share is a whole number of these
_STEPS = 64  # of the bisection; enough for the resolution of float64
_WEIGHT_BITS = 52
_COUNT_BITS = 40  # more than the total of `apportioned` needs


class NoSplit(PeerdError):
    """No division of the work lets this round finish."""


class Mode(Enum):
    """A peer's role in a round."""

    NODE = "node"  # sends a vector, sums a share
    CLIENT = "client"  # sends a vector, sums nothing: others cannot reach it
    AUX = "aux"  # sends no vector, sums a share


@dataclass(frozen=True, slots=True)
class MemberLine:
    """A peer's internet connection. Rates in bytes/s, None if unknown; with rate 0 it can send but gets no share."""

    peer: str
    mode: Mode = Mode.NODE
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    @property
    def sends(self) -> bool:
        return self.mode is not Mode.AUX


@dataclass(frozen=True, slots=True)
class Shares:
    """A division of the work. `fractions`: by peer, with sum 1. `why`: what limits the round.

    `xi_s_per_byte`: the least time of a round per byte of the vector; 0 if no line is known or nothing has to be sent.
    """

    fractions: dict[str, float]
    xi_s_per_byte: float
    why: str


def shares(lines: Sequence[MemberLine]) -> Shares:
    """The division of the work among the peers of `lines` that ends the round earliest.

    An unknown line counts as the mean of the known ones; if none is known, all count as equal. Raises NoSplit if no
    peer may sum or none sends, and ValueError for invalid rates or a peer that is listed twice.
    """
    rates = widths(lines)
    known = any(line.up_bytes_per_s is not None or line.down_bytes_per_s is not None for line in lines)
    senders = sum(line.sends for line in lines)
    owners = [line for line in lines if line.mode is not Mode.CLIENT and rates[line.peer] > 0]
    if not senders:
        raise NoSplit("nobody sends a vector")
    if senders == 1 and any(line.mode is Mode.NODE for line in lines):
        own = {line.peer: 1.0 if line.mode is Mode.NODE else 0.0 for line in lines}
        return Shares(own, 0.0, "the only sender sums its own vector")
    if not owners:
        raise NoSplit("nobody may sum: every peer is a client, or has a line with rate 0")
    xi, why = _least_time(lines, rates, senders)
    fractions = proportional({line.peer: _cap(line.mode, rates[line.peer], senders, xi) for line in owners})
    complete = {line.peer: fractions.get(line.peer, 0.0) for line in lines}
    return Shares(complete, xi if known else 0.0, why if known else "no rate is known: all count as equal")


def bound_s_per_byte(lines: Sequence[MemberLine], fractions: Mapping[str, float]) -> float:
    """Duration of a round with this division in the model, in seconds per byte of the vector."""
    rates, senders = widths(lines), sum(line.sends for line in lines)
    loads = [(load(line, fractions[line.peer], senders), rates[line.peer]) for line in lines]
    return max((amount / rate for amount, rate in loads if rate > 0), default=0.0)


def load(line: MemberLine, fraction: float, senders: int) -> float:
    """A peer's traffic in each direction, in vector lengths."""
    if line.mode is Mode.AUX:
        return senders * fraction
    return 1 + (senders - 2) * fraction


def widths(lines: Sequence[MemberLine]) -> dict[str, float]:
    """Each peer's rate in its narrower direction, in bytes/s, with unknown rates filled in. Raises like `shares`."""
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
    """Fractions proportional to `weights`, in whole UNITS that add up to one, independent of the order of the peers."""
    order = sorted(weights)
    units = apportioned(UNITS, [weights[peer] for peer in order])
    return {peer: count / UNITS for peer, count in zip(order, units, strict=True)}


def apportioned(total: int, scores: Sequence[float]) -> list[int]:
    """Divide `total` in proportion to `scores`, into whole numbers that add up to it.

    Highest averages (Hagenbach-Bischoff): each gets the whole part of its quota; the remaining units are assigned one
    by one to the largest score / (count + 1), the first of equals. Exact: computed in integers, in units of 2^-52 of
    the largest score.
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
    """weight / (count + 1), scaled to an integer, because integers compare a hundred times faster than fractions.

    Two different quotients differ by more than one after scaling: weights have _WEIGHT_BITS, counts up to _COUNT_BITS.
    """
    return (weight << 2 * _COUNT_BITS) // (count + 1)


def _least_time(lines: Sequence[MemberLine], rates: Mapping[str, float], senders: int) -> tuple[float, str]:
    """The least seconds per byte at which every sender can send and all elements are summed, and what limits it."""
    sending = [(rates[line.peer], line.peer) for line in lines if line.sends and rates[line.peer] > 0]
    slowest = min(sending, default=(math.inf, ""))
    least = 1 / slowest[0]
    owners = [(line.mode, rates[line.peer]) for line in lines if line.mode is not Mode.CLIENT and rates[line.peer] > 0]

    def room(xi: float) -> float:
        return math.fsum(_cap(mode, rate, senders, xi) for mode, rate in owners)

    if room(least) >= 1:
        return least, f"the slowest sender …{slowest[1][-8:]} limits the round"
    low, high = least, max(least, senders / max(rate for _, rate in owners))
    for _ in range(_STEPS):
        middle = low + (high - low) / 2
        low, high = (low, middle) if room(middle) >= 1 else (middle, high)
    return high, "the lines of all summing peers are fully used"


def _cap(mode: Mode, rate: float, senders: int, xi: float) -> float:
    """The largest share that a line can carry in `xi` seconds per byte, if `xi` is enough to send one vector."""
    if mode is Mode.AUX:
        return min(1.0, xi * rate / senders)
    if senders == 2:  # it moves one vector in total, for any share
        return 1.0
    return min(1.0, max(0.0, (xi * rate - 1) / (senders - 2)))
