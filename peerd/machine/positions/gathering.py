"""The gathering wait: the time a conductor gives members to report before it decides the swarm's position.

It ends after a quiet time since the last new member; later where members that are known to exist are missing; and at a
limit in any case: a peer that says hello again, or in ever new sessions, does not hold the decision up. Hearsay, a step
in some peer's record, keeps a new run from beginning at the start for as long as such a record lives; a keeper that can
be reached does for as long as it can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peerd.machine.swarm.events import ConductorConfig

_ANEW_MOST = 8  # a liar may claim a position, and take it back


class GatheringWait:
    """See the module's header. Times are arguments, in seconds."""

    def __init__(self, config: ConductorConfig, now: float) -> None:
        self._config = config
        self._began = self._quiet_since = now
        self._seen: set[str] = set()
        self._fruitless = False  # the wait was over, and there was no position to go on from
        self._anew = 0
        self._expected: frozenset[str] = frozenset()
        self._expect_until = now + config.expect_s
        self._hearsay_until = now + config.hearsay_s

    def begin(self, now: float) -> None:
        """Start the wait over."""
        self._began = self._quiet_since = now
        self._seen.clear()

    def expect(self, peers: Iterable[str]) -> None:
        """Members that are reported alive: wait for them longer."""
        self._expected = frozenset(peers)

    def unexpect(self, peer: str) -> None:
        """The peer cannot be reached: do not wait for it."""
        self._expected -= {peer}

    def heard(self, now: float, peer: str) -> None:
        """The peer has said hello."""
        if peer not in self._seen:
            self._seen.add(peer)
            self._quiet_since = now

    @property
    def latest(self) -> float:
        """The time at which waiting ends in any case."""
        return self._began + self._config.gather_most_s

    @property
    def due(self) -> float:
        """The end of the wait, if no further member comes."""
        return min(self._quiet_since + self._config.gather_s, self._began + self._config.gather_most_s)

    def over(self, now: float, members: Collection[str]) -> bool:
        """True when the wait is over, with these members here."""
        if now >= self._began + self._config.gather_most_s:
            return True
        if now < self._quiet_since + self._config.gather_s:
            return False
        return all(peer in members for peer in self._expected) or now >= self._expect_until

    def begins_anew(self, now: float, finds: bool) -> bool:
        """True when the wait starts over at its end: `finds` a position where there was none, others may have newer."""
        anew = finds and self._fruitless and self._anew < _ANEW_MOST
        self._fruitless = not finds
        if anew:
            self._anew += 1
            self.begin(now)
        return anew

    def believes_hearsay(self, now: float) -> bool:
        """True while steps that are known by hearsay only still count."""
        return now < self._hearsay_until
