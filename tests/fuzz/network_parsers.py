"""The parsers of messages about the network itself, for the table in `tests.fuzz.parsers`."""

from __future__ import annotations

from peerd.core.addr import parse_addr
from peerd.core.keys import verify
from peerd.reach.hole_punch import to_dial
from peerd.reach.messages.autonat_message import DialRequest, DialResponse, DialStatus
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
from peerd.reach.messages.holepunch_message import HolePunch, PunchKind
from peerd.reach.messages.voucher import Voucher
from tests.fuzz.parsers import ADDRS, KEYS, OTHER, PARSERS, Corpus, parser

__all__ = ["PARSERS"]
VOUCHER = Voucher(KEYS.peer_id, OTHER.peer_id, 1_900_000_000).seal(KEYS)


def _hops() -> Corpus:
    promise = ReservationMessage(1_900_000_000, tuple(parse_addr(addr).to_bytes() for addr in ADDRS), VOUCHER)
    return [
        HopMessage(kind=HopKind.RESERVE).encode(),
        HopMessage(kind=HopKind.CONNECT, peer=OTHER.peer_id).encode(),
        HopMessage(kind=HopKind.STATUS, status=Status.OK, promise=promise, limit=Limit(7200, 1 << 36)).encode(),
    ]


@parser("hop", _hops)
def _hop(data: bytes) -> None:
    message = HopMessage.decode(data)
    assert HopMessage.decode(message.encode()) == message
    status_words(message.status)


@parser("stop", lambda: [StopMessage(kind=StopKind.CONNECT, peer=KEYS.peer_id, limit=Limit(120, 1 << 17)).encode()])
def _stop(data: bytes) -> None:
    message = StopMessage.decode(data)
    assert StopMessage.decode(message.encode()) == message


@parser("hole punch", lambda: [HolePunch(PunchKind.CONNECT, tuple(parse_addr(a).to_bytes() for a in ADDRS)).encode()])
def _hole_punch(data: bytes) -> None:
    to_dial(HolePunch.decode(data).addrs, [parse_addr("/ip4/192.168.1.7/tcp/4001")])


@parser("voucher", lambda: [VOUCHER])
def _voucher(data: bytes) -> None:
    Voucher.open(data, verify)


def _autonat_messages() -> Corpus:
    addrs = tuple(parse_addr(addr).to_bytes() for addr in ADDRS)
    asked = DialRequest(peer=KEYS.peer_id, addrs=addrs)
    return [asked.encode(), DialResponse(status=DialStatus.DIAL_ERROR, text="no").encode()]


@parser("autonat", _autonat_messages)
def _autonat(data: bytes) -> None:
    kind = DialRequest if data[:2] == b"\x08\x00" else DialResponse
    assert kind.decode(kind.decode(data).encode()) == kind.decode(data)
