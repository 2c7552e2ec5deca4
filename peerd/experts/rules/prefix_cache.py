"""Cache of the live experts below prefixes of the grid, sans-IO: hosts' claims, and prefixes without live experts.

Entries of both kinds are bounded in age and number, and so are all claims together; the entry written longest ago is
evicted first. Nothing here is sent to other peers: negative entries that spread would let any peer hide experts. Of
several hosts that claim one expert, the owner counts if it is known, then the highest (generation, peer id).

A hostile host may claim anything, even the highest generation. A caller that gets no answer from it does not call it
for a while (`host_rests`), and the next claim counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_CLAIMS, EXPERT_CLAIMS_KEPT, EXPERT_PREFIXES_KEPT
from peerd.experts.rules.host_rests import HostRests, RestsNow
from peerd.run.grid import Grid, Uid

_AHEAD: Final = 0.5  # fraction of its age limit after which an entry in use is read again, so that nobody waits


@dataclass(frozen=True, slots=True)
class CachedClaim:
    """A host's announcement that it hosts an expert, or (with generation 0) some expert below a prefix."""

    host: PeerId
    generation: int = 0
    only_dials: bool = False  # nobody can dial the host: it can be asked only while it is connected

    @property
    def rank(self) -> tuple[int, bytes]:
        """Order of claims to one expert: the highest counts."""
        return self.generation, self.host.raw


Claims = Mapping[int, tuple[CachedClaim, ...]]  # by coordinate, the owner first, then by rank
_NOTHING: Final[Claims] = MappingProxyType({})


def ranked(
    claims: Iterable[tuple[int, CachedClaim]],
    resting: Set[bytes] = frozenset(),
    owners: Mapping[int, PeerId] = MappingProxyType({}),
) -> Claims:
    """Claims by coordinate, at most EXPERT_CLAIMS each: the owner's and the highest; resting hosts' are dropped first.

    So a few liars that claim the highest generation do not hide other hosts for long.
    """
    found = dict[int, list[CachedClaim]]()
    for coordinate, claim in claims:
        found.setdefault(coordinate, []).append(claim)
    kept = dict[int, tuple[CachedClaim, ...]]()
    for coordinate, told in sorted(found.items()):
        owner = owners.get(coordinate)
        told.sort(key=lambda claim: (claim.host == owner, claim.host.raw not in resting, claim.rank), reverse=True)
        highest = sorted(told[:EXPERT_CLAIMS], key=lambda claim: (claim.host == owner, claim.rank), reverse=True)
        kept[coordinate] = tuple(highest)
    return kept


@dataclass(slots=True)
class _Entry:
    claims: Claims
    read: float
    used: float


class PrefixCache:
    """Cache of hosts' claims, by prefix.

    `positive_s`, `negative_s`: age at which an entry with claims, or without, expires; `prefixes`, `claims`: bounds on
    both.
    """

    def __init__(
        self,
        positive_s: float,
        negative_s: float,
        prefixes: int = EXPERT_PREFIXES_KEPT,
        claims: int = EXPERT_CLAIMS_KEPT,
    ) -> None:
        self._positive_s, self._negative_s, self._most = positive_s, negative_s, claims
        self._entries = BoundedDict[Uid, _Entry](prefixes)
        self.claims = 0  # in all entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, now: float, prefix: Uid) -> Claims | None:
        """Claims to the experts below a prefix; empty if none is alive, None if unknown or too old."""
        entry = self._entries.get(prefix)
        if entry is None or now - entry.read >= self._age_s(entry):
            return None
        entry.used = now
        return entry.claims

    def last(self, now: float, prefix: Uid, most_s: float) -> Claims:
        """The claims below a prefix as last read, up to `most_s` ago, for use when the directory does not answer."""
        entry = self._entries.get(prefix)
        return entry.claims if entry is not None and now - entry.read < most_s else _NOTHING

    def put(self, now: float, prefix: Uid, claims: Claims) -> None:
        """Store what a look-up at `now` found below a prefix."""
        self.forget(prefix)
        if len(self._entries) == self._entries.maxlen:
            self.forget(next(iter(self._entries)))
        self._entries[prefix] = _Entry(claims or _NOTHING, now, now)
        self.claims += _count(claims)
        while self.claims > self._most:
            self.forget(next(iter(self._entries)))

    def forget(self, prefix: Uid) -> None:
        """Remove a prefix, so that the next reader looks it up."""
        entry = self._entries.pop(prefix, None)
        if entry is not None:
            self.claims -= _count(entry.claims)

    def due(self, now: float) -> list[Uid]:
        """Prefixes to read again: they have claims, were used since they were read, and expire soon."""
        return [
            prefix
            for prefix, entry in self._entries.items()
            if entry.claims and entry.used > entry.read and _AHEAD <= (now - entry.read) / self._positive_s < 1
        ]

    def check(self) -> None:
        """Raise AssertionError unless the bounds hold."""
        assert self.claims == sum(_count(entry.claims) for entry in self._entries.values()) <= self._most
        assert len(self._entries) <= self._entries.maxlen

    def _age_s(self, entry: _Entry) -> float:
        return self._positive_s if entry.claims else self._negative_s


def _count(claims: Claims) -> int:
    return sum(map(len, claims.values()))


@dataclass(frozen=True, slots=True)
class _Counted:
    """Claims below a prefix as bits: of each host, by raw peer id, and of all together."""

    claims: Claims
    of_host: Mapping[bytes, int]
    only_dial: Mapping[bytes, PeerId]
    all: bytes


class LiveBits:
    """Bitmaps of experts that can be asked now, sans-IO: hosts' claims, without hosts that rest or are disconnected.

    A look-up for a batch reads hundreds of bitmaps. So each host's bits below a prefix are stored as one integer, from
    which the resting ones are removed.
    """

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
        """The bitmap of each prefix, from its claims; empty if no claim counts."""
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
