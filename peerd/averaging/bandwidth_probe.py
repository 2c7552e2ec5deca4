"""Bandwidth probes: one peer at a time gets more traffic than its internet connection (line) has been seen to carry.

A line's rate is measured from its traffic, and slow members limit the traffic of a fast one: with equal shares all
lines look alike. So one peer's line at a time is assumed to carry TRY times its measured rate. If the estimate then
grows, the probe continues from there; if not, the peer's next probe comes after twice as many attempts as before. So
the cost of probing (rounds that wait for an overloaded line) tends to zero, and shares become stable. If the slowest
sender alone determines the duration no other division is faster, and nothing is probed. Sans-IO and deterministic: the
same reports give the same probes. Hostile input: a peer whose reported measurement grows without end gets the work that
it asks for, as with any false rate; every probe ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

TRY: Final = 2.0
_GROWN: Final = 1.15  # growth that counts; more than one step of the reported rates
_PATIENCE: Final = 2  # attempts until a report about the first of them has arrived
_PAUSE_MOST: Final = 128  # attempts


@dataclass(slots=True)
class _Known:
    due: int
    pause: int = 1


class BandwidthProbe:
    """Chooses the peer of one stage whose line is probed. A line's rate is that of its slower direction, in bytes/s."""

    def __init__(self) -> None:
        self._attempt = 0
        self._known: dict[str, _Known] = {}
        self._trial: tuple[str, float, int] | None = None  # peer, its rate at the start, first attempt

    def next(self, measured: Mapping[str, float], worth: Callable[[], bool] = lambda: True) -> str | None:
        """Choose the peer whose line is probed in the next attempt, or None.

        `measured`: rates of the candidates, in bytes/s. `worth`: called before a new probe; returns whether it could
        gain anything.
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
