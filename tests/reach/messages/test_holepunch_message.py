"""DCUtR's message: what is written is read, stored bytes stay as they are, and everything else is a violation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.addr import parse_addr
from peerd.core.errors import ProtocolViolation
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, PUNCH_MESSAGE_BYTES
from peerd.core.varint import encode_varint
from peerd.reach.messages.holepunch_message import HolePunch, PunchKind
from peerd.wire.protobuf import bytes_field, number_field

GOLDEN = Path(__file__).parents[2] / "golden" / "holepunch_v1.bin"
ADDRS = ("/ip4/45.3.1.1/tcp/20643", "/ip6/2001:db9::7/tcp/4001")
MESSAGES = [
    HolePunch(PunchKind.CONNECT, tuple(parse_addr(addr).to_bytes() for addr in ADDRS)),
    HolePunch(PunchKind.CONNECT),
    HolePunch(PunchKind.SYNC),
]


def test_messages_survive_their_encoding_and_look_as_they_always_did() -> None:
    raws = [message.encode() for message in MESSAGES]
    assert [HolePunch.decode(raw) for raw in raws] == MESSAGES
    assert b"".join(encode_varint(len(raw)) + raw for raw in raws) == GOLDEN.read_bytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        number_field(1, 200),
        bytes_field(1, b"d"),
        number_field(1, 100) + number_field(2, 7),
        MESSAGES[0].encode()[:-1],
        number_field(1, 300) + bytes_field(9, bytes(PUNCH_MESSAGE_BYTES)),
    ],
)
def test_what_is_no_such_message_is_a_violation(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        HolePunch.decode(raw)


def test_addresses_beyond_the_limits_are_dropped_and_unknown_fields_skipped() -> None:
    many = b"".join(bytes_field(2, bytes([number])) for number in range(1, ADDRS_PER_PEER + 5))
    ignored = bytes_field(2, bytes(ADDR_BYTES + 1)) + bytes_field(7, b"x")
    message = HolePunch.decode(ignored + many + number_field(1, 100))
    assert message.addrs == tuple(bytes([number]) for number in range(1, ADDRS_PER_PEER + 1))


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=ADDRS_PER_PEER), st.sampled_from(PunchKind))
def test_any_addresses_come_through(addrs: list[bytes], kind: PunchKind) -> None:
    assert HolePunch.decode(HolePunch(kind, tuple(addrs)).encode()) == HolePunch(kind, tuple(addrs))
