"""Probation of newcomers, peers that have not yet helped to make a step, and the account of each place.

Identities are free, so what one did wrong says nothing of the next; places (an address, an IPv6 /64) are not. A
newcomer that spoils an attempt, or does not finish what it was given, is let go at once, and all newcomers from its
place wait: longer each time, until that fades. A peer that has helped to make a step is on its own account from then
on, wherever it connects from. Decides only; the caller knows which peers have helped, and where each one is. Hostile
input: any number of identities; those of many places cost steps a moment for each, then less and less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import PROBATION_PLACES

_WAIT_S: Final = 15.0  # the first time
_WAIT_MOST_S: Final = 600.0  # a household or a school may stand behind one address
_FADES_S: Final = 1800.0  # after so long without another, one time is forgotten


@dataclass(slots=True)
class _Account:
    times: int
    last: float
    until: float


class Probation:
    """Probation of newcomers, kept by one conductor. `place_of` tells where a peer connects from; without it each is a
    place of its own.
    """

    def __init__(self, place_of: Callable[[str], str] | None = None) -> None:
        self._place_of = place_of or (lambda peer: peer)
        self._accounts = BoundedDict[str, _Account](PROBATION_PLACES)  # by place

    def waits(self, now: float, newcomer: str) -> bool:
        """True while this newcomer has to wait, for what others from its place did."""
        account = self._accounts.get(self._place_of(newcomer)) if self._accounts else None
        return account is not None and account.until > now

    def times(self, now: float, newcomer: str) -> int:
        """Number of times that newcomers from its place were let go, as far as it is remembered."""
        account = self._accounts.get(self._place_of(newcomer)) if self._accounts else None
        return 0 if account is None else max(0, account.times - int((now - account.last) / _FADES_S))

    def failed(self, now: float, newcomer: str) -> float:
        """Record that the newcomer stood in the way; returns for how many seconds newcomers from its place wait now."""
        times, place = self.times(now, newcomer), self._place_of(newcomer)
        seconds: float = min(_WAIT_S * 2.0**times, _WAIT_MOST_S)
        self._accounts[place] = _Account(min(times + 1, 8), now, now + seconds)
        return seconds
