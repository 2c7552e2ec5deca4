"""Bandwidth probes: one measured line at a time gets more load than it has shown to carry, with exponential back-off.

A line is measured by what passes it, and what passes a fast line among slow ones is what the slow ones allow: with
equal shares all look alike. So now and then a peer's line is taken for TRY times what was seen. If it then carries
more, the estimate has grown and it goes on; if not, its turn comes again after twice as many attempts as before, so
that what this costs (a round that waits for a line with too much to do) becomes nothing, and shares stand still. Where
the slowest sender alone sets the pace no other division is faster, and nothing is tried.
Sans-IO, no randomness: the same reports, the same tries. Hostile input: a peer that says it is measured and grows
without end gains the work that it asks for, as by any other lie about its line; a try ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

TRY: Final = 2.0
_GROWN: Final = 1.15  # beyond a step of what is told
_PATIENCE: Final = 2  # attempts until a report about the first of them has come
_PAUSE_MOST: Final = 128  # attempts


@dataclass(slots=True)
class _Known:
    due: int
    pause: int = 1


class BandwidthProbe:
    """The probes of one stage. Lines are known by their narrower direction, in bytes/s."""

    def __init__(self) -> None:
        self._attempt = 0
        self._known: dict[str, _Known] = {}
        self._trial: tuple[str, float, int] | None = None  # peer, its rate then, since which attempt

    def next(self, measured: Mapping[str, float], worth: Callable[[], bool] = lambda: True) -> str | None:
        """The peer whose line is probed in the attempt that is ordered now, of these measured ones; None: nobody's.
        Whose is to be tried in it; None: nobody's.

        `worth`: whether there is anything to gain; asked before a new try.
        """
        self._attempt += 1
        self._known = {peer: self._known.get(peer) or _Known(self._attempt) for peer in sorted(measured)}
        if self._trial is not None and self._goes_on(*self._trial, measured):
            return self._trial[0]
        due = [(known.due, peer) for peer, known in self._known.items() if known.due <= self._attempt]
        if not due or len(measured) < 2 or not worth():
            return None
        peer = min(due)[1]
        self._trial = (peer, measured[peer], self._attempt)
        return peer

    def _goes_on(self, peer: str, before: float, since: int, measured: Mapping[str, float]) -> bool:
        known, now = self._known.get(peer), measured.get(peer, 0.0)
        if known is not None and now > before * _GROWN:
            known.pause = 1
            self._trial = (peer, now, self._attempt)
            return True
        if known is not None and self._attempt - since < _PATIENCE:
            return True
        if known is not None:
            known.pause = min(2 * known.pause, _PAUSE_MOST)
            known.due = self._attempt + known.pause * max(1, len(measured))
        self._trial = None
        return False
