"""Commit proofs that other peers show: what verifying them costs, and which signatures count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.core.keys import Keypair
from peerd.messages import proof as signed_statements
from peerd.messages.commits import CommitProof, Committed, ProofShown
from peerd.messages.proof import commit_signature
from peerd.messages.swarm import Position
from peerd.state.checkpoints.evidence_store import EvidenceStore
from peerd.swarm.conductor import commit_proofs
from peerd.swarm.conductor.commit_proofs import CommitProofs

RUN, POSITION, DIGEST = bytes(32), Position(8, b"signed"), b"m" * 32
KEYS = [Keypair.from_seed(bytes([n]) * 32) for n in range(4)]


async def test_of_each_known_member_one_signature_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile peer names one member thousands of times."""
    verified = list[str]()

    def has_committed(run: bytes, position: Position, shown: Committed) -> bool:
        verified.append(shown.peer)
        return signed_statements.has_committed(run, position, shown)

    monkeypatch.setattr(commit_proofs, "has_committed", has_committed)
    valid = Committed(KEYS[0].peer_id.text, 0, DIGEST, commit_signature(KEYS[0].sign, RUN, 0, POSITION, DIGEST))
    made_up = [Committed(KEYS[1].peer_id.text, stage, DIGEST, bytes(64)) for stage in range(256)]
    shown = CommitProof(POSITION, [valid, *made_up])

    async def call(*_: object, **__: object) -> Any:
        return SimpleNamespace(body=ProofShown(shown))

    following = SimpleNamespace(established={})
    proofs = CommitProofs(RUN, cast(Any, SimpleNamespace(call=call)), cast(Any, None), cast(Any, following), ())
    assert not await proofs.learn(KEYS[3].peer_id, POSITION, [key.peer_id.text for key in KEYS[:3]])
    assert verified == [KEYS[0].peer_id.text, KEYS[1].peer_id.text]
    assert await proofs.learn(KEYS[3].peer_id, POSITION, [key.peer_id.text for key in KEYS[:2]])
    assert proofs.evidence.signers(POSITION) == {KEYS[0].peer_id.text}


async def test_a_keeper_keeps_what_each_conductor_shows_whoever_announces_itself() -> None:
    """Strangers' records outnumber the members': neither they nor a conductor of theirs displace the members' proof."""
    members, strangers = KEYS[:2], KEYS[2:]
    shows = {
        key.peer_id: CommitProof(
            POSITION,
            [
                Committed(one.peer_id.text, 0, DIGEST, commit_signature(one.sign, RUN, 0, POSITION, DIGEST))
                for one in signers
            ],
        )
        for key, signers in ((members[0], members), (strangers[0], strangers))
    }

    async def call(peer: Any, *_: object, **__: object) -> Any:
        return SimpleNamespace(body=ProofShown(shows[peer]))

    announced = {
        number: SimpleNamespace(peer=key.peer_id, progress=SimpleNamespace(conductor=conductor.peer_id.text))
        for number, (key, conductor) in enumerate(
            [(key, members[0]) for key in members] + [(key, strangers[0]) for key in KEYS * 4]
        )
    }
    following = SimpleNamespace(established={})
    proofs = CommitProofs(RUN, cast(Any, SimpleNamespace(call=call)), cast(Any, None), cast(Any, following), ())
    store = EvidenceStore.__new__(EvidenceStore)
    store._proofs, store._directory = proofs, cast(Any, SimpleNamespace(announced=announced))
    store._written = proofs.evidence.version + 1
    await store.prove(POSITION)
    assert proofs.evidence.signers(POSITION) >= {key.peer_id.text for key in members}
