"""Noise: who is whom, that nothing tampered with passes, and that frames may arrive in any pieces."""

from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from peerd.core.errors import ProtocolViolation, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.limits import NOISE_HANDSHAKE_BYTES
from peerd.wire.buffers import BufferPool
from peerd.wire.identify_message import NoisePayload
from peerd.wire.noise.noise import (
    AES,
    PLAIN_BYTES,
    SEALED_BYTES,
    TAG_BYTES,
    NoiseHandshake,
    Opener,
    Sealer,
    Secrets,
    Session,
)

ALICE, BOB, MALLORY = (Keypair.from_seed(name * 32) for name in (b"a", b"b", b"m"))
MUXERS = ("/yamux/1.0.0",)


def side(
    who: Keypair,
    *,
    initiator: bool,
    expected: PeerId | None = None,
    muxers: tuple[str, ...] = MUXERS,
    aes: bool = False,
) -> NoiseHandshake:
    secrets = Secrets(who, b"s" * 31 + who.seed[:1]).fresh(b"e" * 31 + who.seed[:1])
    return NoiseHandshake(secrets, initiator=initiator, muxers=muxers, expected=expected, aes=aes)


def in_pieces(to: NoiseHandshake, data: bytes, piece_bytes: int) -> bytes:
    return b"".join(to.feed(data[at : at + piece_bytes]) for at in range(0, len(data), piece_bytes))


def shake(alice: NoiseHandshake, bob: NoiseHandshake, piece_bytes: int = 1 << 20) -> None:
    """Run to the end; `alice` initiates."""
    second = in_pieces(bob, alice.start(), piece_bytes)
    third = in_pieces(alice, second, piece_bytes)
    assert in_pieces(bob, third, piece_bytes) == b""


def seal(sealer: Sealer, plain: bytes) -> bytes:
    into = memoryview(bytearray(SEALED_BYTES))
    return bytes(into[: sealer.seal(plain, into)])


@pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 20])
def test_both_sides_learn_who_the_other_is_and_agree_on_keys_and_muxer(piece_bytes: int) -> None:
    alice, bob = side(ALICE, initiator=True, expected=BOB.peer_id), side(BOB, initiator=False)
    shake(alice, bob, piece_bytes)
    assert alice.result is not None
    assert bob.result is not None
    assert (alice.result.peer, bob.result.peer) == (BOB.peer_id, ALICE.peer_id)
    assert alice.result.muxer == bob.result.muxer == "/yamux/1.0.0"
    assert bob.result.opener.feed(seal(alice.result.sealer, b"there")) == [b"there"]
    assert alice.result.opener.feed(seal(bob.result.sealer, b"back")) == [b"back"]


@pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize("names", [(ALICE, BOB), (BOB, ALICE)])
def test_of_two_that_both_speak_first_one_gives_way(piece_bytes: int, names: tuple[Keypair, Keypair]) -> None:
    one, other = (side(name, initiator=True) for name in names)
    to_other, to_one = one.start(), other.start()
    for _ in range(4):
        to_one, to_other = in_pieces(other, to_other, piece_bytes), in_pieces(one, to_one, piece_bytes)
    assert one.result is not None
    assert other.result is not None
    assert one.initiator is not other.initiator
    assert (one.result.peer, other.result.peer) == (names[1].peer_id, names[0].peer_id)
    assert one.result.muxer == other.result.muxer == "/yamux/1.0.0"
    assert other.result.opener.feed(seal(one.result.sealer, b"there")) == [b"there"]
    assert one.result.opener.feed(seal(other.result.sealer, b"back")) == [b"back"]


def test_a_side_that_hears_itself_says_so_and_a_second_first_message_is_no_answer() -> None:
    alice = side(ALICE, initiator=True)
    with pytest.raises(Unreachable, match="itself"):
        alice.feed(alice.start())
    for name in (ALICE, BOB):
        stubborn, other = side(name, initiator=True), side(MALLORY, initiator=True)
        stubborn.start()
        first = other.start()
        with pytest.raises(ProtocolViolation):
            stubborn.feed(first + first + bytes(200))


def test_the_muxer_is_the_initiators_first_that_the_other_has() -> None:
    for first, second, chosen in (
        (("/a", "/b"), ("/b", "/a"), "/a"),
        (("/a", "/b"), ("/b",), "/b"),
        (("/a",), ("/b",), None),
        ((), ("/b",), None),
    ):
        alice, bob = side(ALICE, initiator=True, muxers=first), side(BOB, initiator=False, muxers=second)
        shake(alice, bob)
        assert alice.result is not None
        assert bob.result is not None
        assert alice.result.muxer == bob.result.muxer == chosen


