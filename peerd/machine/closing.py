"""Closing a step: where one stage stands on its way to the mean, and who has stood in the way of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from peerd.core.training import MAX_MEMBERS


@dataclass(slots=True)
class StageClose:
    """One attempt at a time, until one succeeds.

    `prepared` have the mean, `waiting` are to say whether they have it, `helpers` only sum for them.
    """

    attempt: bytes = b""  # empty: none under way
    group: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    waiting: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    settled: bool = False
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""  # why no attempt can be made

    def begin(self, attempt: bytes, group: tuple[str, ...], helpers: frozenset[str]) -> None:
        """An attempt is ordered."""
        self.attempt, self.group, self.helpers = attempt, group, helpers
        self.waiting, self.prepared = set(group), set()

    def involves(self, peer: str) -> bool:
        """Does the attempt under way need this peer?"""
        return bool(self.attempt) and (peer in self.group or peer in self.helpers)


class Standing:
    """Who failed averaging how often, and who is put aside for it, until when.

    A member is put aside when its stage-mates could not reach it three times in one step, even if we can; a helper
    at once, and for twice as long each time: a round can do without it.
    """

    def __init__(self, ban_s: float) -> None:
        self._ban_s = ban_s
        self._accused: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()  # of helpers; kept from step to step
        self._until: dict[str, float] = {}

    def banned(self, peer: str, now: float) -> bool:
        return self._until.get(peer, now) > now

    def accuse(self, now: float, peer: str, *, helper: bool) -> float | None:
        """The peer failed an attempt; for how many seconds it is put aside, if it is."""
        self._accused[peer] += 1
        ban_s = self._ban_s
        if helper:
            ban_s *= 2 ** min(self._strikes[peer], 8)
            self._strikes[peer] += 1
            if len(self._strikes) > MAX_MEMBERS:
                del self._strikes[next(iter(self._strikes))]
        elif self._accused[peer] < 3:
            return None
        del self._accused[peer]
        self._until = {p: until for p, until in self._until.items() if until > now} | {peer: now + ban_s}
        return ban_s

    def forgive(self) -> None:
        """A step is made: members begin anew."""
        self._accused.clear()
