"""Pointers to checkpoints of experts: signed by their owners, and ordered."""

from __future__ import annotations

import hashlib

import msgspec

from peerd.core.experts.grid import Uid
from peerd.core.keys import Keypair
from peerd.core.messages.encoding import decode, encode
from peerd.core.messages.experts import KeptExperts, Name, Pointer, state_root

OWNER, OTHER = Keypair.from_seed(bytes(32)), Keypair.from_seed(bytes([1]) * 32)


def pointer(generation: int = 0, version: int = 7, owner: Keypair = OWNER) -> Pointer:
    made = Pointer(bytes(16), Name.of(Uid(0, (5, 12))), generation, version, bytes(32), 1000, owner.peer_id.public_key)
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


def test_the_newest_checkpoint_has_the_highest_rank() -> None:
    order = [pointer(0, 9), pointer(1, 3), pointer(1, 4), pointer(2, 0)]
    mixed = [order[2], order[0], order[3], order[1]]
    assert sorted(mixed, key=lambda one: one.rank) == order


def test_the_root_of_a_state_is_the_digest_of_its_pieces_digests() -> None:
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    assert state_root(digests) == hashlib.sha256(b"".join(digests)).digest()
