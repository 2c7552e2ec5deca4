"""Failure record of members and helpers: counts what held up steps, and bans peers for a time.

A member that fails by itself is banned at the third failure in one step. An accusation that a member could not reach
another counts against both alike: they contradict each other, and no other peer can know which is right. A member that
more than a third of the attempt's members contradict, and at least two, is banned. Until that is clear, the two wait in
turns, the more contradicted one first, then the one that joined later, so that steps go on meanwhile. Once a member
is found guilty, its own accusations no longer count. Helpers are banned at once, since a round works without them. Each
ban is twice as long as the last; the count of bans falls again with the steps that are made.

Hostile input: any accusation. A single liar among four or more costs each honest peer one wait, and is then banned
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peerd.messages.swarm import MAX_MEMBERS

_FAILURES = 3  # of a member in one step, at which it is banned
_TIMES_MOST = 8  # doublings of the length of a ban
_FORGIVE_STEPS = 16  # steps after which accusations are forgotten, and the counts of bans are halved
_PAIR_FAILURES = 2  # attempts that two contradicting members spoil before one of them has to wait


@dataclass(frozen=True, slots=True)
class Ban:
    """A temporary ban: for `seconds`, the peer's reports are ignored and it is in no round."""

    peer: str
    seconds: float
    why: str
    briefly: bool = False  # a newcomer without a proven fault: it may return as soon as steps were made without it

    def text(self) -> str:
        how = "is left out of the next steps, for up to" if self.briefly else "is put aside for"
        return f"peer …{self.peer[-8:]} {self.why} and {how} {self.seconds:.0f} s"


class FailureRecord:
    """Failures, accusations and bans of one run's members and helpers."""

    def __init__(self, ban_s: float) -> None:
        self._ban_s = ban_s
        self._failed: Counter[str] = Counter()  # in this step
        self._times: Counter[str] = Counter()  # bans of each peer, kept from step to step
        self._until: dict[str, float] = {}
        self._against: dict[str, set[str]] = {}  # peer -> those that contradict it
        self._pairs: Counter[frozenset[str]] = Counter()
        self._turns: Counter[str] = Counter()  # peer -> times that it had to wait because of a contradiction
        self._waiting: set[str] = set()  # peers that are out only because it is their turn to wait
        self._steps = 0

    def banned(self, peer: str, now: float) -> bool:
        return self._until.get(peer, now) > now

    def failed(self, now: float, peer: str, why: str) -> Ban | None:
        """Count a failure that is certainly the member's own. Returns a ban at the third in a step, else None."""
        self._failed[peer] += 1
        if self._failed[peer] < _FAILURES:
            return None
        del self._failed[peer]
        return self.put_aside(now, peer, why)

    def put_aside(self, now: float, peer: str, why: str) -> Ban:
        """Ban the peer for a while, twice as long each time."""
        seconds: float = self._ban_s * 2 ** min(self._times[peer], _TIMES_MOST)
        self._times[peer] += 1
        if len(self._times) > MAX_MEMBERS:
            del self._times[next(iter(self._times))]
        self._until = {p: until for p, until in self._until.items() if until > now} | {peer: now + seconds}
        return Ban(peer, seconds, why)

    def contradict(
        self, now: float, said: Iterable[tuple[str, str]], members: int, since: Callable[[str], float]
    ) -> list[Ban]:
        """Weigh accusations from an attempt of `members` members: pairs (accuser, peer that it could not reach).

        `since`: when a member joined its stage. Returns the bans that follow.
        """
        pairs = list(dict.fromkeys(said))
        counted: set[str] = set()
        for accuser, accused in pairs:
            self._against.setdefault(accused, set()).add(accuser)
            fresh = accuser not in counted and accused not in self._against.get(accuser, ())
            if fresh:  # losing several peers at once has one cause, in its line or its honesty, so it counts once
                counted.add(accuser)
                self._against.setdefault(accuser, set()).add(accused)
        found = [
            self._found_out(now, peer)
            for peer in sorted({peer for pair in pairs for peer in pair}, key=self._weight, reverse=True)
            if members > 2 and self._weight(peer) > max(1, members / 3)
        ]
        if found:
            return found
        both = {frozenset(pair) for pair in pairs}
        self._pairs.update(both)
        tired = [pair for pair in both if self._pairs[pair] >= _PAIR_FAILURES]
        if not tired:
            return []
        for pair in tired:
            del self._pairs[pair]
        parties = frozenset[str]().union(*tired)
        peer = max(parties, key=lambda p: (self._weight(p), -self._turns[p], since(p), p))
        if members == 2:  # no third member can ever decide: strictly in turns, whatever was reported before
            peer = max(parties, key=lambda p: (-self._turns[p], since(p), p))
        self._turns[peer] += 1
        self._waiting.add(peer)
        self._until[peer] = now + self._ban_s
        return [Ban(peer, self._ban_s, "contradicts others on which peers could be reached")]

    def _weight(self, peer: str) -> int:
        return len(self._against.get(peer, ()))

    def _found_out(self, now: float, peer: str) -> Ban:
        """Ban the peer and forget its accusations; end the waits that were only due to these."""
        accusers = self._against.pop(peer, set())
        for other in list(self._against):
            self._against[other].discard(peer)
            if not self._against[other]:
                del self._against[other]
        for other in accusers & self._waiting:
            if not self._against.get(other):
                self._waiting.discard(other)
                self._until.pop(other, None)
        self._pairs = Counter({pair: count for pair, count in self._pairs.items() if peer not in pair})
        return self.put_aside(now, peer, "is contradicted by several others on which peers could be reached")

    def step_made(self) -> None:
        """Clear the failures of this step; older accusations and bans fade."""
        self._failed.clear()
        self._steps += 1
        if self._steps % _FORGIVE_STEPS == 0:
            self._against.clear()
            self._pairs.clear()
            self._turns.clear()
            self._waiting.clear()
            self._times = Counter({peer: times // 2 for peer, times in self._times.items() if times > 1})