def test_a_dialer_that_meets_somebody_else_names_both_and_says_nothing_of_itself() -> None:
    alice, bob = side(ALICE, initiator=True, expected=MALLORY.peer_id), side(BOB, initiator=False)
    second = bob.feed(alice.start())
    with pytest.raises(Unreachable) as caught:
        alice.feed(second)
    assert str(BOB.peer_id) in str(caught.value)
    assert str(MALLORY.peer_id) in str(caught.value)


def test_a_stolen_identity_without_its_signature_is_refused() -> None:
    """Mallory claims to be Bob, with a signature of Bob's over another static key."""
    secrets = Secrets(MALLORY, b"t" * 32)
    stolen = secrets.fresh(b"f" * 32)
    stolen.identity = BOB
    for signature in (secrets.signature, Secrets(BOB, b"u" * 32).signature, b"", bytes(64)):
        stolen.signature = signature
        mallory = NoiseHandshake(stolen, initiator=False, muxers=MUXERS)
        alice = side(ALICE, initiator=True)
        second = mallory.feed(alice.start())
        with pytest.raises(ProtocolViolation, match="without its signature"):
            alice.feed(second)


def test_a_key_of_another_length_is_refused() -> None:
    """libsodium would read the memory behind a short one: a hand-shake that fails now and then."""
    with pytest.raises(ValueError, match="static key has 32 bytes, not 31"):
        Secrets(ALICE, bytes(31))
    for ephemeral in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="ephemeral key has 32 bytes"):
            NoiseHandshake(Secrets(ALICE, bytes(32)).fresh(ephemeral), initiator=True, muxers=MUXERS)


def test_any_flipped_bit_ends_the_handshake_or_its_proof() -> None:
    first = side(ALICE, initiator=True).start()
    second = side(BOB, initiator=False).feed(first)
    for at in range(2, len(second)):
        alice = side(ALICE, initiator=True)
        alice.start()
        with pytest.raises(ProtocolViolation):
            alice.feed(second[:at] + bytes([second[at] ^ 0x10]) + second[at + 1 :])
    alice = side(ALICE, initiator=True)
    alice.start()
    third = alice.feed(second)
    for at in range(2, len(third)):
        bob = side(BOB, initiator=False)
        bob.feed(first)
        with pytest.raises(ProtocolViolation):
            bob.feed(third[:at] + bytes([third[at] ^ 0x10]) + third[at + 1 :])


def test_a_key_of_low_order_is_refused() -> None:
    bob = side(BOB, initiator=False)
    with pytest.raises(ProtocolViolation, match="low order"):
        bob.feed(b"\x00\x20" + bytes(32))


def test_an_overlong_or_short_message_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="allowed"):
        side(BOB, initiator=False).feed((NOISE_HANDSHAKE_BYTES + 1).to_bytes(2, "big"))
    with pytest.raises(ProtocolViolation, match="too short"):
        side(BOB, initiator=False).feed(b"\x00\x05hello")


def test_bytes_after_the_last_message_are_handed_on() -> None:
    alice, bob = side(ALICE, initiator=True), side(BOB, initiator=False)
    third = alice.feed(bob.feed(alice.start()))
    assert alice.result is not None
    bob.feed(third + seal(alice.result.sealer, b"early"))
    assert bob.result is not None
    assert bob.result.opener.feed(bob.result.rest) == [b"early"]


@pytest.mark.parametrize("pool", [None, BufferPool(SEALED_BYTES, keep=4)], ids=["bytes", "pooled"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 100, 65536, 1 << 20])
def test_frames_of_all_sizes_survive_pieces_of_all_sizes(piece_bytes: int, pool: BufferPool | None) -> None:
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32, pool)
    plains = [b"", b"x", bytes(range(256)), b"y" * 5000, b"z" * PLAIN_BYTES, b"end"]
    if piece_bytes < 100:
        plains = [plain for plain in plains if len(plain) <= 5000]
    stream = b"".join(seal(sealer, plain) for plain in plains)
    got: list[bytes] = []
    for at in range(0, len(stream), piece_bytes):
        assert opener.feed(b"") == []
        got += [bytes(plain) for plain in opener.feed(stream[at : at + piece_bytes])]
    assert got == plains


def test_a_largest_frame_has_exactly_the_largest_length() -> None:
    assert len(seal(Sealer(bytes(32)), bytes(PLAIN_BYTES))) == 2 + 65535 == SEALED_BYTES


