"""Commit proofs between peers: serves this peer's (`proofs/1/show`), fetches others', and verifies their signatures.

Also answers which peers are trusted, and whether a position that keepers announce counts for this peer. Hostile input:
proofs. Signatures are verified some at a time: of known members alone, and one of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import trio

from peerd.core.addr import peers_named
from peerd.core.errors import OTHER_RUN_FILE, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import MEMBERS, RPC_BODY_BYTES
from peerd.core.messages.commits import CommitProof, Committed, ProofShown, ShowProof
from peerd.core.messages.proof import has_committed
from peerd.core.messages.swarm import Position
from peerd.core.run.runfile import RunFile
from peerd.machine.positions.evidence import Evidence
from peerd.machine.positions.proven_positions import KEEPERS
from peerd.machine.rpc.declaration import Declaration, Shows
from peerd.machine.swarm.posts import peer_of
from peerd.net.host.host import Host
from peerd.service.conductor.conductor_client import ConductorClient
from peerd.service.rpc.rpc import Answer, Incoming, Rpc

_SHOW: Final = "proofs/1/show"
DECLARED: Final = {
    _SHOW: Declaration(shows=Shows.NOTHING, rows=None, memory_bytes=RPC_BODY_BYTES, device_s=0.0, calls=64),
}
_ANSWER_S: Final = 5.0
_AT_ONCE: Final = 32  # signatures verified in one turn: about three milliseconds


class CommitProofs:
    """See the module's header. `run`: the fingerprint."""

    def __init__(self, run: bytes, rpc: Rpc, host: Host, following: ConductorClient, trusted: Collection[str]) -> None:
        self._run, self._rpc, self._host, self._following = run, rpc, host, following
        self.evidence = Evidence()
        self.trusted = frozenset(trusted)
        self.learned = 0  # number of proofs that others showed us
        self._users = 0

    def trust(self, peers: Iterable[str]) -> None:
        """Take these peers' word on the run's positions, too."""
        self.trusted |= frozenset(peers)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer calls inside the block; blocks of several parts of this process may overlap."""
        if not self._users:
            self._rpc.serve(_SHOW, ShowProof, self._show, declared=DECLARED[_SHOW])
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._rpc.unserve("proofs/1")

    async def _show(self, call: Incoming[ShowProof]) -> Answer[ProofShown]:
        if call.body.run != self._run:
            raise Refused(OTHER_RUN_FILE)
        return Answer(ProofShown(self.evidence.proof(call.body.position)))

    # --- others' ----------------------------------------------------------------------------------------------

    def established(self) -> frozenset[str]:
        """The peers of the run's members, as this peer knew them last."""
        return frozenset(map(peer_of, self._following.established or self.evidence.established))

    async def learn(self, peer: PeerId, position: Position, known: Collection[str] | None = None) -> bool:
        """Ask `peer` for a proof of `position`, and keep it if more than a third of the `known` members signed it.

        `known`: peers; None: `established`. False: there is no such proof there.
        """
        known = self.established() if known is None else known
        signed = await self._verified(position, await self._shown(peer, position), frozenset(known))
        if 3 * len(signed) <= len(known):
            return False
        self.evidence.take(CommitProof(position, signed))
        self.learned += 1
        return True

    async def collect(self, peers: Sequence[PeerId], position: Position) -> None:
        """Keep what these peers show of `position`, whoever signed it: for a keeper, which does not know the members.

        Whoever asks the keeper verifies the signatures of those that it knows itself.
        """
        before = self.evidence.proof(position)
        signed = {one.peer: one for one in before.committed} if before is not None else {}
        for peer in peers:
            shown = await self._shown(peer, position)
            some = await self._verified(position, shown[: MEMBERS // len(peers)], frozenset(one.peer for one in shown))
            signed |= {one.peer: one for one in some if one.peer not in signed}
        if signed:
            self.evidence.take(CommitProof(position, list(signed.values())[:MEMBERS]))

    async def _shown(self, peer: PeerId, position: Position) -> list[Committed]:
        """The signatures that `peer` shows of a position; none where it has no proof, or does not answer."""
        with suppress(RemoteError):
            body = ShowProof(self._run, position)
            proof = (await self._rpc.call(peer, _SHOW, body, ProofShown, timeout_s=_ANSWER_S)).body.proof
            if proof is not None and proof.position == position:
                return proof.committed
        return []

    async def _verified(self, position: Position, shown: Sequence[Committed], known: frozenset[str]) -> list[Committed]:
        """The valid signatures of known members; of each the first one alone is looked at."""
        found = list[Committed]()
        looked_at = set[str]()
        for one in shown:
            if one.peer in known and one.peer not in looked_at:
                if has_committed(self._run, position, one):
                    found.append(one)
                looked_at.add(one.peer)
                if len(looked_at) % _AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
        return found

    # --- keepers ----------------------------------------------------------------------------------------------

    def counts(self, position: Position, keepers: Collection[PeerId]) -> bool:
        """True when a position that these peers keep was surely the run's; see `machine/positions/proven_positions`."""
        evidence, names = self.evidence, {peer.text for peer in keepers}
        if position in evidence.seen or names & self.trusted:
            return True
        known, signers = self.established(), evidence.signers(position)
        if known and 3 * len(signers & known) > len(known):
            return True
        if known or any(peer.text in self.trusted for peer in self._following.directory.kept):
            return False  # there are others whose word says more
        return len({network for name in names if (network := self.network_of(name))}) >= KEEPERS

    def network_of(self, peer: str) -> str:
        """The network that a linked peer connects from; "": unknown."""
        with suppress(ValueError):
            link = self._host.links.best(PeerId.parse(peer))
            if link is not None:
                return link.user.region
        return ""


def trusted_peers(run: RunFile) -> frozenset[str]:
    """Peers whose word on the run's positions this peer takes: its bootstrap peers, the organizer, `limits.trust`."""
    return frozenset({run.access.organizer, *run.limits.trust, *peers_named(run.bootstrap)} - {""})
