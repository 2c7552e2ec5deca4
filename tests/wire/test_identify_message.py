"""libp2p's small messages: what is written is read, unknown fields are passed over, nonsense is a violation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ProtocolViolation
from peerd.core.keys import Keypair
from peerd.core.limits import IDENTIFY_ADDRS, PROTOBUF_FIELDS
from peerd.core.varint import decode_varint, encode_varint
from peerd.wire.identify_message import Identify, decode_public_key, encode_public_key
from peerd.wire.protobuf import bytes_field
from tests.kit.mutate import accepts

PEER = Keypair.from_seed(b"p" * 32).peer_id
MESSAGE = Identify(
    peer=PEER,
    listen_addrs=(b"\x04\x7f\x00\x00\x01\x06\x10\x00",),
    protocols=("/a/1", "/b/1"),
    observed_addr=b"\x04\x01\x02\x03\x04\x06\x00\x50",
    protocol_version="peerd/1",
    agent_version="test",
)


def test_messages_survive_their_encoding() -> None:
    assert Identify.decode(MESSAGE.encode()) == MESSAGE
    assert decode_public_key(encode_public_key(PEER)) == PEER
    assert encode_public_key(PEER) == b"\x08\x01\x12\x20" + PEER.public_key


def test_unknown_fields_of_every_kind_are_passed_over() -> None:
    extra = b"\x38\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + b"\x41" + bytes(8) + b"\x4d" + bytes(4)
    assert Identify.decode(extra + MESSAGE.encode() + bytes_field(8, b"signed record")) == MESSAGE


def test_a_message_cut_anywhere_is_a_violation_or_a_message() -> None:
    raw = MESSAGE.encode()
    taken = [end for end in range(len(raw)) if accepts(Identify.decode, raw[:end])]
    assert 0 < len(taken) < len(raw)
    assert [end for end in taken if Identify.decode(raw[:end]) == MESSAGE] == []


def test_too_many_entries_are_dropped_and_too_many_fields_refused() -> None:
    many = Identify.decode(bytes_field(2, b"addr") * (IDENTIFY_ADDRS + 5))
    assert len(many.listen_addrs) == IDENTIFY_ADDRS
    with pytest.raises(ProtocolViolation, match="fields"):
        Identify.decode(bytes_field(9, b"") * (PROTOBUF_FIELDS + 1))


@pytest.mark.parametrize(
    "raw",
    [b"\x00", b"\x0b", b"\x12\x05abc", b"\x0a", b"\x10\x01", b"\x0a\x80", b"\x1a\x02\xff\xfe", b"\x80" * 11],
    ids=["field 0", "group", "short", "no length", "number for text", "endless length", "no utf-8", "endless tag"],
)
def test_nonsense_is_a_violation(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        Identify.decode(raw)


@given(st.integers(0, (1 << 63) - 1), st.binary(max_size=3))
def test_varints_are_read_as_written(value: int, after: bytes) -> None:
    raw = encode_varint(value)
    assert decode_varint(raw + after) == (value, len(raw))
    assert all(decode_varint(raw[:end]) is None for end in range(len(raw)))


@pytest.mark.parametrize("raw", [b"\x80\x00", b"\xff" * 9 + b"\x01", b"\x80" * 9])
def test_padded_and_endless_varints_are_violations(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_varint(raw)
