"""Identities: signatures are checked against the peer id alone."""

from __future__ import annotations

import pytest

from peerd.core.keys import Keypair, verify


def test_the_same_seed_is_the_same_peer() -> None:
    one, two = Keypair.from_seed(bytes(range(32))), Keypair.from_seed(bytes(range(32)))
    assert one.peer_id == two.peer_id
    assert one.sign(b"x") == two.sign(b"x")
    assert one.seed == bytes(range(32))


def test_a_signature_holds_for_its_signer_and_text_only() -> None:
    me, other = Keypair.generate(lambda n: b"\x01" * n), Keypair.generate(lambda n: b"\x02" * n)
    signature = me.sign(b"text")
    assert verify(me.peer_id, b"text", signature)
    assert not verify(me.peer_id, b"texT", signature)
    assert not verify(other.peer_id, b"text", signature)
    for at in range(64):
        assert not verify(me.peer_id, b"text", signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :])
    for bad in (b"", signature[:-1], signature + b"\0"):
        assert not verify(me.peer_id, b"text", bad)


def test_a_seed_of_another_length_is_refused_and_the_secret_never_printed() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Keypair.from_seed(b"short")
    assert "01" * 8 not in repr(Keypair.from_seed(b"\x01" * 32))
