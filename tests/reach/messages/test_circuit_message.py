"""Circuit relay messages and vouchers: what is written is read, stored bytes stay as they are, lies are violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.core.errors import ProtocolViolation
from peerd.core.keys import Keypair, verify
from peerd.core.limits import ADDRS_PER_PEER, CIRCUIT_MESSAGE_BYTES
from peerd.core.varint import decode_varint, encode_varint
from peerd.reach.messages.circuit_message import (
    HopKind,
    HopMessage,
    Limit,
    ReservationMessage,
    Status,
    StopKind,
    StopMessage,
    status_words,
)
from peerd.reach.messages.voucher import Voucher, open_envelope, seal_envelope
from peerd.wire.protobuf import bytes_field, number_field
from tests.kit.mutate import accepts

GOLDEN = Path(__file__).parents[2] / "golden" / "circuit_v2.bin"
RELAY, PEER = Keypair.from_seed(b"r" * 32), Keypair.from_seed(b"p" * 32)
VOUCHER = Voucher(RELAY.peer_id, PEER.peer_id, 1_900_000_000)
ADDR = b"\x04\x01\x02\x03\x04\x06\x10\x00"
MESSAGES: list[HopMessage | StopMessage] = [
    HopMessage(kind=HopKind.RESERVE),
    HopMessage(
        kind=HopKind.STATUS,
        status=Status.OK,
        promise=ReservationMessage(1_900_000_000, (ADDR, ADDR[:-1] + b"\x01"), VOUCHER.seal(RELAY)),
        limit=Limit(7200, 64 << 30),
    ),
    HopMessage(kind=HopKind.CONNECT, peer=PEER.peer_id),
    HopMessage(kind=HopKind.STATUS, status=Status.NO_RESERVATION),
    StopMessage(kind=StopKind.CONNECT, peer=PEER.peer_id, limit=Limit(120, 1 << 17)),
    StopMessage(kind=StopKind.STATUS, status=Status.OK),
]


def test_messages_survive_their_encoding_and_look_as_they_always_did() -> None:
    raws = [message.encode() for message in MESSAGES]
    assert [type(m).decode(raw) for m, raw in zip(MESSAGES, raws, strict=True)] == MESSAGES
    assert b"".join(encode_varint(len(raw)) + raw for raw in raws) == GOLDEN.read_bytes()


def test_the_stored_bytes_are_read_as_these_messages() -> None:
    data, at, found = GOLDEN.read_bytes(), 0, []
    for message in MESSAGES:
        prefix = decode_varint(data, at)
        assert prefix is not None
        size, at = prefix
        found.append(type(message).decode(data[at : at + size]))
        at += size
    assert found == MESSAGES
    assert at == len(data)


def test_unknown_fields_are_passed_over_and_unknown_states_kept() -> None:
    extra = bytes_field(9, b"later") + number_field(10, 7)
    for message in MESSAGES:
        assert type(message).decode(extra + message.encode()) == message
    assert HopMessage.decode(number_field(1, 2) + number_field(5, 999)).status == 999
    assert (status_words(999), status_words(204), status_words(None)) == (
        "status 999",
        "no reservation",
        "no status",
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: f"{type(m).__name__} {m.kind.name}")
def test_a_message_cut_anywhere_is_a_violation_or_says_less(message: HopMessage | StopMessage) -> None:
    raw = message.encode()
    taken = [end for end in range(len(raw)) if accepts(type(message).decode, raw[:end])]
    assert [end for end in taken if type(message).decode(raw[:end]) == message] == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        number_field(5, 100),
        number_field(1, 3),
        bytes_field(1, b"\x02"),
        number_field(1, 1) + bytes_field(2, b""),
        number_field(1, 1) + bytes_field(2, bytes_field(1, b"\x12\x20" + bytes(32))),
        number_field(1, 2) + bytes_field(3, bytes_field(3, bytes(2000))),
        number_field(1, 2) + bytes_field(4, bytes_field(1, b"long")),
        number_field(1, 0) + bytes_field(9, bytes(CIRCUIT_MESSAGE_BYTES)),
    ],
    ids=["empty", "no kind", "kind 3", "kind as text", "no id", "RSA id", "voucher", "limit", "long"],
)
def test_nonsense_is_a_violation(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        HopMessage.decode(raw)


def test_addresses_beyond_the_limit_are_dropped() -> None:
    many = ReservationMessage.decode(bytes_field(2, ADDR) * (ADDRS_PER_PEER + 3) + bytes_field(2, b""))
    assert many.relay_addrs == (ADDR,) * ADDRS_PER_PEER


def test_a_voucher_is_its_relays_and_nobody_elses() -> None:
    raw = VOUCHER.seal(RELAY)
    assert Voucher.open(raw, verify) == VOUCHER
    with pytest.raises(ProtocolViolation, match="signed"):
        Voucher.open(VOUCHER.seal(PEER), verify)


def test_a_voucher_changed_anywhere_is_a_violation() -> None:
    raw = VOUCHER.seal(RELAY)
    changed = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(len(raw))]
    assert [at for at, other in enumerate(changed) if accepts(lambda data: Voucher.open(data, verify), other)] == []


def test_an_envelope_is_good_for_its_own_domain_and_type_only() -> None:
    raw = seal_envelope("here", b"\x01", b"payload", RELAY)
    assert open_envelope("here", b"\x01", raw, verify) == (RELAY.peer_id, b"payload")
    for domain, kind in (("there", b"\x01"), ("here", b"\x02")):
        with pytest.raises(ProtocolViolation):
            open_envelope(domain, kind, raw, verify)
