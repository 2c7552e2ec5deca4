"""Durations of calls to the peers of one stage, sans-IO: decides when a call is late, and when it is given up.

A peer is judged by its own last calls, one that is not measured by those of its mates: queues and lines make a call
take several times as long as another, so late is what takes some times as long as the longest. A late call is sent to
a mate as well (a hedge), as in Dean and Barroso, "The Tail at Scale", 2013. Few of all calls are, unless a mate has
overtaken the peer: a stage that is slow as a whole is not asked twice. One object serves one caller and stage; times
are the caller's own, in seconds: no peer's claim goes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from peerd.core.limits import RPC_DEADLINE_S

_OWN_LEAST, _OWN_MOST = 4, 16  # calls to one peer: from how many on they say something, and how many are remembered
_ALL_LEAST, _ALL_MOST = 8, 64  # calls to all
LATE, _LATE_S = 3.0, 1.0  # times the longest, and so much more
_GIVEN_UP, _GIVEN_UP_S = 10.0, 20.0  # times the longest, and so long at least;
_AGAIN, _MOST_S = 2.0, RPC_DEADLINE_S  # times as long as in vain before, and no longer than a peer works on a call
_HEDGES: Final = 1 / 16  # of all calls
_HEDGES_AT_ONCE: Final = 4.0


class CallTimes:
    """See the module's header."""

    def __init__(self, late: float = LATE) -> None:
        """`late`: times the longest call; of an outer call more, so that an inner one is sent twice first."""
        self._late = late
        self._own: dict[str, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=_ALL_MOST)
        self._in_vain: dict[str, float] = {}  # peer -> how long it was waited for, since its last answer
        self._hedges = 1.0  # that may be sent now
        self._overtaken = set[str]()  # peers that a mate has overtaken, and that have not answered since

    def took(self, name: str, seconds: float) -> None:
        """A call to a peer was answered after `seconds`."""
        self._own.setdefault(name, deque(maxlen=_OWN_MOST)).append(seconds)
        self._all.append(seconds)
        self._in_vain.pop(name, None)
        self._overtaken.discard(name)
        self._hedges = min(_HEDGES_AT_ONCE, self._hedges + _HEDGES)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all other peers' own calls."""
        self._own = {name: own for name, own in self._own.items() if name in names}
        self._in_vain = {name: seconds for name, seconds in self._in_vain.items() if name in names}
        self._overtaken.intersection_update(names)

    def late_after_s(self, name: str) -> float | None:
        """Seconds from which on a call to this peer is late; None: not known yet."""
        longest_s = self._longest_s(name)
        return None if longest_s is None else _LATE_S + self._late * longest_s

    def given_up_after_s(self, name: str, at_first_s: float) -> float:
        """Seconds after which no answer of this peer is expected any more; `at_first_s` where nothing is known."""
        longest_s = self._longest_s(name)
        seconds = at_first_s if longest_s is None else max(_GIVEN_UP_S, _GIVEN_UP * longest_s)
        return min(_MOST_S, max(seconds, _AGAIN * self._in_vain.get(name, 0.0)))

    def gave_up(self, name: str, seconds: float) -> None:
        """A call to a peer was not answered within `seconds`: the next one may take longer."""
        self._in_vain[name] = seconds

    def overtaken(self, name: str, seconds: float) -> None:
        """A mate that was asked after this peer was first, so many seconds after the call: its other calls wait too."""
        self.gave_up(name, seconds)
        self._overtaken.add(name)

    def is_overtaken(self, name: str) -> bool:
        """True from when a mate was first until the peer answers a call itself."""
        return name in self._overtaken

    def can_hedge(self, late: str) -> bool:
        """True when one more call to a peer that is late may be sent to a mate as well."""
        return self._hedges >= 1.0 or late in self._overtaken

    def hedged(self, late: str) -> None:
        """A call to a peer that is late was sent to a mate as well."""
        if late not in self._overtaken:
            self._hedges -= 1.0

    def _longest_s(self, name: str) -> float | None:
        own = self._own.get(name, ())
        if len(own) >= _OWN_LEAST:
            return max(own)
        return max(self._all) if len(self._all) >= _ALL_LEAST else None
