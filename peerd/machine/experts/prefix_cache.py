"""Cache of what lives below prefixes of the grid, sans-IO: hosts' claims, and prefixes below which nothing lives.

Entries of both kinds are bounded in age and number, and so are all claims together; the entry written longest ago is
evicted first. Nothing here is sent to other peers: negative entries that spread would let any peer hide experts. Of
several hosts that claim one expert, the owner counts if it is known, then the highest (generation, peer id).

A hostile host may claim anything, even the highest generation. A caller that gets no answer from it does not call it
for a while (`host_rests`), and the next claim counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.experts.grid import Uid
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_CLAIMS, EXPERT_CLAIMS_KEPT, EXPERT_PREFIXES_KEPT

_AHEAD: Final = 0.5  # fraction of its age limit after which an entry in use is read again, so that nobody waits


@dataclass(frozen=True, slots=True)
class CachedClaim:
    """A host's announcement that an expert, or something below a prefix, lives there. For a prefix, numbers are 0."""

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
    """Claims by coordinate, at most EXPERT_CLAIMS each: the owner's and the highest. Resting hosts' are cut first.

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
    """Claims by prefix.

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
        """What lives below a prefix; empty if nothing does, None if unknown or too old."""
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
        """Prefixes with claims that were used since they were read, and that will expire soon."""
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