def test_frames_that_are_changed_repeated_reordered_or_too_short_are_violations() -> None:
    def frames() -> list[bytes]:
        sealer = Sealer(b"k" * 32)
        return [seal(sealer, b"one"), seal(sealer, b"two")]

    one, two = frames()
    changed = one[:-1] + bytes([one[-1] ^ 1])
    for stream in (changed, two, one + one, one + b"\x00\x0f" + bytes(TAG_BYTES - 1), b"\x00\x00"):
        for pool in (None, BufferPool(SEALED_BYTES, keep=1)):
            with pytest.raises(ProtocolViolation):
                Opener(b"k" * 32, pool).feed(stream)


# --- AES, where both sides have it -----------------------------------------------------------------------------------


def sessions(alice_aes: bool, bob_aes: bool) -> tuple[Session, Session]:
    alice, bob = side(ALICE, initiator=True, aes=alice_aes), side(BOB, initiator=False, aes=bob_aes)
    shake(alice, bob)
    assert alice.result is not None
    assert bob.result is not None
    return alice.result, bob.result


@pytest.mark.parametrize("bob_aes", [False, True])
@pytest.mark.parametrize("alice_aes", [False, True])
def test_frames_are_sealed_with_aes_if_both_sides_offer_it(alice_aes: bool, bob_aes: bool) -> None:
    alice, bob = sessions(alice_aes, bob_aes)
    assert alice.muxer == bob.muxer == MUXERS[0]
    sealed = seal(alice.sealer, b"there")
    assert bob.opener.feed(sealed) == [b"there"]
    assert alice.opener.feed(seal(bob.sealer, b"back")) == [b"back"]
    plain = sessions(False, False)[1].opener  # of the same secrets, hence with the keys that Noise derives
    if alice_aes and bob_aes:
        with pytest.raises(ProtocolViolation):
            plain.feed(sealed)
    else:
        assert plain.feed(sealed) == [b"there"]


def test_aes_frames_are_aes_256_gcm_with_nonces_as_noise_writes_them() -> None:
    sealer = Sealer(b"k" * 32, AES)
    for number, text in enumerate((b"one", b"two")):
        nonce = bytes(4) + number.to_bytes(8, "big")
        assert seal(sealer, text)[2:] == AESGCM(b"k" * 32).encrypt(nonce, text, None)


def test_a_key_is_replaced_on_both_sides_by_what_noise_derives_of_it() -> None:
    often = dataclasses.replace(AES, key_frames=3)
    sealer = Sealer(b"k" * 32, often)
    plains = [bytes([number]) * (PLAIN_BYTES if number % 5 else 100) for number in range(14)]
    frames = [seal(sealer, plain) for plain in plains]
    assert [
        bytes(got) for got in Opener(b"k" * 32, BufferPool(SEALED_BYTES, keep=4), often).feed(b"".join(frames))
    ] == plains
    second = AESGCM(b"k" * 32).encrypt(bytes(4) + b"\xff" * 8, bytes(32), None)[:32]
    assert AESGCM(second).decrypt(bytes(4) + (3).to_bytes(8, "big"), frames[3][2:], None) == plains[3]
    with pytest.raises(ProtocolViolation):
        Opener(b"k" * 32, suite=AES).feed(b"".join(frames[:4]))


def test_a_row_of_frames_may_reach_over_the_replacement_of_a_key() -> None:
    often = dataclasses.replace(AES, key_frames=3)
    sealer, opener = Sealer(b"k" * 32, often), Opener(b"k" * 32, BufferPool(SEALED_BYTES, keep=4), often)
    text = bytes(range(256)) * 256
    sent = (text * 8)[: 8 * PLAIN_BYTES]
    wire = b"".join(seal(sealer, sent[at : at + PLAIN_BYTES]) for at in range(0, len(sent), PLAIN_BYTES))
    left = [memoryview(bytearray(len(sent)))]
    rows = []
    for plain in opener.each(wire, lambda size: left[0][:size], lambda: len(left[0])):
        rows.append(len(plain) // PLAIN_BYTES)
        left[0] = left[0][len(plain) :]
    assert (bytes(left[0].obj), rows) == (sent, [3, 1, 2, 1, 1])


def test_payloads_survive_their_encoding_and_foreign_identities_are_named() -> None:
    payload = NoisePayload(peer=BOB.peer_id, signature=b"s" * 64, muxers=("/yamux/1.0.0", "/mplex/6.7.0"))
    assert NoisePayload.decode(payload.encode()) == payload
    rsa = b"\x0a\x06\x08\x00\x12\x02ab"
    with pytest.raises(ProtocolViolation, match="RSA"):
        NoisePayload.decode(rsa)
    with pytest.raises(ProtocolViolation, match="no identity"):
        NoisePayload.decode(b"")
