"""Suspicion: each peer that failed is put aside for a time that grows with its failures in a row, and then tried again.

A success ends the suspicion. Peers are given by any key. The table uses only the events that it is given, and forgets
the peers with the oldest events, so that strangers cannot fill it. Suspicion is local and never reported to others, so
that nobody can be slandered. Sans-IO; times are monotonic, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from peerd.core.bounded_dict import BoundedDict
from peerd.wire.rate.backoff import backoff_s

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Suspect:
    """One peer under suspicion. It may be tried again from `until` on."""

    failures: int = 0  # in a row
    failed_at: float = -math.inf
    until: float = -math.inf
    probed: bool = False  # a probe is under way


class Suspicion(Generic[K]):
    """At most `remember` suspects. Each failure after the first `steady` ones doubles the pause, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float, remember: int, *, steady: int = 1) -> None:
        self._first_s, self._longest_s, self._steady = first_s, longest_s, steady
        self._suspects = BoundedDict[K, Suspect](remember)
        self._latest = -math.inf  # no pause ends later

    def __contains__(self, key: object) -> bool:
        """True from a failure, or another reason to put the peer aside, until the peer is forgiven."""
        return key in self._suspects

    def __len__(self) -> int:
        return len(self._suspects)

    def get(self, key: K) -> Suspect | None:
        """The suspect, or None if the peer is not under suspicion."""
        return self._suspects.get(key)

    def failed(self, now: float, key: K, *, anew: bool = False) -> int:
        """Record a failure, which also ends a probe, and put the peer aside; returns its number of failures in a row.

        Attempts that fail together are one failure: while the peer is put aside, further ones do not count, unless the
        attempt was made `anew`, in spite of the pause.
        """
        suspect = self._touched(key)
        suspect.probed = False
        if anew or now >= suspect.until:
            self.count(now, key)
            pause_s = backoff_s(max(1, suspect.failures - self._steady + 1), self._first_s, self._longest_s)
            self._pause(suspect, now + pause_s)
        return suspect.failures

    def count(self, now: float, key: K) -> None:
        """Count a failure that does not put the peer aside."""
        suspect = self._touched(key)
        suspect.failures, suspect.failed_at = suspect.failures + 1, now

    def put_aside(self, key: K, until: float) -> None:
        """Put the peer aside at least until then, without a failure."""
        suspect = self._touched(key)
        self._pause(suspect, max(suspect.until, until))

    def prolong(self, since: float, more_s: float) -> None:
        """Lengthen all pauses that had not ended at `since`."""
        for key in self.aside(since):
            self._pause(self._suspects[key], self._suspects[key].until + more_s)

    def forgive(self, key: K) -> bool:
        """End the suspicion, because the peer works; returns True if it was under suspicion."""
        return self._suspects.pop(key, None) is not None

    def keep_only(self, keys: Container[K]) -> None:
        """Forget all peers not in `keys`."""
        for key in [key for key in self._suspects if key not in keys]:
            del self._suspects[key]

    def is_aside(self, now: float, key: K) -> bool:
        """Return True while the peer must not be tried."""
        suspect = self._suspects.get(key)
        return suspect is not None and now < suspect.until

    def aside(self, now: float) -> list[K]:
        """The peers that must not be tried."""
        return [key for key, one in self._suspects.items() if now < one.until] if now < self._latest else []

    def ripe(self, now: float) -> list[K]:
        """The suspects that may be tried again."""
        return [key for key, one in self._suspects.items() if now >= one.until]

    # --- probes -------------------------------------------------------------------------------------------------

    def due(self, now: float, at_once: int) -> list[K]:
        """Suspects to probe now, of which at most `at_once` are probed at the same time.

        Report the end of each probe to `failed` or `forgive`.
        """
        places = max(0, at_once - len(self.probed()))
        ripe = [key for key in self.ripe(now) if not self._suspects[key].probed]
        chosen = sorted(ripe, key=lambda key: self._suspects[key].until)[:places]
        for key in chosen:
            self._suspects[key].probed = True
        return chosen

    def probed(self) -> set[K]:
        """The suspects that are being probed."""
        return {key for key, one in self._suspects.items() if one.probed}

    def wakes_at(self) -> float:
        """Time from which a suspect may be probed, or infinity if there is none."""
        return min((one.until for one in self._suspects.values() if not one.probed), default=math.inf)

    def _touched(self, key: K) -> Suspect:
        """The entry of the peer, created if it has none, and moved to the newest end of the table."""
        suspect = self._suspects[key] = self._suspects.get(key) or Suspect()
        return suspect

    def _pause(self, suspect: Suspect, until: float) -> None:
        suspect.until = until
        self._latest = max(self._latest, until)
