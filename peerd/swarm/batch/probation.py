"""Probation of newcomers, peers that have not yet helped to make a step: how long each waits after it held up a step.

A failure counts against the identity that failed. Most failures prove nothing about other peers: a peer that was
killed, or whose machine is overloaded, looks like one that is silent on purpose. But identities are free, and places
(an IPv4 address, an IPv6 /64) are not. So each place has an account. Failures of its newcomers raise it; each newcomer
that helps to make a step lowers it. From `SEVERAL` on, newcomers of the place are admitted one at a time: one in each
step, then one in two, four ... steps. Only proven faults of several identities, such as forged receipts, make all
newcomers of a place wait for some time. A peer that has helped to make a step has an account of its own from
then on, wherever it connects from.

Decides only; the caller knows which peers have helped, and where each one is. Hostile input: any number of identities;
those of one place spoil at most one attempt in a step, then one in fewer and fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import PROBATION_PEERS, PROBATION_PLACES

_WAIT_S: Final = 15.0  # length of the first wait
_WAIT_MOST_S: Final = 600.0  # not longer, as a household or a school may share one address
_FADES_S: Final = 1800.0  # time without failures after which one failure is forgotten
SEVERAL: Final = 3  # failures at one place, less newcomers that helped since: from here on, one newcomer at a time
_PROVEN: Final = 2  # identities of one place with proven faults, from which on all its newcomers wait
_DOUBLINGS: Final = 6


@dataclass(slots=True)
class _Account:
    """Failures of one identity or address. The wait after a failure ends at `step` or `until`, whichever is first."""

    times: int = 0
    last: float = 0.0
    step: int = 0
    until: float = 0.0
    proven: int = 0  # identities of a place with proven faults
    proven_until: float = 0.0

    def fade(self, now: float) -> None:
        """Forget old failures."""
        if faded := int((now - self.last) / _FADES_S):
            self.times, self.proven = max(0, self.times - faded), max(0, self.proven - faded)
            self.last += faded * _FADES_S

    def waits(self, now: float, step: int) -> bool:
        return now < self.proven_until or (now < self.until and step < self.step)


class Probation:
    """Probation of newcomers, kept by one conductor.

    `place_of` returns the address block ("place") that a peer connects from; without it each peer has its own place.
    """

    def __init__(self, place_of: Callable[[str], str] | None = None) -> None:
        self._place_of = place_of or (lambda peer: peer)
        self._places = BoundedDict[str, _Account](PROBATION_PLACES)
        self._peers = BoundedDict[str, _Account](PROBATION_PEERS)
        self._step = 0  # number of steps made

    def waits(self, now: float, newcomer: str) -> bool:
        """True while this newcomer has to wait, because it failed or because others from its address did."""
        return bool(self.own_reason(now, newcomer) or self.places_reason(now, newcomer))

    def own_reason(self, now: float, newcomer: str) -> str:
        """Why this newcomer has to wait because it failed itself, or "" if it need not."""
        own = self._peers.get(newcomer)
        return "this peer held up a step, and sits out the next ones" if own and own.waits(now, self._step) else ""

    def places_reason(self, now: float, newcomer: str) -> str:
        """Why this newcomer has to wait because others from its address have failed, or "" if it need not."""
        place = self._places.get(self._place_of(newcomer)) if self._places else None
        if place is None or not place.waits(now, self._step):
            return ""
        if now < place.proven_until:
            return "several newcomers at this peer's address did what only a faulty or hostile peer does"
        return "newcomers at this peer's address held up steps, and are let in one at a time"

    def times(self, now: float, newcomer: str) -> tuple[int, int]:
        """Number of this newcomer's failures, and of failures of others from its address.

        Each newcomer from there that helped to make a step cancels one of the others' failures.
        """
        own = self._account(now, self._peers, newcomer, kept=False).times
        return own, max(0, self._account(now, self._places, self._place_of(newcomer), kept=False).times - own)

    def let_in(self, now: float, newcomer: str) -> None:
        """Record that this newcomer is admitted. If several from its address failed, it is the only one for a step."""
        place = self._places.get(self._place_of(newcomer)) if self._places else None
        if place is not None and place.times >= SEVERAL:
            place.step, place.until = max(place.step, self._step + 1), max(place.until, now + _WAIT_S)

    def helped(self, newcomer: str) -> None:
        """Record that this newcomer has helped to make a step, which cancels one failure at its address."""
        self._peers.pop(newcomer, None)
        place = self._places.get(self._place_of(newcomer)) if self._places else None
        if place is not None:
            place.times = max(0, place.times - 1)
            if place.times < SEVERAL:
                place.step = 0

    def step_made(self) -> None:
        """Record a completed step."""
        self._step += 1

    def failed(self, now: float, newcomer: str, *, proven: bool = False) -> float:
        """Record that the newcomer held up the step; returns the longest time in seconds that it now waits itself.

        `proven`: by its own fault, and not because it was killed, overloaded or out of reach.
        """
        own = self._account(now, self._peers, newcomer)
        place = self._account(now, self._places, self._place_of(newcomer))
        place.proven += proven and not own.proven
        own.proven |= proven
        for account, excess in ((own, own.times), (place, place.times + 1 - SEVERAL)):
            account.times, account.last = min(account.times + 1, SEVERAL + _DOUBLINGS), now
            if excess >= 0:
                account.step = self._step + 2 ** min(excess, _DOUBLINGS)
                account.until = now + _wait_s(excess)
        if proven:
            own.proven_until = own.until
        if place.proven >= _PROVEN:
            place.proven_until = now + _wait_s(place.proven - _PROVEN)
        return own.until - now

    def _account(self, now: float, among: BoundedDict[str, _Account], name: str, *, kept: bool = True) -> _Account:
        account = among.get(name) or _Account(last=now)
        account.fade(now)
        if kept:
            among[name] = account
        return account


def _wait_s(times: int) -> float:
    return min(_WAIT_S * 2.0 ** min(times, _DOUBLINGS), _WAIT_MOST_S)
