"""How long a conductor waits for members before it decides where the swarm stands, and for whose sake it waits longer.

Quiet time after the last new member, a longer time for members that are known to exist, and an end in any case: who
says hello again, or comes in ever new sessions, does not hold the decision up. What is only heard of, a step in
somebody's record, keeps a new run from beginning at the start for as long as such a record lives; a keeper that can be
reached does for as long as it can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peerd.machine.swarm.events import ConductorConfig

_ANEW_MOST = 8  # a liar may claim a way, and take it back


class Gathering:
    """See the module's header. Times are arguments, in seconds."""

    def __init__(self, config: ConductorConfig, now: float) -> None:
        self._config = config
        self._began = self._quiet_since = now
        self._seen: set[str] = set()
        self._fruitless = False  # it was over, and there was no way to go
        self._anew = 0
        self._expected: frozenset[str] = frozenset()
        self._expect_until = now + config.expect_s
        self._hearsay_until = now + config.hearsay_s

    def begin(self, now: float) -> None:
        """Once more: nothing is certain."""
        self._began = self._quiet_since = now
        self._seen.clear()

    def expect(self, peers: Iterable[str]) -> None:
        """Members that are said to live."""
        self._expected = frozenset(peers)

    def unexpect(self, peer: str) -> None:
        """This one cannot be reached."""
        self._expected -= {peer}

    def heard(self, now: float, peer: str) -> None:
        """The peer has said hello."""
        if peer not in self._seen:
            self._seen.add(peer)
            self._quiet_since = now

    @property
    def due(self) -> float:
        """When it is over, if nobody else comes."""
        return min(self._quiet_since + self._config.gather_s, self._began + self._config.gather_most_s)

    def over(self, now: float, members: Collection[str]) -> bool:
        """Has it waited long enough, with these members here?"""
        if now >= self._began + self._config.gather_most_s:
            return True
        if now < self._quiet_since + self._config.gather_s:
            return False
        return all(peer in members for peer in self._expected) or now >= self._expect_until

    def begins_anew(self, now: float, finds: bool) -> bool:
        """It is over, and `finds` a way to go or not: where there was none before, others may have more to say."""
        anew = finds and self._fruitless and self._anew < _ANEW_MOST
        self._fruitless = not finds
        if anew:
            self._anew += 1
            self.begin(now)
        return anew

    def believes_hearsay(self, now: float) -> bool:
        """Do steps count still that are only heard of?"""
        return now < self._hearsay_until
