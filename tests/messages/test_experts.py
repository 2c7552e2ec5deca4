"""Messages of experts have the bytes that were agreed; pointers to checkpoints are signed and ordered."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from peerd.core.keys import Keypair
from peerd.core.limits import EXPERT_PLACES
from peerd.core.varint import encode_varint
from peerd.messages.encoding import Message, decode, encode
from peerd.messages.experts import (
    Announced,
    Backward,
    CheckpointRef,
    Forward,
    Gradient,
    HolderOffer,
    Keep,
    Kept,
    KeptExperts,
    Name,
    Output,
    PieceWanted,
    TransferAnswer,
    TransferRequest,
    state_root,
)
from peerd.run.grid import Uid

OWNER, OTHER = Keypair.from_seed(bytes(32)), Keypair.from_seed(bytes([1]) * 32)
GOLDEN = Path(__file__).parents[1] / "golden"
ADDRS = ["/ip4/45.3.1.1/tcp/20643", "/ip6/2001:db9::7/tcp/4001"]
RUN, REQUEST = bytes(range(16)), bytes(range(16, 32))


def pointer(generation: int = 0, version: int = 7, owner: Keypair = OWNER) -> CheckpointRef:
    made = CheckpointRef(
        bytes(16), Name.of(Uid(0, (5, 12))), generation, version, bytes(32), 1000, owner.peer_id.public_key
    )
    return made.signed(owner)


def test_a_pointer_is_its_owners_word_whoever_shows_it() -> None:
    kept = decode(KeptExperts, encode(KeptExperts([pointer()], [])))
    assert kept.pointers[0].is_signed()
    assert kept.pointers[0].peer == OWNER.peer_id
    assert kept.pointers[0].expert.uid == Uid(0, (5, 12))


def test_a_pointer_that_was_changed_or_is_anothers_counts_nothing() -> None:
    for changed in (
        {"generation": 1},
        {"version": 8},
        {"digest": bytes([1]) * 32},
        {"size_bytes": 1001},
        {"expert": Name(0, [5, 13])},
        {"run": bytes([1]) * 16},
        {"owner": OTHER.peer_id.public_key},
        {"signature": b""},
        {"signature": bytes(64)},
    ):
        assert not msgspec.structs.replace(pointer(), **changed).is_signed(), changed


def handed(**changed: object) -> CheckpointRef:
    """A pointer of OTHER, to which OWNER handed the expert, as it did to OWNER before."""
    first = msgspec.structs.replace(pointer(0, 7, OTHER), heir=OWNER.peer_id.public_key).signed(OTHER)
    second = msgspec.structs.replace(
        pointer(1, 9), began=7, former=first.as_former(), heir=OTHER.peer_id.public_key
    ).signed(OWNER)
    facts = {"began": 9, "former": second.as_former()} | changed
    return msgspec.structs.replace(pointer(2, 12, OTHER), **facts).signed(OTHER)


def test_a_pointer_proves_from_which_checkpoint_its_owner_went_on() -> None:
    told = decode(Keep, encode(Keep(handed()))).pointer
    assert told.is_signed()
    assert told.continues()
    assert told.former is not None
    assert told.former.peer == OWNER.peer_id
    for changed in ({"version": 8}, {"digest": bytes([1]) * 32}, {"heir": b""}, {"origin": b""}, {"generation": 0}):
        forged = handed(former=msgspec.structs.replace(told.former, **changed))
        assert not forged.is_signed(), changed  # though OTHER signed what it made up


def test_a_generation_goes_on_from_no_other_state_than_the_one_that_was_signed() -> None:
    assert handed(version=9).continues()
    assert handed(version=0, began=0).continues()  # anew, where no checkpoint could be had
    for changed in (
        {"version": 9, "digest": bytes([1]) * 32},
        {"began": 10},
        {"version": 8},
        {"generation": 1},
        {"former": None},
    ):
        assert not handed(**changed).continues(), changed


def test_the_newest_checkpoint_has_the_highest_rank() -> None:
    order = [pointer(0, 9), pointer(1, 3), pointer(1, 4), pointer(2, 0)]
    mixed = [order[2], order[0], order[3], order[1]]
    assert sorted(mixed, key=lambda one: one.rank) == order


def test_the_root_of_a_state_is_the_digest_of_its_pieces_digests() -> None:
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    assert state_root(b"".join(digests)) == hashlib.sha256(b"".join(digests)).digest()


MESSAGES: dict[str, list[Message]] = {
    "expert_v1.bin": [
        Forward(RUN, Name(0, [5, 12])),
        Output(3, 1 << 40, 0.25),
        Output(0, 0),
        Backward(RUN, Name(1023, [0, 1, 1023]), REQUEST, 3, 70),
        Backward(RUN, Name(1, [7]), REQUEST, 0, 0, most_stale=64),
        Gradient((1 << 53) - 1, 71, 1e6),
        Announced(Name(0, [5]), b"\x20\x10", [0, 3], [70, 0], 0.5, ADDRS),
        Announced(Name(0, []), b"\x01", [], [], 0.0, [], b"token", client=True),
    ],
    "vault_v2.bin": [
        Keep(pointer(2, 40)),
        Keep(msgspec.structs.replace(pointer(2, 40), began=33).signed(OWNER)),
        Keep(handed()),
        Kept(held=True),
        PieceWanted(bytes(range(32)), -1),
        PieceWanted(bytes(range(32)), 8191),
        KeptExperts([pointer(), pointer(1, 9, OTHER)], ADDRS, b"token", 1.9e9),
        KeptExperts([], []),
        HolderOffer(1 << 34, adopts=True, addrs=ADDRS, taking=[Name(0, [5, 12]), Name(1, [0, 0])]),
        HolderOffer(0, adopts=False, addrs=[], token=b"token", client=True),
        HolderOffer(1, adopts=True, addrs=[], hosted=12, places=EXPERT_PLACES, sample_s=0.002),
    ],
    "sharing_v2.bin": [
        TransferRequest(pointer(2, 40), 12, 0.002),
        TransferRequest(pointer(0, 0), 0, 0.0, leaves=True),
        TransferAnswer(3),
    ],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_survive_their_encoding_and_look_as_they_always_did(name: str) -> None:
    messages = MESSAGES[name]
    raws = [encode(message) for message in messages]
    assert [decode(type(message), raw) for message, raw in zip(messages, raws, strict=True)] == messages
    assert b"".join(encode_varint(len(raw)) + raw for raw in raws) == (GOLDEN / name).read_bytes()


def test_every_message_of_experts_is_among_the_golden_ones() -> None:
    module = Forward.__module__
    made = {kind for kind in Message.__subclasses__() if kind.__module__ == module}
    assert made == {type(message) for messages in MESSAGES.values() for message in messages}
