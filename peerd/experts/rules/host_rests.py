"""Rests of expert hosts that failed, sans-IO: which host, or which of its experts, a caller skips for a while.

The first rest lasts 2 s, each further one in a row twice as long, up to a minute; an answer ends the rest. Failures
during a rest count as the same one. A host that cannot be reached rests with all experts that it claims; one that
reports that it has no such expert rests with that expert only. Each caller keeps its own rests, and sends them to
nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_RESTS
from peerd.run.grid import Uid
from peerd.wire.rate.suspicion import Suspicion

FIRST_S: Final = 2.0  # of the first rest: a host that restarts is back by then
LONGEST_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RestsNow:
    """All rests at one moment, by raw peer id: whole hosts, and bits of a host's experts below a prefix."""

    whole: frozenset[bytes]
    some: Mapping[tuple[bytes, Uid], int]


class HostRests:
    """Rests of hosts, and of single experts on hosts. `uid` None: the host with all experts that it claims."""

    def __init__(self) -> None:
        self._rests = Suspicion[tuple[bytes, Uid | None]](FIRST_S, LONGEST_S, EXPERT_RESTS)

    def failed(self, now: float, host: PeerId, uid: Uid | None = None) -> int:
        """Record a failure; returns the number of failures in a row."""
        return self._rests.failed(now, (host.raw, uid))

    def answered(self, host: PeerId, uid: Uid) -> None:
        """Record an answer of the expert, which ends its rest and that of its host."""
        self._rests.forgive((host.raw, uid))
        self._rests.forgive((host.raw, None))

    def rests(self, now: float, host: PeerId, uid: Uid) -> bool:
        """True while this expert of this host must not be called."""
        return self._rests.is_aside(now, (host.raw, None)) or self._rests.is_aside(now, (host.raw, uid))

    def hosts(self, now: float) -> frozenset[bytes]:
        """Hosts that rest with all or some of their experts, by raw peer id."""
        return frozenset(host for host, _ in self._rests.aside(now))

    def at(self, now: float) -> RestsNow:
        """All rests at `now`, for callers that check many experts."""
        whole, some = set[bytes](), dict[tuple[bytes, Uid], int]()
        for host, uid in self._rests.aside(now):
            if uid is None:
                whole.add(host)
            elif uid.at:
                some[host, uid.prefix] = some.get((host, uid.prefix), 0) | 1 << uid.at[-1]
        return RestsNow(frozenset(whole), some)

    def resting(self, now: float) -> int:
        """Number of hosts, and of single experts on hosts, that rest."""
        return len(self._rests.aside(now))
