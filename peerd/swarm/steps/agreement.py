"""Finds the faulty peer, by bisection, when members of a stage report different digests of a round's sum.

All members must report the same digest. A mismatch means that a peer that summed a share sent different sums to
different members, or that a member has, or reports, another vector than it was sent. A digest does not show which. So
the round is repeated without shares for half of the suspects, then for half of the remaining ones. If sums still
differ, the culprit is one of the peers that had a share in every such round; otherwise it is one of those that had
none. The last suspect is barred: it takes part in rounds, but sums nothing for a long time. If sums still differ when
as many peers are barred as may lie (a third), the members that reported another digest than the majority are at fault;
without a majority, members are blamed in turn. One instance serves one stage. Decides only.

Hostile input: a liar costs one attempt per halving, and finally its share or its membership. It never causes a wrong
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_BARRED_STEPS = 64  # steps for which a barred peer sums nothing; doubles each time
_TIMES_MOST = 8  # doublings


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on digests that differ. `note` describes it for the log; `guilty` lists the members to ban."""

    note: str
    guilty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SummingPeers:
    """Peers of one round: `summers` had shares; `able` are members that can be reached and could have had one."""

    summers: frozenset[str]
    able: frozenset[str]


class Agreement:
    """Search for the peer that causes different sums in a stage. `idle`: peers without a share in the next attempt."""

    def __init__(self) -> None:
        self._suspects: tuple[str, ...] = ()
        self._resting: frozenset[str] = frozenset()  # suspects that get no share in the next round, as a test
        self._barred: dict[str, int] = {}  # peer -> the step until which it is barred
        self._times: Counter[str] = Counter()
        self._found = 0  # peers barred since the digests last agreed
        self._turns: Counter[str] = Counter()

    @property
    def idle(self) -> frozenset[str]:
        return self._resting | self._barred.keys()

    def agreed(self) -> None:
        """Record that all digests are equal. If suspects had no share in this round, only they remain suspects."""
        if self._resting:
            self._suspects = tuple(sorted(self._resting))
        self._found = 0

    def step_made(self, step: int) -> None:
        """Let suspects sum again, and barred peers once their time is over. Bars the last suspect if one is left."""
        if len(self._suspects) == 1:
            self._bar(self._suspects[0], step)
        self._resting = frozenset()
        self._barred = {peer: until for peer, until in self._barred.items() if until > step}

    def judge(
        self, step: int, digests: Mapping[str, bytes], round_: SummingPeers, since: Callable[[str], float]
    ) -> Judgement:
        """Verdict on a round whose members report these digests, which differ. `since`: when a member joined."""
        most, count = Counter(digests.values()).most_common(1)[0]
        others = tuple(sorted(peer for peer, digest in digests.items() if digest != most))
        told = f"{len(set(digests.values()))} different sums among {len(digests)} members"
        if self._found > len(digests) // 3:  # bound on the liars among summing peers
            guilty = others if 2 * count > len(digests) else (self._next_in_turn(digests, since),)
            self._pardon()
            return Judgement(f"{told}, whichever peers sum", guilty)
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
            return Judgement(f"{told}: peer …{culprit[-8:]} had a share whenever they differed, and gets none for now")
        self._found = len(digests)  # no other peer is left to sum: only members can be at fault
        self._barred.clear()
        return Judgement(told)

    def _bar(self, peer: str, step: int) -> None:
        self._barred[peer] = step + _BARRED_STEPS * 2 ** min(self._times[peer], _TIMES_MOST)
        self._times[peer] += 1
        self._suspects, self._resting = (), frozenset()

    def _pardon(self) -> None:
        """Clear all summing peers: none of them was at fault."""
        self._suspects, self._resting, self._found = (), frozenset(), 0
        self._barred.clear()
        self._times.clear()

    def _next_in_turn(self, members: Collection[str], since: Callable[[str], float]) -> str:
        peer = max(members, key=lambda p: (-self._turns[p], since(p), p))
        self._turns[peer] += 1
        return peer
