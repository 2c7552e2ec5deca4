"""The message of DCUtR, by which two peers on a relayed connection exchange addresses and the moment to dial.

Addresses stay raw bytes, since a peer may list kinds that this side does not know; addresses beyond the limits are
dropped. Hostile input: unknown kinds, oversized messages, numbers in place of addresses; each raises ProtocolViolation.
Source: libp2p specs `relay/DCUtR.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, PUNCH_MESSAGE_BYTES
from peerd.wire.protobuf import bytes_field, number_field, read_fields, want_bytes, want_number

DCUTR: Final = "/libp2p/dcutr"


class PunchKind(IntEnum):
    """Kinds of hole-punching messages."""

    CONNECT = 100  # the sender's addresses
    SYNC = 300  # dial now


@dataclass(frozen=True, slots=True)
class HolePunch:
    """A hole-punching message, in either direction."""

    kind: PunchKind
    addrs: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        return number_field(1, self.kind) + b"".join(bytes_field(2, addr) for addr in self.addrs)

    @classmethod
    def decode(cls, data: bytes) -> HolePunch:
        if len(data) > PUNCH_MESSAGE_BYTES:
            raise ProtocolViolation(f"a message of {len(data)} bytes; allowed: {PUNCH_MESSAGE_BYTES}")
        kind = -1
        addrs: list[bytes] = []
        for number, value in read_fields(data):
            if number == 1:
                kind = want_number(value, "the kind")
            elif number == 2:
                addrs.append(want_bytes(value, "an address"))
        try:
            known = PunchKind(kind)
        except ValueError:
            raise ProtocolViolation(f"a message of kind {kind} is not known here") from None
        return cls(known, tuple(addr for addr in addrs if 0 < len(addr) <= ADDR_BYTES)[:ADDRS_PER_PEER])
