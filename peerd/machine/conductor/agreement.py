"""Culprit search by bisection when members of one stage report different digests of a round's sum: all must be equal.

Either a peer that summed a share sent different sums to different members, or a member has, or reports, another vector
than it was sent. A digest does not show which of the two; so the round is repeated without the shares of half of the
suspects, then of half of the rest: when sums still differ, the culprit is one of the peers that had shares in every
such round, else one of those that had none. The last suspect is `barred`: it takes part and sums nothing, for a long
time. Where sums differ although as many are barred as may lie (a third), the members that reported another digest than
the majority are at fault instead; without a majority, the members by turns. For one stage; decides only.
Hostile input: a liar costs an attempt for each halving and in the end its share, or its place; never a wrong step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_BARRED_STEPS = 64  # for which a barred peer sums nothing; twice as many each time
_TIMES_MOST = 8


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on digests that differ. `note`: in words; `guilty`: members that are to be put aside."""

    note: str
    guilty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SummingPeers:
    """The peers that had shares in a round (`summers`), and the members that could have: those that can be reached."""

    summers: frozenset[str]
    able: frozenset[str]


class Agreement:
    """See the module's header. `idle`: the peers that get no share in the next attempt."""

    def __init__(self) -> None:
        self._suspects: tuple[str, ...] = ()
        self._resting: frozenset[str] = frozenset()  # without a share, to see whether sums agree then
        self._barred: dict[str, int] = {}  # peer -> the step until which it is barred
        self._times: Counter[str] = Counter()
        self._found = 0  # peers barred for the disagreement that goes on
        self._turns: Counter[str] = Counter()

    @property
    def idle(self) -> frozenset[str]:
        return self._resting | self._barred.keys()

    def agreed(self) -> None:
        """All digests are equal: a summer that lies is one of those that had no share."""
        if self._resting:
            self._suspects = tuple(sorted(self._resting))
        self._found = 0

    def step_made(self, step: int) -> None:
        """Innocent peers get their shares back; barred ones when their time is over."""
        if len(self._suspects) == 1:
            self._bar(self._suspects[0], step)
        self._resting = frozenset()
        self._barred = {peer: until for peer, until in self._barred.items() if until > step}

    def judge(
        self, step: int, digests: Mapping[str, bytes], round_: SummingPeers, since: Callable[[str], float]
    ) -> Judgement:
        """The verdict on a round whose members report these digests, not all equal."""
        most, count = Counter(digests.values()).most_common(1)[0]
        others = tuple(sorted(peer for peer, digest in digests.items() if digest != most))
        told = f"{len(set(digests.values()))} different sums among {len(digests)} members"
        if self._found > len(digests) // 3:  # bound on the liars that are sought among summers
            guilty = others if 2 * count > len(digests) else (self._next_in_turn(digests, since),)
            self._pardon()
            return Judgement(f"{told}, whoever sums", guilty)
        mine = tuple(sorted(round_.summers))
        self._suspects = tuple(peer for peer in self._suspects if peer in mine) or mine
        if len(self._suspects) > 1:
            self._resting = frozenset(self._suspects[: len(self._suspects) // 2])
            return Judgement(f"{told}: the round is repeated with other shares")
        self._found += 1
        if not self._suspects:
            return Judgement(told)
        culprit = self._suspects[0]
        self._bar(culprit, step)
        if round_.able - self._barred.keys():
            return Judgement(f"{told}: peer …{culprit[-8:]} had a share whenever they differed, and sums nothing now")
        self._found = len(digests)  # no other peer is left to sum: only members can be at fault
        self._barred.clear()
        return Judgement(told)

    def _bar(self, peer: str, step: int) -> None:
        self._barred[peer] = step + _BARRED_STEPS * 2 ** min(self._times[peer], _TIMES_MOST)
        self._times[peer] += 1
        self._suspects, self._resting = (), frozenset()

    def _pardon(self) -> None:
        """Clear all summers: none of them was at fault."""
        self._suspects, self._resting, self._found = (), frozenset(), 0
        self._barred.clear()
        self._times.clear()

    def _next_in_turn(self, members: Collection[str], since: Callable[[str], float]) -> str:
        peer = max(members, key=lambda p: (-self._turns[p], since(p), p))
        self._turns[peer] += 1
        return peer
