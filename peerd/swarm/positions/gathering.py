"""Gathering wait: the time that a conductor gives members to report before it decides the swarm's position.

It ends after a quiet time since the last new member, later if members that are known to exist are missing, and at a
time limit in any case: a peer that reports again, or in ever new sessions, does not delay the decision. Hearsay, a step
in some peer's record, prevents a new run from beginning at the start while such a record exists. So does a keeper that
stores the step, while it can be reached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peerd.swarm.events import ConductorConfig

_ANEW_MOST = 8  # a liar may claim a position, and withdraw it


class GatheringWait:
    """Gathering wait of one conductor. Times are arguments, in seconds."""

    def __init__(self, config: ConductorConfig, now: float) -> None:
        self._config = config
        self._began = self._quiet_since = now
        self._seen: set[str] = set()
        self._fruitless = False  # the wait was over, and there was no position to resume from
        self._anew = 0
        self._expected: frozenset[str] = frozenset()
        self._expect_until = now + config.expect_s
        self._hearsay_until = now + config.hearsay_s

    def begin(self, now: float) -> None:
        """Start the wait over."""
        self._began = self._quiet_since = now
        self._seen.clear()

    def expect(self, peers: Iterable[str]) -> None:
        """Wait longer for these members, which are reported alive."""
        self._expected = frozenset(peers)

    def unexpect(self, peer: str) -> None:
        """Stop waiting for a peer that cannot be reached."""
        self._expected -= {peer}

    def heard(self, now: float, peer: str) -> None:
        """Record that the peer has reported."""
        if peer not in self._seen:
            self._seen.add(peer)
            self._quiet_since = now

    @property
    def latest(self) -> float:
        """Time at which the wait ends in any case."""
        return self._began + self._config.gather_most_s

    @property
    def due(self) -> float:
        """End of the wait if no further member reports."""
        return min(self._quiet_since + self._config.gather_s, self._began + self._config.gather_most_s)

    def over(self, now: float, members: Collection[str]) -> bool:
        """True if the wait is over, given the `members` that have reported."""
        if now >= self._began + self._config.gather_most_s:
            return True
        if now < self._quiet_since + self._config.gather_s:
            return False
        return all(peer in members for peer in self._expected) or now >= self._expect_until

    def begins_anew(self, now: float, finds: bool) -> bool:
        """True if the wait starts over at its end, since others may have newer positions.

        It does if there is a position now (`finds`) and there was none at the last end.
        """
        anew = finds and self._fruitless and self._anew < _ANEW_MOST
        self._fruitless = not finds
        if anew:
            self._anew += 1
            self.begin(now)
        return anew

    def believes_hearsay(self, now: float) -> bool:
        """True while steps known only by hearsay still count."""
        return now < self._hearsay_until
