"""The messages of circuit relay v2: hop (client and relay), stop (relay and the peer beyond it), and their parts.

Each has `encode` and a strict `decode`. Hostile input: unknown kinds, peer ids of other key types, addresses without
end; all raise ProtocolViolation, and addresses beyond the limits are dropped. Status codes stay numbers: a foreign
relay may know more of them. Source: libp2p specs `relay/circuit-v2.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, CIRCUIT_MESSAGE_BYTES
from peerd.core.protobuf.wire import bytes_field, number_field, read_fields, want_bytes, want_number

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
_VOUCHER_BYTES: Final = 1024  # an envelope with an Ed25519 key takes about 250

Kind = TypeVar("Kind", bound=IntEnum)


class HopKind(IntEnum):
    """What a hop message is."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """What a stop message is."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """How a request ended."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


def status_words(status: int | None) -> str:
    """A status as people read it."""
    if status is None:
        return "no status"
    try:
        return Status(status).name.lower().replace("_", " ")
    except ValueError:
        return f"status {status}"


@dataclass(frozen=True, slots=True)
class Limit:
    """What a relay allows one circuit; 0 stands for no limit."""

    duration_s: int = 0
    data_bytes: int = 0  # in each direction

    def encode(self) -> bytes:
        return number_field(1, self.duration_s) + number_field(2, self.data_bytes)

    @classmethod
    def decode(cls, data: bytes) -> Limit:
        duration_s = data_bytes = 0
        for number, value in read_fields(data):
            if number == 1:
                duration_s = want_number(value, "the duration")
            elif number == 2:
                data_bytes = want_number(value, "the data limit")
        return cls(duration_s, data_bytes)


@dataclass(frozen=True, slots=True)
class Promise:
    """The message Reservation: until when a relay takes circuits for a peer, and where it can be reached itself."""

    expires_unix_s: int
    relay_addrs: tuple[bytes, ...] = ()
    voucher: bytes = b""

    def encode(self) -> bytes:
        addrs = b"".join(bytes_field(2, addr) for addr in self.relay_addrs)
        return number_field(1, self.expires_unix_s) + addrs + (bytes_field(3, self.voucher) if self.voucher else b"")

    @classmethod
    def decode(cls, data: bytes) -> Promise:
        expires_unix_s, voucher = 0, b""
        addrs: list[bytes] = []
        for number, value in read_fields(data):
            if number == 1:
                expires_unix_s = want_number(value, "the expiry")
            elif number == 2:
                addrs.append(want_bytes(value, "a relay's address"))
            elif number == 3:
                voucher = want_bytes(value, "the voucher")
        if len(voucher) > _VOUCHER_BYTES:
            raise ProtocolViolation(f"a voucher of {len(voucher)} bytes; allowed: {_VOUCHER_BYTES}")
        kept = tuple(addr for addr in addrs if 0 < len(addr) <= ADDR_BYTES)[:ADDRS_PER_PEER]
        return cls(expires_unix_s, kept, voucher)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopMessage:
    """Between a client and its relay."""

    kind: HopKind
    peer: PeerId | None = None
    promise: Promise | None = None
    limit: Limit | None = None
    status: int | None = None

    def encode(self) -> bytes:
        parts = [number_field(1, self.kind)]
        if self.peer is not None:
            parts.append(bytes_field(2, _encode_peer(self.peer)))
        if self.promise is not None:
            parts.append(bytes_field(3, self.promise.encode()))
        if self.limit is not None:
            parts.append(bytes_field(4, self.limit.encode()))
        if self.status is not None:
            parts.append(number_field(5, self.status))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> HopMessage:
        _check_size(data)
        kind: HopKind | None = None
        peer, promise, limit, status = None, None, None, None
        for number, value in read_fields(data):
            if number == 1:
                kind = _kind(HopKind, value)
            elif number == 2:
                peer = _decode_peer(want_bytes(value, "the peer"))
            elif number == 3:
                promise = Promise.decode(want_bytes(value, "the reservation"))
            elif number == 4:
                limit = Limit.decode(want_bytes(value, "the limit"))
            elif number == 5:
                status = want_number(value, "the status")
        if kind is None:
            raise ProtocolViolation("a hop message does not say what it is")
        return cls(kind=kind, peer=peer, promise=promise, limit=limit, status=status)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """Between a relay and the peer that a circuit leads to."""

    kind: StopKind
    peer: PeerId | None = None
    limit: Limit | None = None
    status: int | None = None

    def encode(self) -> bytes:
        parts = [number_field(1, self.kind)]
        if self.peer is not None:
            parts.append(bytes_field(2, _encode_peer(self.peer)))
        if self.limit is not None:
            parts.append(bytes_field(3, self.limit.encode()))
        if self.status is not None:
            parts.append(number_field(4, self.status))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> StopMessage:
        _check_size(data)
        kind: StopKind | None = None
        peer, limit, status = None, None, None
        for number, value in read_fields(data):
            if number == 1:
                kind = _kind(StopKind, value)
            elif number == 2:
                peer = _decode_peer(want_bytes(value, "the peer"))
            elif number == 3:
                limit = Limit.decode(want_bytes(value, "the limit"))
            elif number == 4:
                status = want_number(value, "the status")
        if kind is None:
            raise ProtocolViolation("a stop message does not say what it is")
        return cls(kind=kind, peer=peer, limit=limit, status=status)


def _check_size(data: bytes) -> None:
    if len(data) > CIRCUIT_MESSAGE_BYTES:
        raise ProtocolViolation(f"a message of {len(data)} bytes; allowed: {CIRCUIT_MESSAGE_BYTES}")


def _kind(kinds: type[Kind], value: int | bytes) -> Kind:
    number = want_number(value, "the kind")
    try:
        return kinds(number)
    except ValueError:
        raise ProtocolViolation(f"a message of kind {number} is not known here") from None


def _encode_peer(peer: PeerId) -> bytes:
    return bytes_field(1, peer.raw)


def _decode_peer(data: bytes) -> PeerId:
    """The Peer message's id; its addresses are for relays that dial, which ours do not."""
    raw = b""
    for number, value in read_fields(data):
        if number == 1:
            raw = want_bytes(value, "the peer id")
    try:
        return PeerId(raw)
    except ValueError:
        raise ProtocolViolation("the peer id is not that of an Ed25519 key") from None
