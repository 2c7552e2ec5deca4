"""Signed envelopes, and the reservation voucher: a relay's proof that it agreed to serve a peer.

An envelope binds a payload to its signer, its type and its domain, so that a signature is valid for nothing else.
Hostile input: keys or payloads of other types, invalid signatures, vouchers of another relay; each raises
ProtocolViolation. Sources: libp2p specs `RFC/0002-signed-envelopes.md`, `relay/circuit-v2.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.record import Signer, Verify
from peerd.core.varint import encode_varint
from peerd.wire.identify_message import decode_public_key, encode_public_key
from peerd.wire.protobuf import bytes_field, number_field, read_fields, want_bytes, want_number

_DOMAIN: Final = "libp2p-relay-rsvp"
_TYPE: Final = b"\x03\x02"


def seal_envelope(domain: str, kind: bytes, payload: bytes, signer: Signer) -> bytes:
    """Sign `payload` and wrap it in an envelope."""
    signature = signer.sign(_signed_part(domain, kind, payload))
    fields = (encode_public_key(signer.peer_id), kind, payload)
    return b"".join(bytes_field(number, field) for number, field in enumerate(fields, 1)) + bytes_field(5, signature)


def open_envelope(domain: str, kind: bytes, data: bytes, verify: Verify) -> tuple[PeerId, bytes]:
    """Verify an envelope; returns its signer and payload."""
    signer: PeerId | None = None
    found, payload, signature = b"", b"", b""
    for number, value in read_fields(data):
        if number == 1:
            signer = decode_public_key(want_bytes(value, "the public key"))
        elif number == 2:
            found = want_bytes(value, "the payload's type")
        elif number == 3:
            payload = want_bytes(value, "the payload")
        elif number == 5:
            signature = want_bytes(value, "the signature")
    if signer is None or found != kind:
        raise ProtocolViolation("an envelope without a signer, or of another type")
    if not verify(signer, _signed_part(domain, kind, payload), signature):
        raise ProtocolViolation(f"an envelope that {signer.short} did not sign")
    return signer, payload


def _signed_part(domain: str, kind: bytes, payload: bytes) -> bytes:
    return b"".join(encode_varint(len(part)) + part for part in (domain.encode(), kind, payload))


@dataclass(frozen=True, slots=True)
class Voucher:
    """A relay's signed statement that it accepts circuits to `peer` until `expires_unix_s`."""

    relay: PeerId
    peer: PeerId
    expires_unix_s: int

    def seal(self, signer: Signer) -> bytes:
        """The voucher in a signed envelope; `signer` is the relay."""
        body = bytes_field(1, self.relay.raw) + bytes_field(2, self.peer.raw) + number_field(3, self.expires_unix_s)
        return seal_envelope(_DOMAIN, _TYPE, body, signer)

    @classmethod
    def open(cls, data: bytes, verify: Verify) -> Voucher:
        """Decode a voucher and verify its relay's signature. The caller checks that relay and peer are as expected."""
        signer, body = open_envelope(_DOMAIN, _TYPE, data, verify)
        raw = {1: b"", 2: b""}
        expires_unix_s = 0
        for number, value in read_fields(body):
            if number in raw:
                raw[number] = want_bytes(value, "a peer id")
            elif number == 3:
                expires_unix_s = want_number(value, "the expiry")
        try:
            voucher = cls(PeerId(raw[1]), PeerId(raw[2]), expires_unix_s)
        except ValueError:
            raise ProtocolViolation("a voucher names a peer that has no Ed25519 key") from None
        if voucher.relay != signer:
            raise ProtocolViolation(f"a voucher of {voucher.relay.short} that {signer.short} signed")
        return voucher
