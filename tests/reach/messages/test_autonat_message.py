"""AutoNAT's messages: read as written, byte for byte as the specification has them, and strict."""

from __future__ import annotations

import pytest

from peerd.core.addr import tcp_addr
from peerd.core.errors import ProtocolViolation
from peerd.core.keys import Keypair
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER
from peerd.reach.messages.autonat_message import DialRequest, DialResponse, DialStatus
from peerd.wire.protobuf import bytes_field, number_field

PEER = Keypair.from_seed(b"p" * 32).peer_id
ADDR = tcp_addr("81.2.3.4", 31337).to_bytes()
# Golden: kind 0, then field 2 (dial) { field 1 (peer) { field 1 id (38 bytes), field 2 address (8 bytes) } }.
DIAL = bytes.fromhex("080012340a320a26" + PEER.raw.hex() + "1208" + ADDR.hex())
# Kind 1, then field 3 (response) { status 0, address }; and { status 100, a text }.
OK = bytes.fromhex("08011a0c08001a08" + ADDR.hex())
FAILED = bytes.fromhex("08011a0808641204") + b"none"


def test_the_bytes_are_those_of_the_specification() -> None:
    assert DialRequest(peer=PEER, addrs=(ADDR,)).encode() == DIAL
    assert DialResponse(status=DialStatus.OK, addr=ADDR).encode() == OK
    assert DialResponse(status=DialStatus.DIAL_ERROR, text="none").encode() == FAILED
    assert DialRequest.decode(DIAL) == DialRequest(peer=PEER, addrs=(ADDR,))
    assert DialResponse.decode(OK) == DialResponse(status=DialStatus.OK, addr=ADDR)
    assert DialResponse.decode(FAILED) == DialResponse(status=DialStatus.DIAL_ERROR, text="none")


def test_addresses_beyond_the_bounds_are_dropped() -> None:
    long = bytes(ADDR_BYTES + 1)
    many = DialRequest.decode(DialRequest(peer=None, addrs=(long, *[ADDR] * (ADDRS_PER_PEER + 5))).encode())
    assert many.addrs == (ADDR,) * ADDRS_PER_PEER


def test_a_kind_that_is_left_out_is_the_first_as_protobuf_says() -> None:
    assert DialRequest.decode(DIAL[2:]) == DialRequest(peer=PEER, addrs=(ADDR,))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        OK,
        number_field(1, 0),
        number_field(1, 7) + bytes_field(2, b""),
        number_field(1, 0) + number_field(2, 1),
        number_field(1, 0) + bytes_field(2, number_field(1, 1)),
        number_field(1, 0) + bytes_field(2, bytes_field(1, bytes_field(1, b"no peer"))),
        number_field(1, 0) + bytes_field(2, bytes_field(1, number_field(2, 1))),
    ],
)
def test_what_is_no_question_is_a_violation(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        DialRequest.decode(raw)


@pytest.mark.parametrize(
    "body",
    [number_field(1, 42), bytes_field(1, b""), number_field(2, 1), bytes_field(2, b"\xff"), bytes_field(3, bytes(600))],
)
def test_what_is_no_answer_is_a_violation(body: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        DialResponse.decode(number_field(1, 1) + bytes_field(3, body))
    with pytest.raises(ProtocolViolation):
        DialResponse.decode(DIAL)
