"""Bitmaps of experts that can be asked now, sans-IO: hosts' claims, without hosts that rest or are disconnected.

A look-up for a batch reads hundreds of bitmaps. So each host's bits below a prefix are stored as one integer, from
which the resting ones are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.core.experts.grid import Grid, Uid
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_PREFIXES_KEPT
from peerd.machine.experts.host_rests import HostRests, RestsNow
from peerd.machine.experts.prefix_cache import CachedClaim, Claims


@dataclass(frozen=True, slots=True)
class _Counted:
    """Claims below a prefix as bits: of each host, by raw peer id, and of all together."""

    claims: Claims
    of_host: Mapping[bytes, int]
    only_dial: Mapping[bytes, PeerId]
    all: bytes


class LiveBits:
    """The claims that count now. `linked(peer)`: True if a peer that cannot be dialed is connected."""

    def __init__(self, grid: Grid, rests: HostRests, linked: Callable[[PeerId], bool]) -> None:
        self._grid, self._rests, self._linked = grid, rests, linked
        self._counted = BoundedDict[Uid, _Counted](EXPERT_PREFIXES_KEPT)

    def owner(self, now: float, uid: Uid, told: Iterable[CachedClaim]) -> CachedClaim | None:
        """The highest claim to an expert whose host can be asked now, or None."""
        for claim in told:
            if not self._rests.rests(now, claim.host, uid) and not (claim.only_dials and not self._linked(claim.host)):
                return claim
        return None

    def of(self, now: float, found: Mapping[Uid, Claims]) -> dict[Uid, bytes]:
        """The bitmap of each prefix, from its claims; empty if none counts."""
        rests, bits = self._rests.at(now), dict[Uid, bytes]()
        for prefix, claims in found.items():
            counted = self._counted.get(prefix)
            if counted is None or counted.claims is not claims:
                counted = self._counted[prefix] = self._count(prefix, claims)
            if rests.whole or rests.some or counted.only_dial:
                bits[prefix] = self._bytes(prefix, self._awake(rests, prefix, counted))
            else:
                bits[prefix] = counted.all
        return bits

    def _awake(self, rests: RestsNow, prefix: Uid, counted: _Counted) -> int:
        awake = 0
        for host, bits in counted.of_host.items():
            away = host in counted.only_dial and not self._linked(counted.only_dial[host])
            if not away and host not in rests.whole:
                awake |= bits & ~rests.some.get((host, prefix), 0)
        return awake

    def _count(self, prefix: Uid, claims: Claims) -> _Counted:
        of_host, only_dial, every = dict[bytes, int](), dict[bytes, PeerId](), 0
        for coordinate, told in claims.items():
            bit = 1 << coordinate
            every |= bit
            for claim in told:
                of_host[claim.host.raw] = of_host.get(claim.host.raw, 0) | bit
                if claim.only_dials:
                    only_dial[claim.host.raw] = claim.host
        return _Counted(claims, of_host, only_dial, self._bytes(prefix, every))

    def _bytes(self, prefix: Uid, bits: int) -> bytes:
        return bits.to_bytes(-(-self._grid.side_below(prefix) // 8), "little") if bits else b""
