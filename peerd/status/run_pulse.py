"""What a daemon remembers of its run between two status queries: last progress, losses, listed posts and shares.

Plain objects of bounded size, which take the time `now` as an argument and do no input or output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from peerd.screen.units import known
from peerd.status.swarm_status import StandstillStatus

STILL_S: Final = 3.0  # a run that has a reason to wait stands still after this time without a change
MISSED_S: Final = 2.0  # a post missing from the list for this time is gone; a new conductor's list fills up sooner
POINTS: Final = 480  # most points of a curve: twice the columns of a wide screen
PEERS: Final = 4096  # whose contributions are remembered

Post = tuple[str, int]  # peer and stage


class StandstillDetector:
    """Detects a standstill: the run has a reason to wait, and nothing has changed for STILL_S."""

    def __init__(self) -> None:
        self._seen: object = None
        self._changed_at = -math.inf
        self._why = ""

    def note(self, now: float, seen: object, why: str) -> None:
        """Record the run's state: a value that changes with work done, and the reason to wait ("" if there is none)."""
        if seen != self._seen or self._changed_at == -math.inf:
            self._seen, self._changed_at = seen, now
        self._why = why

    def standstill(self, now: float) -> StandstillStatus | None:
        """The current standstill, or None while the run moves."""
        for_s = now - self._changed_at
        return StandstillStatus(why=self._why, for_s=for_s) if self._why and for_s >= STILL_S else None


class ListedPosts:
    """Detects posts that the conductor no longer lists."""

    def __init__(self) -> None:
        self._listed: frozenset[Post] = frozenset()
        self._missed: dict[Post, float] = {}

    def note(self, now: float, listed: Iterable[Post]) -> None:
        """Record the conductor's current list."""
        listed = frozenset(listed)
        missed = (self._listed | self._missed.keys()) - listed
        self._missed = {post: self._missed.get(post, now) for post in sorted(missed)[:PEERS]}
        self._listed = listed

    def follows(self) -> bool:
        """True if the conductor lists any posts."""
        return bool(self._listed)

    def is_gone(self, now: float, post: Post) -> bool:
        """True if the post was listed, and has been missing from the list for MISSED_S."""
        return post in self._missed and now - self._missed[post] >= MISSED_S

    def is_listed(self, post: Post) -> bool:
        return post in self._listed


class LossHistory:
    """Losses by step, thinned out evenly if there are more than POINTS. The newest point is always kept."""

    def __init__(self) -> None:
        self._points: dict[int, float] = {}
        self._stride = 1

    def note(self, step: object, loss: object) -> None:
        """Add the loss of a step. Ignores values that are not numbers, and steps before the newest one."""
        value = known(loss)
        if value is None or isinstance(step, bool) or not isinstance(step, int) or step < 0:
            return
        last = next(reversed(self._points), None)
        if last is not None and step < last:
            return
        if last is not None and last % self._stride:
            del self._points[last]  # it was kept only as the newest
        self._points[step] = value
        while len(self._points) > POINTS:
            self._stride *= 2
            newest = next(reversed(self._points))
            self._points = {s: v for s, v in self._points.items() if not s % self._stride or s == newest}

    def points(self) -> list[tuple[float, float]]:
        """The points, as pairs of step and loss."""
        return list(self._points.items())


class ContributionShares:
    """Each peer's share of all contributions since the first `note`; until there are any, its share of the totals."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def note(self, given: Mapping[str, float]) -> None:
        """Record the totals by peer. Departed peers keep their totals; those of new peers count from zero."""
        began = bool(self._latest)
        for peer, total in given.items():
            if peer not in self._first:
                if len(self._first) >= PEERS:
                    continue
                self._first[peer] = 0.0 if began else total
            self._latest[peer] = max(total, self._latest.get(peer, 0.0))

    def of(self, peer: str) -> float | None:
        """The share of `peer`, 0 to 1, or None if nobody has contributed anything."""
        grown = {one: total - self._first[one] for one, total in self._latest.items()}
        for totals in (grown, self._latest):
            whole = sum(totals.values())
            if whole > 0 and math.isfinite(whole):
                return totals.get(peer, 0.0) / whole
        return None
