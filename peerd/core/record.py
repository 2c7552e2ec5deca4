"""Record: a signed, versioned, expiring value that a peer publishes under a key of the DHT.

A record's sub-key is its publisher's id and a suffix, and the publisher signs the whole record: no other peer can write
under that sub-key, move the record to another key, or extend its life. This module encodes, signs, verifies and
compares records; the store decides which ones to keep.

On the wire (and, after a domain tag, as signed), big-endian: format (1 byte), flags (1), key (32), publisher's Ed25519
key (32), version (8), expiry in Unix milliseconds (8), suffix length (1), value length (2), suffix, value; then the
signature (64). Each record has exactly one encoding.

A hostile peer may send: inconsistent lengths, unknown formats or flags, expiries beyond any calendar, tombstones with
content, another peer's key as publisher, invalid signatures. `decode` rejects all but the last two with
ProtocolViolation; `Verifier` and the reader's own key detect those.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.ids import Key, PeerId
from peerd.core.limits import (
    CLOCK_TOLERANCE_S,
    RECORD_SUFFIX_BYTES,
    RECORD_TAG_BYTES,
    RECORD_TTL_S,
    RECORD_VALUE_BYTES,
)

_DOMAIN: Final = b"peerd dht record 1\0"
_HEAD: Final = struct.Struct(">BB32s32sQQBH")
_FORMAT: Final = 1
_TOMBSTONE: Final = 1
_SIGNATURE_BYTES: Final = 64
_MAX_MS: Final = 1 << 48  # the year 10889; keeps milliseconds exact in floats
LATEST_S: Final = (_MAX_MS >> 1) / 1000  # later than any working clock; leaves room for every lease
_MAX_VERSION: Final = 1 << 63  # fits into a signed 64-bit integer
MAX_RECORD_BYTES: Final = _HEAD.size + RECORD_SUFFIX_BYTES + RECORD_VALUE_BYTES + _SIGNATURE_BYTES

Verify = Callable[[PeerId, bytes, bytes], bool]  # (publisher, data, signature), as peerd.core.keys.verify


class Signer(Protocol):
    """A key that signs records, such as `peerd.core.keys.Keypair`."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Record:
    """One value under one sub-key of one key. `expires_ms` is corrected Unix time in milliseconds."""

    key: Key
    publisher: PeerId
    suffix: bytes
    value: bytes
    version: int  # increases with each change that the publisher makes to this sub-key
    expires_ms: int
    tombstone: bool = False  # withdrawn: replaces the earlier record and has no value
    signature: bytes = b""

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Record:
        """Decode `data`, which must be exactly one record, else ProtocolViolation. Does not verify the signature."""
        if not _HEAD.size + _SIGNATURE_BYTES <= len(data) <= MAX_RECORD_BYTES:
            raise ProtocolViolation(f"a record of {len(data)} bytes; at most {MAX_RECORD_BYTES}")
        form, flags, key, public, version, expires_ms, suffix_len, value_len = _HEAD.unpack_from(data)
        if form != _FORMAT or flags & ~_TOMBSTONE:
            raise ProtocolViolation(f"a record of format {form} with flags {flags} is not known here")
        if suffix_len > RECORD_SUFFIX_BYTES or value_len > RECORD_VALUE_BYTES:
            raise ProtocolViolation(f"a record with a suffix of {suffix_len} and a value of {value_len} bytes")
        if len(data) != _HEAD.size + suffix_len + value_len + _SIGNATURE_BYTES:
            raise ProtocolViolation("a record's lengths do not add up")
        if expires_ms >= _MAX_MS or version >= _MAX_VERSION:
            raise ProtocolViolation("a record's expiry or version is out of range")
        tombstone = bool(flags & _TOMBSTONE)
        if tombstone and value_len:
            raise ProtocolViolation("a withdrawn record holds a value")
        at = _HEAD.size + suffix_len
        suffix, value, signature = (bytes(part) for part in (data[_HEAD.size : at], data[at:-64], data[-64:]))
        publisher = PeerId.from_public_key(public)
        return cls(Key(key), publisher, suffix, value, version, expires_ms, tombstone, signature)

    @property
    def expires(self) -> float:
        """Time of expiry, in corrected Unix seconds."""
        return self.expires_ms / 1000

    @property
    def sub_key(self) -> bytes:
        """Publisher and suffix: the record's slot under its key. A newer record replaces one with the same sub-key."""
        return self.publisher.raw + self.suffix

    @property
    def tag(self) -> bytes:
        """A hash that identifies this record. A part of the signature would not do: its publisher could choose it."""
        return hashlib.sha256(self.encode()).digest()[:RECORD_TAG_BYTES]

    def encode(self) -> bytes:
        """Encode the record with its signature; LocalError if it is not signed."""
        if len(self.signature) != _SIGNATURE_BYTES:
            raise LocalError("a record must be signed before it is sent")
        return self._content() + self.signature

    def signed(self, signer: Signer) -> Record:
        """A copy with the publisher's signature. LocalError if it exceeds a limit, or `signer` is another peer."""
        if signer.peer_id != self.publisher:
            raise LocalError("a record can only be signed by its publisher")
        if len(self.suffix) > RECORD_SUFFIX_BYTES:
            raise LocalError(f"a suffix of {len(self.suffix)} bytes; allowed: {RECORD_SUFFIX_BYTES}")
        if len(self.value) > RECORD_VALUE_BYTES:
            raise LocalError(f"a value of {len(self.value)} bytes; allowed: {RECORD_VALUE_BYTES}")
        if self.tombstone and self.value:
            raise LocalError("a withdrawn record holds no value")
        if not (0 <= self.expires_ms < _MAX_MS and 0 <= self.version < _MAX_VERSION):
            raise LocalError("a record's expiry or version is out of range")
        return replace(self, signature=signer.sign(_DOMAIN + self._content()))

    def is_signed(self, verify: Verify) -> bool:
        """True if the signature is the publisher's."""
        return verify(self.publisher, _DOMAIN + self._content(), self.signature)

    def beats(self, other: Record) -> bool:
        """True if this record replaces `other`, which has the same sub-key. A total order: of two different records,
        exactly one replaces the other.
        """
        return self._rank() > other._rank()

    def is_live(self, wall: float) -> bool:
        """True if the record has not expired at corrected Unix time `wall`."""
        return wall < self.expires

    def is_timely(self, wall: float) -> bool:
        """True if a store may accept the record: not expired, and its lease not too long, if clocks may differ by
        the tolerance.
        """
        return -CLOCK_TOLERANCE_S < self.expires - wall <= RECORD_TTL_S + CLOCK_TOLERANCE_S

    def _rank(self) -> tuple[int, bool, int, bytes, bytes]:
        # If a publisher uses a version twice, the other fields still make every peer choose the same record.
        return self.version, self.tombstone, self.expires_ms, self.value, self.signature

    def _content(self) -> bytes:
        flags = _TOMBSTONE if self.tombstone else 0
        sizes = len(self.suffix), len(self.value)
        public = self.publisher.public_key
        head = _HEAD.pack(_FORMAT, flags, self.key.raw, public, self.version, self.expires_ms, *sizes)
        return head + self.suffix + self.value


class Verifier:
    """Verifies signatures and caches valid records, so that a repeated check costs one hash per record."""

    def __init__(self, verify: Verify, remember: int = 4096) -> None:
        self._verify = verify
        self._genuine = BoundedDict[bytes, None](remember)  # SHA-256 of whole encoded records

    def knows(self, record: Record) -> bool:
        """True if the record is in the cache of valid ones, so that `genuine` is cheap."""
        return _digest(record) in self._genuine

    def genuine(self, record: Record) -> bool:
        """True if the record's publisher signed it. Valid records are cached."""
        digest = _digest(record)
        if digest in self._genuine:
            self._genuine.move_to_end(digest)
            return True
        if not record.is_signed(self._verify):
            return False
        self._genuine[digest] = None
        return True


def _digest(record: Record) -> bytes:
    return hashlib.sha256(record._content() + record.signature).digest()
