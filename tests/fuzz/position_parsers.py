"""Commit proofs and claims of positions, for the fuzz tests: see `parsers`. No mutated proof has another signer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from peerd.core.keys import Keypair
from peerd.core.limits import MEMBERS
from peerd.messages.commits import CommitProof, Committed, ProofShown, ShowProof
from peerd.messages.encoding import decode, encode
from peerd.messages.proof import commit_signature
from peerd.messages.swarm import Moved, Position
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.positions.evidence import Evidence
from tests.fuzz.parsers import KEYS, OTHER, PARSERS, Corpus, parser

__all__ = ["PARSERS"]
_RUN, _PLACE, _DIGEST = bytes(16), Position(8, b"signed"), b"m" * 32
_LIAR = Keypair.from_seed(bytes(range(2, 34)))  # a member that signs whatever it is asked to
_KNOWN = frozenset(key.peer_id.text for key in (KEYS, OTHER, _LIAR))


def _signed(key: Keypair, place: Position = _PLACE, stage: int = 0, run: bytes = _RUN) -> Committed:
    return Committed(key.peer_id.text, stage, _DIGEST, commit_signature(key.sign, run, stage, place, _DIGEST))


def _proofs() -> list[CommitProof]:
    """Of these only the first says something: all others have one valid signer of three at most."""
    far, later = Position((1 << 53) - 1, bytes(16)), Position(9, b"signed")
    none = [
        CommitProof(_PLACE, [_signed(_LIAR, stage=stage) for stage in range(3)]),
        CommitProof(_PLACE, [msgspec.structs.replace(_signed(key), signature=bytes(64)) for key in (KEYS, OTHER)]),
        CommitProof(_PLACE, [_signed(key, run=b"x" * 16) for key in (KEYS, OTHER, _LIAR)]),
        CommitProof(_PLACE, [msgspec.structs.replace(_signed(key), stage=7) for key in (KEYS, OTHER)]),
        CommitProof(later, [_signed(key) for key in (KEYS, OTHER, _LIAR)]),
        CommitProof(far, [_signed(_LIAR, far)] * 3),
        CommitProof(far, []),
    ]
    return [CommitProof(_PLACE, [_signed(KEYS), _signed(OTHER)]), *none]


def _shown() -> Corpus:
    return [encode(ProofShown(None)), *(encode(ProofShown(proof)) for proof in _proofs())]


async def _learned(shown: ProofShown, asked: Position) -> Evidence:
    """The evidence of a peer that asked for a proof of this position, and was shown this."""

    async def call(*_: object, **__: object) -> Any:
        return SimpleNamespace(body=shown)

    rpc, following = SimpleNamespace(call=call), SimpleNamespace(established={})
    proofs = CommitProofs(_RUN, cast(Any, rpc), cast(Any, None), cast(Any, following), ())
    await proofs.learn(KEYS.peer_id, asked, _KNOWN)
    return proofs.evidence


def _evidence(shown: ProofShown, asked: Position) -> Evidence:
    waits = _learned(shown, asked)
    try:
        waits.send(None)
    except StopIteration as ended:
        return cast(Evidence, ended.value)
    finally:
        waits.close()
    raise AssertionError("so few signatures take no turn of the scheduler")


@parser("commit proofs", _shown)
def _proof(data: bytes) -> None:
    shown = decode(ProofShown, data)
    assert decode(ProofShown, encode(shown)) == shown
    if shown.proof is None:
        return
    assert len(shown.proof.committed) <= MEMBERS
    evidence = _evidence(shown, shown.proof.position)
    signers = evidence.signers(shown.proof.position)
    if signers:  # parts of the first proof, and of the liar's
        assert shown.proof.position == _PLACE
        assert len(signers) > 1
        assert signers <= _KNOWN
    stored, again = evidence.to_bytes(), Evidence()
    again.load(stored)
    assert again.to_bytes() == stored
    assert not _evidence(shown, Position(1, b"asked")).version


def _moved() -> Corpus:
    moved = [Moved(_PLACE, _DIGEST, _signed(KEYS).signature), Moved(_PLACE), Moved(Position(9, b"another"), _DIGEST)]
    return [b"\0" + encode(ShowProof(_RUN, _PLACE)), *(b"\1" + encode(one) for one in moved)]


@parser("questions for commit proofs, and answers to commits", _moved)
def _questions(data: bytes) -> None:
    """Whatever members answer to a commit, others can read what the conductor shows of it."""
    kind = (ShowProof, Moved)[data[0] % 2] if data else ShowProof
    body = decode(kind, data[1:])
    assert encode(decode(kind, encode(body))) == encode(body)
    evidence = Evidence()
    if isinstance(body, Moved):
        for post in (f"{KEYS.peer_id.text}/0", f"{OTHER.peer_id.text}/1"):
            evidence.collect(post, _PLACE, body)
    proof = evidence.proof(body.position)
    assert proof is None or body.position == _PLACE
    assert decode(ProofShown, encode(ProofShown(proof))).proof == proof
