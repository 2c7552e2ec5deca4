"""The messages of AutoNAT v1: the request to be dialed back, and the response with the result.

A message is either a request or a response, never both. Addresses stay raw bytes, since a peer may list kinds that this
side does not know; addresses beyond the limits are dropped. Hostile input: keys of other types, wire types that do not
fit, unknown statuses. Source: libp2p specs `autonat/autonat-v1.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, AGENT_BYTES
from peerd.wire.protobuf import bytes_field, number_field, read_fields, want_bytes, want_number, want_text

AUTONAT: Final = "/libp2p/autonat/1.0.0"
_DIAL, _DIAL_RESPONSE = 0, 1


class DialStatus(IntEnum):
    """Result of a dial-back."""

    OK = 0
    DIAL_ERROR = 100  # every dial failed
    DIAL_REFUSED = 101  # not dialed: too many requests, or addresses that are not the requester's
    BAD_REQUEST = 200
    INTERNAL_ERROR = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DialRequest:
    """The request: dial `peer` at `addrs`, to find out whether strangers can reach it."""

    peer: PeerId | None
    addrs: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        peer = b"" if self.peer is None else bytes_field(1, self.peer.raw)
        info = peer + b"".join(bytes_field(2, addr) for addr in self.addrs)
        return number_field(1, _DIAL) + bytes_field(2, bytes_field(1, info))

    @classmethod
    def decode(cls, data: bytes) -> DialRequest:
        peer: PeerId | None = None
        addrs: list[bytes] = []
        dial = _body(data, _DIAL)
        for number, value in read_fields(dial):
            if number != 1:
                continue
            for part, content in read_fields(want_bytes(value, "the peer to dial")):
                if part == 1:
                    peer = _peer(want_bytes(content, "the peer id"))
                elif part == 2:
                    addrs.append(want_bytes(content, "an address to dial"))
        return cls(peer=peer, addrs=tuple(addr for addr in addrs if len(addr) <= ADDR_BYTES)[:ADDRS_PER_PEER])


@dataclass(frozen=True, slots=True, kw_only=True)
class DialResponse:
    """The response; `addr` is the address at which the dial succeeded."""

    status: DialStatus
    text: str = ""
    addr: bytes = b""

    def encode(self) -> bytes:
        body = number_field(1, self.status) + (bytes_field(2, self.text.encode()) if self.text else b"")
        body += bytes_field(3, self.addr) if self.addr else b""
        return number_field(1, _DIAL_RESPONSE) + bytes_field(3, body)

    @classmethod
    def decode(cls, data: bytes) -> DialResponse:
        status, text, addr = DialStatus.OK, "", b""
        for number, value in read_fields(_body(data, _DIAL_RESPONSE)):
            if number == 1:
                status = _status(want_number(value, "the status"))
            elif number == 2:
                text = want_text(value, "the status text", AGENT_BYTES)
            elif number == 3:
                addr = want_bytes(value, "the dialed address")
        if len(addr) > ADDR_BYTES:
            raise ProtocolViolation(f"the dialed address has {len(addr)} bytes; allowed: {ADDR_BYTES}")
        return cls(status=status, text=text, addr=addr)


def _body(data: bytes, kind: int) -> bytes:
    """The body of a message, which must be of this kind."""
    found, body = _DIAL, None  # protobuf: a missing enum field has its first value
    for number, value in read_fields(data):
        if number == 1:
            found = want_number(value, "the kind of message")
        elif number == 2 + kind:
            body = want_bytes(value, "the message")
    if found != kind or body is None:
        raise ProtocolViolation(f"an AutoNAT message of kind {found} {'' if body is not None else 'without a body'}")
    return body


def _peer(raw: bytes) -> PeerId:
    try:
        return PeerId(raw)
    except ValueError:
        raise ProtocolViolation("the peer id is not that of an Ed25519 key (12D3KooW...)") from None


def _status(number: int) -> DialStatus:
    try:
        return DialStatus(number)
    except ValueError:
        raise ProtocolViolation(f"an AutoNAT answer with status {number}") from None
