"""The messages of circuit relay v2: hop (client and relay), stop (relay and destination), and their parts.

Each has `encode` and a strict `decode`. Hostile input: unknown kinds, peer ids of other key types, oversized messages;
each raises ProtocolViolation. Addresses beyond the limits are dropped. Status codes stay numbers, since other
implementations may use further ones. Source: libp2p specs `relay/circuit-v2.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple, Self

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, CIRCUIT_MESSAGE_BYTES
from peerd.wire.protobuf import bytes_field, number_field, read_fields, want_bytes, want_number

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
_VOUCHER_BYTES: Final = 1024  # an envelope with an Ed25519 key takes about 250


class HopKind(IntEnum):
    """Kinds of hop messages."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """Kinds of stop messages."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """Result code of a hop or stop request."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


def status_words(status: int | None) -> str:
    """A status code as text for people."""
    if status is None:
        return "no status"
    try:
        return Status(status).name.lower().replace("_", " ")
    except ValueError:
        return f"status {status}"


@dataclass(frozen=True, slots=True)
class Limit:
    """A relay's limits on one circuit; 0 means no limit."""

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
class ReservationMessage:
    """The Reservation message: the time until which a relay accepts circuits to a peer, and the relay's addresses."""

    expires_unix_s: int
    relay_addrs: tuple[bytes, ...] = ()
    voucher: bytes = b""

    def encode(self) -> bytes:
        addrs = b"".join(bytes_field(2, addr) for addr in self.relay_addrs)
        return number_field(1, self.expires_unix_s) + addrs + (bytes_field(3, self.voucher) if self.voucher else b"")

    @classmethod
    def decode(cls, data: bytes) -> ReservationMessage:
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
class _Message:
    """Common base of hop and stop messages, which number the same fields differently."""

    peer: PeerId | None = None
    limit: Limit | None = None
    status: int | None = None

    NUMBERS: ClassVar[Mapping[int, str]]  # field number -> name; `kind` is the first
    KINDS: ClassVar[type[IntEnum]]

    def encode(self) -> bytes:
        told = ((number, name, getattr(self, name)) for number, name in self.NUMBERS.items())
        return b"".join(_PARTS[name].write(number, value) for number, name, value in told if value is not None)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        if len(data) > CIRCUIT_MESSAGE_BYTES:
            raise ProtocolViolation(f"a message of {len(data)} bytes; allowed: {CIRCUIT_MESSAGE_BYTES}")
        found: dict[str, Any] = {}
        for number, value in read_fields(data):
            name = cls.NUMBERS.get(number)
            if name is not None:
                found[name] = _PARTS[name].read(value)
        try:
            return cls(**found | {"kind": cls.KINDS(found.get("kind", -1))})
        except ValueError:
            raise ProtocolViolation(f"a {cls.__name__} of kind {found.get('kind')} is not known here") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class HopMessage(_Message):
    """A message between a client and its relay."""

    kind: HopKind
    promise: ReservationMessage | None = None

    NUMBERS: ClassVar = {1: "kind", 2: "peer", 3: "promise", 4: "limit", 5: "status"}
    KINDS: ClassVar = HopKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage(_Message):
    """A message between a relay and the destination of a circuit."""

    kind: StopKind

    NUMBERS: ClassVar = {1: "kind", 2: "peer", 3: "limit", 4: "status"}
    KINDS: ClassVar = StopKind


def _encode_peer(peer: PeerId) -> bytes:
    return bytes_field(1, peer.raw)


def _decode_peer(data: bytes) -> PeerId:
    """The id in a Peer message. Its addresses are ignored: relays here do not dial the destination."""
    raw = b""
    for number, value in read_fields(data):
        if number == 1:
            raw = want_bytes(value, "the peer id")
    try:
        return PeerId(raw)
    except ValueError:
        raise ProtocolViolation("the peer id is not that of an Ed25519 key") from None


class _Part(NamedTuple):
    """Encoder and decoder of one field."""

    write: Callable[[int, Any], bytes]
    read: Callable[[int | bytes], Any]


_PARTS: Final = {
    "kind": _Part(number_field, lambda value: want_number(value, "the kind")),
    "peer": _Part(
        lambda number, peer: bytes_field(number, _encode_peer(peer)),
        lambda value: _decode_peer(want_bytes(value, "the peer")),
    ),
    "promise": _Part(
        lambda number, promise: bytes_field(number, promise.encode()),
        lambda value: ReservationMessage.decode(want_bytes(value, "the reservation")),
    ),
    "limit": _Part(
        lambda number, limit: bytes_field(number, limit.encode()),
        lambda value: Limit.decode(want_bytes(value, "the limit")),
    ),
    "status": _Part(number_field, lambda value: want_number(value, "the status")),
}
