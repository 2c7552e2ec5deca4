"""Commit proofs (members' signatures on a reached position): serves this peer's, fetches and verifies others'.

Also knows which peers are trusted, and decides whether a position that keepers announce counts. A keeper is a backbone
that keeps checkpoints of the run. Hostile input: proofs. Only signatures of known members are verified, one for each
member, in batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import trio

from peerd.core.addr import peers_named
from peerd.core.errors import RemoteError, other_run_file
from peerd.core.ids import PeerId
from peerd.core.limits import MEMBERS, RPC_BODY_BYTES
from peerd.messages.commits import CommitProof, Committed, ProofShown, ShowProof
from peerd.messages.proof import has_committed
from peerd.messages.swarm import Position
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.run.runfile import RunFile
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.positions.evidence import Evidence
from peerd.swarm.positions.proven_positions import KEEPERS
from peerd.swarm.posts import peer_of
from peerd.wire.host.host import Host

_SHOW: Final = "proofs/1/show"
DECLARED: Final = {
    _SHOW: Declaration(shows=Shows.NOTHING, rows=None, memory_bytes=RPC_BODY_BYTES, device_s=0.0, calls=64),
}
_ANSWER_S: Final = 5.0
_AT_ONCE: Final = 32  # signatures verified in one turn: about three milliseconds


class CommitProofs:
    """Serves, fetches and verifies members' signatures on positions of one run. `run`: the run's fingerprint."""

    def __init__(self, run: bytes, rpc: Rpc, host: Host, following: ConductorClient, trusted: Collection[str]) -> None:
        self._run, self._rpc, self._host, self._following = run, rpc, host, following
        self.evidence = Evidence()
        self.trusted = frozenset(trusted)
        self.learned = 0  # number of proofs fetched from others
        self._users = 0

    def trust(self, peers: Iterable[str]) -> None:
        """Trust these peers' statements on the run's positions, too."""
        self.trusted |= frozenset(peers)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer calls inside the block. Blocks of several parts of this process may overlap."""
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
            raise other_run_file()
        return Answer(ProofShown(self.evidence.proof(call.body.position)))

    # --- other peers' proofs ----------------------------------------------------------------------------------

    def established(self) -> frozenset[str]:
        """The peers that are members of the run, as far as this peer last knew."""
        return frozenset(map(peer_of, self._following.established or self.evidence.established))

    async def learn(self, peer: PeerId, position: Position, known: Collection[str] | None = None) -> bool:
        """Fetch a proof of `position` from `peer`, and keep it if more than a third of the `known` peers signed it.

        `known` defaults to `established()`. Returns False if `peer` has no such proof.
        """
        known = self.established() if known is None else known
        signed = await self._verified(position, await self._shown(peer, position), frozenset(known))
        if 3 * len(signed) <= len(known):
            return False
        self.evidence.take(CommitProof(position, signed))
        self.learned += 1
        return True

    async def collect(self, peers: Sequence[PeerId], position: Position) -> None:
        """Fetch and keep these peers' proofs of `position`, no matter who signed them: for a keeper, which knows no
        members.

        A peer that later asks the keeper verifies the signatures of the members that it knows.
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
        """The signatures that `peer` has for a position; [] if it has no proof or does not answer."""
        with suppress(RemoteError):
            body = ShowProof(self._run, position)
            proof = (await self._rpc.call(peer, _SHOW, body, ProofShown, timeout_s=_ANSWER_S)).body.proof
            if proof is not None and proof.position == position:
                return proof.committed
        return []

    async def _verified(self, position: Position, shown: Sequence[Committed], known: frozenset[str]) -> list[Committed]:
        """The valid signatures of known members. Only the first signature of each member is verified."""
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
        """True if enough evidence shows that the run reached this position, of which `keepers` have checkpoints.

        The rules are in `swarm/positions/proven_positions`.
        """
        evidence, names = self.evidence, {peer.text for peer in keepers}
        if position in evidence.seen or names & self.trusted:
            return True
        known, signers = self.established(), evidence.signers(position)
        if known and 3 * len(signers & known) > len(known):
            return True
        if known or any(peer.text in self.trusted for peer in self._following.directory.kept):
            return False  # better evidence exists: known members, or trusted keepers
        return len({network for name in names if (network := self.network_of(name))}) >= KEEPERS

    def network_of(self, peer: str) -> str:
        """The network (IPv4 /24 or IPv6 /48) from which a linked peer connects, or "" if unknown."""
        with suppress(ValueError):
            link = self._host.links.best(PeerId.parse(peer))
            if link is not None:
                return link.user.region
        return ""


def trusted_peers(run: RunFile) -> frozenset[str]:
    """Peers whose statements on the run's positions we trust: bootstrap peers, the organizer, `limits.trust`."""
    return frozenset({run.access.organizer, *run.limits.trust, *peers_named(run.bootstrap)} - {""})
