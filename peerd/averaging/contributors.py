"""ContributorChoice: which members of a stage contribute gradients, so that the swarm's steps are as short as possible.

A member contributes the microbatches that it computes, but everybody waits while its line (internet connection)
carries a vector: one line of 1 Mb/s among fifteen of 100 makes a round last fifty times as long. DeDLOC (Diskin et al.
2021, section 3.2) solves this as a mixed integer programme over c_i, "does peer i contribute?". For given contributors
the best round is known in closed form (`shares`), so it is enough to search over sets of contributors, and the best set
has a simple shape: the slowest lines rest first, then the members that compute least. `best` tries each length of these
two prefixes (only some lengths if there are many members), and for few members also single changes of the result. A
resting member that others can reach sums parts for them like a helper. At least two members contribute, even if one
alone would be faster, so that the stage's state survives the loss of one.

A step takes the time of computing its batch plus that of averaging its gradients; in a delayed run, the longer of both.
This module only decides. Rates are reported by peers or measured by the conductor: a peer that reports false rates is
left out, or slows the step down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peerd.averaging.shares import MemberLine, Mode

WORTH_RESTING = 1.05  # ratio to the best step's duration above which the set of contributors changes
LEAST = 2  # contributors of a stage with at least two members, so that its state survives the loss of one
HARMLESS = 1.01  # ratio to the best step's duration up to which another member may contribute
_FEW = 12  # up to this number of members single changes are tried as well
_LADDER = 1.5  # ratio of successive prefix lengths that are tried, from _EACH on
_EACH = 8  # all prefix lengths below this one are tried
_MANY = 64  # number of lines above which arrays are faster than loops
_STEPS = 40  # of the bisection for a rate
_MOST_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True)
class ContributorRates:
    """A member that could contribute gradients. `per_s`: microbatches that it computes per second, or 0 if unknown."""

    line: MemberLine
    per_s: float = 0.0

    @property
    def peer(self) -> str:
        return self.line.peer


@dataclass(frozen=True, slots=True)
class StepCost:
    """The parts of a step's duration that do not depend on which members of this stage contribute.

    `vector_bytes`: size of a gradient on the wire. `other_computing_s` and `other_averaging_s`: lower bounds that other
    stages set for computing the batch and for averaging. `overlaps`: averaging runs in parallel with computing.
    """

    microbatches: float
    vector_bytes: float
    overlaps: bool = False
    other_computing_s: float = 0.0
    other_averaging_s: float = 0.0


class ContributorChoice:
    """Chooses which members of one stage contribute gradients.

    An unknown line or pace counts as the median of the known ones; if no line is known, lines cost nothing. `helpers`
    sum parts in any case.
    """

    def __init__(
        self, candidates: Iterable[ContributorRates], cost: StepCost, helpers: Iterable[MemberLine] = ()
    ) -> None:
        given = sorted(candidates, key=lambda one: one.peer)
        self._cost = cost
        self._pace_known = any(one.per_s > 0 for one in given)
        usual_per_s = statistics.median([one.per_s for one in given if one.per_s > 0] or [1.0])
        self._per_s = {one.peer: one.per_s or usual_per_s for one in given}
        rates = {one.peer: _narrower(one.line) for one in given}
        usual_rate = statistics.median([rate for rate in rates.values() if rate is not None] or [_MOST_BYTES_PER_S])
        self._rates = {peer: usual_rate if rate is None else rate for peer, rate in rates.items()}
        self._sums = {one.peer for one in given if one.line.mode is Mode.NODE}
        self._helper_rates = [rate if (rate := _narrower(line)) is not None else usual_rate for line in helpers]
        self._peers = tuple(self._rates)
        self._least = min(LEAST, len(self._peers))

    def step_s(self, contributing: Iterable[str]) -> float:
        """Duration in seconds of a step with these contributors, or infinity if it is impossible."""
        return self._step_s(set(contributing), self._rates)

    def _step_s(self, found: set[str], rates: dict[str, float]) -> float:
        if not found:
            return math.inf
        computing_s = max(self.computing_s(found), self._cost.other_computing_s)
        averaging_s = max(self._averaging_s(found, rates), self._cost.other_averaging_s)
        return max(computing_s, averaging_s) if self._cost.overlaps else computing_s + averaging_s

    def computing_s(self, contributing: Iterable[str]) -> float:
        """Seconds that these members need to compute a batch."""
        return self._cost.microbatches / math.fsum(self._per_s[peer] for peer in contributing)

    def averaging_s(self, contributing: Iterable[str]) -> float:
        """Duration in seconds of an averaging round of these members, with the others as helpers."""
        return self._averaging_s(set(contributing), self._rates)

    def _averaging_s(self, contributing: set[str], rates: dict[str, float]) -> float:
        if len(contributing) < 2 or not self._cost.vector_bytes:
            return 0.0
        nodes = [rates[peer] for peer in contributing if peer in self._sums]
        helpers = [rates[peer] for peer in self._peers if peer in self._sums and peer not in contributing]
        least = 1 / min(rates[peer] for peer in contributing)
        filled = least_s_per_byte(nodes, helpers + self._helper_rates, len(contributing))
        return max(least, filled) * self._cost.vector_bytes

    # --- choosing ---------------------------------------------------------------------------------------------

    def best(self) -> frozenset[str]:
        """The contributors that make the shortest step, at least `LEAST` of them; of equally good sets the largest."""
        by_line = sorted(self._peers, key=lambda peer: (self._rates[peer], self._per_s[peer], peer))
        all_by_pace = sorted(self._peers, key=lambda peer: (self._per_s[peer], self._rates[peer], peer))
        found, found_s = frozenset(self._peers), self.step_s(self._peers)
        for slow in _lengths(len(by_line)):
            left = set(by_line[slow:])
            by_pace = [peer for peer in all_by_pace if peer in left]
            for weak in _lengths(len(by_pace)):
                tried = frozenset(by_pace[weak:])
                if len(tried) < self._least:
                    break
                if (tried_s := self.step_s(tried)) < found_s:
                    found, found_s = tried, tried_s
        return self._polished(found, found_s) if len(self._peers) <= _FEW else found

    def _polished(self, found: frozenset[str], found_s: float) -> frozenset[str]:
        """`found`, improved by adding, removing or swapping single members until no such change shortens the step."""
        while True:
            inside, outside = sorted(found), sorted(set(self._peers) - found)
            tries = [changed for peer in self._peers if len(changed := found ^ {peer}) >= self._least]
            tries += [found ^ {one, other} for one in inside for other in outside]
            shortest_s, shortest = min(((self.step_s(tried), sorted(tried)) for tried in tries), default=(math.inf, []))
            if not shortest_s < found_s:
                return found
            found, found_s = frozenset(shortest), shortest_s

    def choose(self, resting: frozenset[str] = frozenset()) -> frozenset[str]:
        """The members that should rest, given those that rest now.

        The set changes only if the step becomes clearly shorter; a member that costs almost nothing contributes. If no
        pace is known, gradients cannot be weighed against their cost, and no further member rests.
        """
        resting &= frozenset(self._peers)
        if not self._pace_known:
            return resting
        best = self.best()
        best_s, now = self.step_s(best), frozenset(self._peers) - resting
        keeps = now if self.step_s(now) <= WORTH_RESTING * best_s else best
        for peer in sorted(set(self._peers) - keeps, key=lambda peer: (-self._rates[peer], -self._per_s[peer], peer)):
            if self.step_s(keeps | {peer}) <= HARMLESS * best_s:
                keeps |= {peer}
        return frozenset(self._peers) - keeps

    def needed_bytes_per_s(self, contributing: Iterable[str], peer: str) -> float | None:
        """The least rate, in bytes/s, that `peer`'s line needs for it to contribute besides these members, or None.

        The rate is that of the line's slower direction. Returns None if no rate suffices.
        """
        others = set(contributing) - {peer}
        limit_s = HARMLESS * self.step_s(others)

        def fits(rate: float) -> bool:
            return self._step_s(others | {peer}, self._rates | {peer: rate}) <= limit_s

        low, high = self._rates[peer], _MOST_BYTES_PER_S
        if not fits(high):
            return None
        for _ in range(_STEPS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def least_s_per_byte(nodes: Sequence[float], helpers: Sequence[float], senders: int) -> float:
    """Shortest round in seconds per byte of the vector: the peers' lines can just carry shares that add up to one.

    `nodes` and `helpers`: bytes/s of the peers that sum; all nodes are among the `senders`. Returns infinity if nobody
    sums. Same rule as in `shares`, solved by breakpoints instead of bisection, because one choice evaluates it hundreds
    of times.
    """
    if senders == 2 and nodes:
        return 0.0
    if len(nodes) + len(helpers) > _MANY:
        return _least_of_many(nodes, helpers, senders)
    events: list[tuple[float, float]] = []
    for rate in nodes:
        slope = rate / (senders - 2)
        events += [(1 / rate, slope), ((senders - 1) / rate, -slope)]
    for rate in helpers:
        events += [(0.0, rate / senders), (senders / rate, -rate / senders)]
    room = slope_now = at = 0.0
    for begins, change in sorted(events):
        if slope_now > 0 and room + slope_now * (begins - at) >= 1 - 1e-12:
            return at + max(0.0, 1 - room) / slope_now
        room, at = room + slope_now * (begins - at), begins
        slope_now += change
    return math.inf


def _least_of_many(own: Sequence[float], others: Sequence[float], senders: int) -> float:
    """Like `least_s_per_byte`, vectorised for many lines."""
    import numpy as np  # imported late: slow to import, and light commands load this module

    nodes, helpers = np.array(own), np.array(others)
    nothing = np.zeros_like(helpers)
    begins = np.concatenate([1 / nodes, (senders - 1) / nodes, nothing, senders / helpers])
    slopes = np.concatenate([nodes / (senders - 2), -nodes / (senders - 2), helpers / senders, -helpers / senders])
    order = np.argsort(begins, kind="stable")
    begins, slope = begins[order], np.cumsum(slopes[order])
    room = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(begins))])
    at = int(np.searchsorted(room, 1 - 1e-12))
    if at == 0 or at >= len(room) or slope[at - 1] <= 0:
        return math.inf
    return float(begins[at - 1] + max(0.0, 1 - room[at - 1]) / slope[at - 1])


def with_unknown(member: ContributorRates, *, line: bool, pace: bool) -> ContributorRates:
    """The member with its line or its pace unknown, because old measurements may be outdated."""
    fresh = replace(member.line, up_bytes_per_s=None, down_bytes_per_s=None) if line else member.line
    return ContributorRates(fresh, 0.0 if pace else member.per_s)


def _narrower(line: MemberLine) -> float | None:
    return min((rate for rate in (line.up_bytes_per_s, line.down_bytes_per_s) if rate), default=None)


def _lengths(count: int) -> list[int]:
    """Prefix lengths to try for `count` members: all small ones, then at growing distances."""
    few = count <= _MANY
    found, length = list(range(min(count, _EACH if few else _EACH // 2))), float(_EACH if few else _EACH // 2)
    while length < count:
        found.append(int(length))
        length *= _LADDER if few else 2 * _LADDER
    return found
