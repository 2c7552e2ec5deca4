"""Experts that several hosts claim: decides which claim counts for a caller.

Any peer can claim an expert in any generation, so the number proves nothing. If several hosts claim an expert, callers
call its owner by its lineage (`experts.owners.lineage`), like hosts and holders. If the lineage cannot be read, or the
owner does not claim the expert now, a caller continues with the host that it called before, as long as that still
claims it. A host that this caller has called for eight announcement periods counts as the owner if no other owner is
known. If none of these rules names a host, or there is no source of owners, `ExpertDirectory` uses the highest
generation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERTS_SEEN
from peerd.experts.owners.owner_tree import ExpertReign
from peerd.experts.rules.prefix_cache import CachedClaim
from peerd.run.grid import Uid

log = logging.getLogger("peerd.experts.calls.contested")

_OWNERS_S: Final = 5.0  # for one read of the lineages
_STEADY_PERIODS: Final = 8.0  # announcement periods: by then an orphan has another host, and a false claim has rivals

Told = Sequence[tuple[int, CachedClaim]]  # claims below a prefix, by coordinate


class OwnerSource(Protocol):
    """A source of the owners of experts: `experts.calls.kept_directory.KeptDirectory`."""

    async def owners(self, prefixes: Sequence[Uid], before: Mapping[Uid, ExpertReign]) -> Mapping[Uid, PeerId]:
        """Hosts that own experts below prefixes. `before`: hosts that the caller has called for some time."""
        ...


class ContestedExperts:
    """Finds the owners of experts that several hosts claim, and remembers which hosts this caller has called."""

    def __init__(self, announce_s: float) -> None:
        self.source: OwnerSource | None = None
        self._steady_s = _STEADY_PERIODS * announce_s
        self._called = BoundedDict[Uid, tuple[PeerId, float]](EXPERTS_SEEN)  # (host, since when)

    async def owners(self, told: Mapping[Uid, Told]) -> dict[Uid, PeerId]:
        """The hosts whose claims count, for experts with several claims. `told`: claims by prefix directly above
        experts.
        """
        if self.source is None:
            return {}
        claims = dict[Uid, list[CachedClaim]]()
        for prefix, below in told.items():
            for coordinate, claim in below:
                claims.setdefault(prefix.below(coordinate), []).append(claim)
        contested = {uid: each for uid, each in claims.items() if len({claim.host for claim in each}) > 1}
        for uid in claims.keys() - contested.keys():
            self._call(uid, claims[uid][0].host)
        owners = await self._ask(contested) if contested else {}
        found = dict[Uid, PeerId]()
        for uid, each in contested.items():
            hosts = {claim.host for claim in each}
            owner = next((host for host in (owners.get(uid), self._called_host(uid)) if host in hosts), None)
            if owner is not None:
                found[uid] = owner
                self._call(uid, owner)
        return found

    def _call(self, uid: Uid, host: PeerId) -> None:
        if self._called_host(uid) != host:
            self._called[uid] = host, trio.current_time()

    def _called_host(self, uid: Uid) -> PeerId | None:
        return self._called[uid][0] if uid in self._called else None

    def _steady(self, contested: Mapping[Uid, Iterable[CachedClaim]]) -> dict[Uid, ExpertReign]:
        """Hosts that still claim the experts for which they have been called for some time."""
        steady, found = trio.current_time() - self._steady_s, dict[Uid, ExpertReign]()
        for uid, claims in contested.items():
            host, since = self._called.get(uid, (None, 0.0))
            for claim in claims:
                if claim.host == host and since <= steady:
                    found[uid] = ExpertReign(claim.generation, claim.host)
        return found

    async def _ask(self, contested: Mapping[Uid, Iterable[CachedClaim]]) -> Mapping[Uid, PeerId]:
        assert self.source is not None
        prefixes = sorted({uid.prefix for uid in contested})
        with trio.move_on_after(_OWNERS_S):
            try:
                return await self.source.owners(prefixes, self._steady(contested))
            except RemoteError as error:
                log.info("owners of experts that several hosts claim could not be read: %s", error)
        return {}
