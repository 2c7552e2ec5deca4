"""Bitmaps of experts that may be asked now, sans-IO: hosts' claims without those of hosts that rest or are away.

A look-up for a batch reads hundreds of bitmaps and most hosts are well: the bits of a prefix's claims are kept, and
counted anew only where one of its hosts rests, or can only dial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.core.experts.grid import Grid, Uid, bitmap
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_PREFIXES_KEPT
from peerd.machine.experts.host_rests import HostRests
from peerd.machine.experts.prefix_cache import Claims, ToldClaim


@dataclass(frozen=True, slots=True)
class _Whole:
    """All bits of these claims, and the hosts that may make some of them not count; None: any time."""

    claims: Claims
    bits: bytes
    hosts: frozenset[bytes] | None


class LiveBits:
    """The claims that count. `linked`: whether a peer that nobody can dial is connected now."""

    def __init__(self, grid: Grid, rests: HostRests, linked: Callable[[PeerId], bool]) -> None:
        self._grid, self._rests, self._linked = grid, rests, linked
        self._whole = BoundedDict[Uid, _Whole](EXPERT_PREFIXES_KEPT)

    def owner(self, now: float, uid: Uid, told: Iterable[ToldClaim]) -> ToldClaim | None:
        """The highest of the claims to an expert whose host may be asked now."""
        for claim in told:
            if not self._rests.rests(now, claim.host, uid) and not (claim.only_dials and not self._linked(claim.host)):
                return claim
        return None

    def of(self, now: float, found: Mapping[Uid, Claims]) -> dict[Uid, bytes]:
        """Bitmap for each prefix and its claims; empty where none counts."""
        resting, bits = self._rests.hosts(now), dict[Uid, bytes]()
        for prefix, claims in found.items():
            whole = self._whole.get(prefix)
            if whole is None or whole.claims is not claims:
                whole = self._whole[prefix] = self._of(prefix, claims)
            if whole.hosts is not None and resting.isdisjoint(whole.hosts):
                bits[prefix] = whole.bits
            else:
                alive = [c for c, told in claims.items() if self.owner(now, prefix.below(c), told)]
                bits[prefix] = self._bits(prefix, alive)
        return bits

    def _of(self, prefix: Uid, claims: Claims) -> _Whole:
        told = [claim for each in claims.values() for claim in each]
        hosts = None if any(claim.only_dials for claim in told) else frozenset(claim.host.raw for claim in told)
        return _Whole(claims, self._bits(prefix, claims), hosts)

    def _bits(self, prefix: Uid, coordinates: Iterable[int]) -> bytes:
        alive = list(coordinates)
        return bitmap(alive, self._grid.side_below(prefix)) if alive else b""
