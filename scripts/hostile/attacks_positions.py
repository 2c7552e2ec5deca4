"""Attacks at the position of a run: checkpoints and commits that never were, behind it and ahead of it."""

from __future__ import annotations

import trio

from peerd.messages.commits import CommitProof, Committed, ProofShown, ShowProof
from peerd.messages.encoding import encode
from peerd.messages.progress import KeptCheckpoints, kept_key
from peerd.messages.swarm import Conducts, MemberAnswer, Moved, Position, Restore, WhoConducts
from peerd.role.peer_stack import PeerStack
from peerd.rpc.rpc import Answer, Incoming
from scripts.hostile.attacks_swarm import announce, hello, tell_all
from scripts.hostile.field import Field
from tests.kit.declared import ANY

_START = Position(0, b"")


async def f2_claims_checkpoints(there: Field) -> None:
    """A member of every stage that is at its start, has checkpoints of its own making, and goes wherever it is sent."""
    async with there.peer(listen=True) as peer:
        serve_claims(peer)
        for session in range(there.rng.randint(4, 12)):
            saved = [made_up(there) for _ in range(there.rng.randint(1, 8))]
            for stage in range(there.run.pipeline.stages):
                report = hello(there, session, stage, _START, saved=saved, witnessed=saved)
                await tell_all(there, peer, "swarm/6/member", report, MemberAnswer)
            await trio.sleep(0.3)


async def f2_conducts_from_afar(there: Field) -> None:
    """A peer of stage 0 that says it conducts another part of the run, and has made more steps."""
    async with there.peer(listen=True) as peer:
        position = made_up(there)
        serve_claims(peer)

        async def conducts(_: Incoming[WhoConducts]) -> Answer[Conducts]:
            return Answer(Conducts(there.rng.randint(1, 50), position))

        peer.rpc.serve("swarm/6/who", WhoConducts, conducts, declared=ANY)
        await announce(there, peer, 0, position.step)
        await trio.sleep(there.rng.uniform(2, 8))


async def f2_keeps_made_up_sets(there: Field) -> None:
    """A backbone that says it keeps checkpoints, further than the run is."""
    async with there.peer(listen=True) as peer:
        positions = sorted(made_up(there) for _ in range(8))
        serve_claims(peer)
        value = encode(KeptCheckpoints(positions, [f"/ip4/{there.address}/tcp/9"]))
        await peer.dht.put(kept_key(there.run.run), value, ttl_s=60.0, timeout_s=5.0)
        await trio.sleep(there.rng.uniform(2, 8))


def made_up(there: Field) -> Position:
    """A position near the run's, or far from it, in a lineage that nobody knows."""
    return Position(there.rng.choice([there.rng.randint(1, 5000), 10**6, 10**9]), there.rng.randbytes(8))


def serve_claims(peer: PeerStack) -> None:
    """Say that it went where it was sent, and show a proof whose signatures are not its own."""
    signed = [Committed(peer.host.id.text, 0, b"d" * 32, b"s" * 64) for _ in range(512)]

    async def restore(call: Incoming[Restore]) -> Answer[Moved]:
        return Answer(Moved(call.body.target))

    async def show(call: Incoming[ShowProof]) -> Answer[ProofShown]:
        return Answer(ProofShown(CommitProof(call.body.position, signed)))

    peer.rpc.serve("stage/6/restore", Restore, restore, declared=ANY)
    peer.rpc.serve("proofs/1/show", ShowProof, show, declared=ANY)
