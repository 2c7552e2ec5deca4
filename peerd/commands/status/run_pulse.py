"""A daemon's memory of its run from one look to the next: last movement, losses, posts that are there, shares.

Plain objects with `now` as an argument: they are told what is seen, and answer what a watcher asks. All are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from peerd.screen.units import known

STILL_S: Final = 3.0  # without a change: from then on a run that has a reason to stand still does so
MISSED_S: Final = 2.0  # before a post that the conductor lists no more is gone: a new conductor's list fills up first
POINTS: Final = 480  # of one curve: twice the columns of a wide screen
PEERS: Final = 4096  # whose contributions are remembered

Post = tuple[str, int]  # peer and stage


@dataclass(frozen=True, slots=True)
class Stillness:
    """A run that stands still: why, in words, and for how long."""

    why: str
    for_s: float


class Pulse:
    """Notices that a run stands still: there is a reason, and nothing has changed for a while."""

    def __init__(self) -> None:
        self._seen: object = None
        self._changed_at = -math.inf
        self._why = ""

    def note(self, now: float, seen: object, why: str) -> None:
        """Take what was `seen`, anything that differs once work was done, and the reason that there is none, or ""."""
        if seen != self._seen or self._changed_at == -math.inf:
            self._seen, self._changed_at = seen, now
        self._why = why

    def standstill(self, now: float) -> Stillness | None:
        """None while the run moves."""
        for_s = now - self._changed_at
        return Stillness(self._why, for_s) if self._why and for_s >= STILL_S else None


class Presence:
    """Notices which posts the conductor lists no more."""

    def __init__(self) -> None:
        self._listed: frozenset[Post] = frozenset()
        self._missed: dict[Post, float] = {}

    def note(self, now: float, listed: Iterable[Post]) -> None:
        """Take the conductor's list of now."""
        listed = frozenset(listed)
        missed = (self._listed | self._missed.keys()) - listed
        self._missed = {post: self._missed.get(post, now) for post in sorted(missed)[:PEERS]}
        self._listed = listed

    def follows(self) -> bool:
        """True when there is a list."""
        return bool(self._listed)

    def is_gone(self, now: float, post: Post) -> bool:
        """True for a post that was listed and has not been for a while."""
        return post in self._missed and now - self._missed[post] >= MISSED_S

    def is_listed(self, post: Post) -> bool:
        return post in self._listed


class LossHistory:
    """Losses by step, thinned out evenly when there are many: the newest point always stays."""

    def __init__(self) -> None:
        self._points: dict[int, float] = {}
        self._stride = 1

    def note(self, step: object, loss: object) -> None:
        """Take the loss of a step; what is no number is left out, and so are steps before the last one."""
        value = known(loss)
        if value is None or isinstance(step, bool) or not isinstance(step, int) or step < 0:
            return
        last = next(reversed(self._points), None)
        if last is not None and step < last:
            return
        if last is not None and last % self._stride:
            del self._points[last]  # it was there as the newest
        self._points[step] = value
        while len(self._points) > POINTS:
            self._stride *= 2
            newest = next(reversed(self._points))
            self._points = {s: v for s, v in self._points.items() if not s % self._stride or s == newest}

    def told(self) -> list[list[float]]:
        """Pairs of step and loss."""
        return [[step, loss] for step, loss in self._points.items()]


class GrowingShares:
    """A peer's part of what all have given, since this was first told; before anybody has given more, of all."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def note(self, given: Mapping[str, float]) -> None:
        """Take the totals by peer; one that is not there any more keeps what it had. Newcomers begin at nothing."""
        began = bool(self._latest)
        for peer, total in given.items():
            if peer not in self._first:
                if len(self._first) >= PEERS:
                    continue
                self._first[peer] = 0.0 if began else total
            self._latest[peer] = max(total, self._latest.get(peer, 0.0))

    def of(self, peer: str) -> float | None:
        """The share of `peer`; None when nobody has given anything."""
        grown = {one: total - self._first[one] for one, total in self._latest.items()}
        for totals in (grown, self._latest):
            whole = sum(totals.values())
            if whole > 0 and math.isfinite(whole):
                return totals.get(peer, 0.0) / whole
        return None
