"""Durations of calls to the peers of one stage, sans-IO: decides when a call is late and when it is given up.

A peer is judged by its own recent calls, an unmeasured one by those of its mates. Queues and paths can make one call
take several times as long as another, so a call is late if it takes a multiple of the longest one. A late call is sent
to a mate as well (a hedge), as in Dean and Barroso, "The Tail at Scale", 2013. Only a small fraction of calls is
hedged, unless a mate has overtaken the peer: a stage that is slow as a whole does not get its calls twice. One object
serves one caller and stage; all times are the caller's own measurements, in seconds, and no peer's claims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from peerd.core.limits import RPC_DEADLINE_S

_OWN_LEAST, _OWN_MOST = 4, 16  # calls to one peer: how many are needed for a judgement, and how many are kept
_ALL_LEAST, _ALL_MOST = 8, 64  # the same for calls to all peers
LATE, _LATE_S = 3.0, 1.0  # a call is late after this multiple of the longest one plus this time
_GIVEN_UP, _GIVEN_UP_S = 10.0, 20.0  # a call is given up after this multiple, but not before this time
_AGAIN, _MOST_S = 2.0, RPC_DEADLINE_S  # multiple of the last unsuccessful wait, and a peer's deadline for a call
_HEDGES: Final = 1 / 16  # hedges per answered call
_HEDGES_AT_ONCE: Final = 4.0  # most hedges saved up


class CallTimes:
    """Durations of one caller's calls to one stage. Peers are given by name."""

    def __init__(self, late: float = LATE) -> None:
        """`late`: multiple of the longest call; larger for an outer call, so that an inner one is hedged first."""
        self._late = late
        self._own: dict[str, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=_ALL_MOST)
        self._in_vain: dict[str, float] = {}  # peer -> last unsuccessful wait in seconds, since its last answer
        self._hedges = 1.0  # hedges that may be sent now
        self._overtaken = set[str]()  # peers that a mate has overtaken and that have not answered since

    def took(self, name: str, seconds: float) -> None:
        """Record that a call to a peer was answered after `seconds`."""
        self._own.setdefault(name, deque(maxlen=_OWN_MOST)).append(seconds)
        self._all.append(seconds)
        self._in_vain.pop(name, None)
        self._overtaken.discard(name)
        self._hedges = min(_HEDGES_AT_ONCE, self._hedges + _HEDGES)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget the calls of all peers not in `names`."""
        self._own = {name: own for name, own in self._own.items() if name in names}
        self._in_vain = {name: seconds for name, seconds in self._in_vain.items() if name in names}
        self._overtaken.intersection_update(names)

    def late_after_s(self, name: str) -> float | None:
        """Seconds after which a call to this peer is late, or None if that is not known yet."""
        longest_s = self._longest_s(name)
        return None if longest_s is None else _LATE_S + self._late * longest_s

    def given_up_after_s(self, name: str, at_first_s: float) -> float:
        """Seconds after which a call to this peer is given up; `at_first_s` is used while nothing is known."""
        longest_s = self._longest_s(name)
        seconds = at_first_s if longest_s is None else max(_GIVEN_UP_S, _GIVEN_UP * longest_s)
        return min(_MOST_S, max(seconds, _AGAIN * self._in_vain.get(name, 0.0)))

    def gave_up(self, name: str, seconds: float) -> None:
        """Record that a call was not answered within `seconds`, so that the next one may take longer."""
        self._in_vain[name] = seconds

    def overtaken(self, name: str, seconds: float) -> None:
        """Record that a mate's answer to a hedge came first, `seconds` after the call; other calls may be stuck too."""
        self.gave_up(name, seconds)
        self._overtaken.add(name)

    def is_overtaken(self, name: str) -> bool:
        """Return True if a mate has overtaken this peer and the peer has not answered since."""
        return name in self._overtaken

    def can_hedge(self, late: str) -> bool:
        """Return True if one more call to a late peer may be sent to a mate as well."""
        return self._hedges >= 1.0 or late in self._overtaken

    def hedged(self, late: str) -> None:
        """Record that a call to a late peer was hedged."""
        if late not in self._overtaken:
            self._hedges -= 1.0

    def _longest_s(self, name: str) -> float | None:
        own = self._own.get(name, ())
        if len(own) >= _OWN_LEAST:
            return max(own)
        return max(self._all) if len(self._all) >= _ALL_LEAST else None
