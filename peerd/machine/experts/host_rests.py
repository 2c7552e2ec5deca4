"""Rests of expert hosts that failed, sans-IO: which host, or which of its experts, a caller skips for a while.

The first failure costs 2 s, each further one in a row twice as much, up to a minute; an answer ends the rest. Failures
during a rest count as the same one. A host that cannot be reached rests with all experts that it claims; one that
reports that it has no such expert rests with that expert only. Each caller keeps its own rests, and sends them to
nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.experts.grid import Uid
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_RESTS
from peerd.machine.rate.backoff import backoff_s

FIRST_S: Final = 2.0  # of the first rest: a host that restarts is back by then
LONGEST_S: Final = 60.0


@dataclass(slots=True)
class _Rest:
    failures: int = 0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class RestsNow:
    """All rests at one moment, by raw peer id: whole hosts, and bits of a host's experts below a prefix."""

    whole: frozenset[bytes]
    some: Mapping[tuple[bytes, Uid], int]


class HostRests:
    """Rests of hosts and of single experts. `uid` None: the host with all experts that it claims."""

    def __init__(self, remember: int = EXPERT_RESTS) -> None:
        self._rests = BoundedDict[tuple[bytes, Uid | None], _Rest](remember)
        self._latest = 0.0  # end of the last rest

    def failed(self, now: float, host: PeerId, uid: Uid | None = None) -> int:
        """Record a failure; returns the number of failures in a row."""
        rest = self._rests.setdefault((host.raw, uid), _Rest())
        if now >= rest.until:
            rest.failures += 1
            rest.until = now + backoff_s(rest.failures, FIRST_S, LONGEST_S)
            self._latest = max(self._latest, rest.until)
            self._rests[host.raw, uid] = rest  # the newest now; the oldest is evicted if there are too many
        return rest.failures

    def answered(self, host: PeerId, uid: Uid) -> None:
        """Record an answer of the expert, which ends its rest and that of its host."""
        self._rests.pop((host.raw, uid), None)
        self._rests.pop((host.raw, None), None)

    def rests(self, now: float, host: PeerId, uid: Uid) -> bool:
        """True while this expert of this host must not be called."""
        return any(
            rest is not None and now < rest.until
            for rest in (self._rests.get((host.raw, None)), self._rests.get((host.raw, uid)))
        )

    def hosts(self, now: float) -> frozenset[bytes]:
        """Hosts that rest with all or some of their experts, by raw peer id."""
        if now >= self._latest:
            return frozenset()
        return frozenset(host for (host, _), rest in self._rests.items() if now < rest.until)

    def at(self, now: float) -> RestsNow:
        """All rests at `now`, for callers that check many experts."""
        whole, some = set[bytes](), dict[tuple[bytes, Uid], int]()
        for (host, uid), rest in self._rests.items() if now < self._latest else ():
            if now < rest.until and uid is None:
                whole.add(host)
            elif now < rest.until and uid is not None and uid.at:
                some[host, uid.prefix] = some.get((host, uid.prefix), 0) | 1 << uid.at[-1]
        return RestsNow(frozenset(whole), some)

    def resting(self, now: float) -> int:
        """Number of hosts, and of single experts on hosts, that rest."""
        return sum(now < rest.until for rest in self._rests.values())

    def __len__(self) -> int:
        return len(self._rests)
