"""Identifiers of peers and of points in the DHT key space.

A `PeerId` is libp2p's: the identity multihash of the protobuf encoding of the Ed25519 public key, 38 bytes, written in
base58 as `12D3Koo...`. Its DHT key is the SHA-256 of these bytes. Hostile input: wrong length, another key type, text
that is not base58, a second spelling of the same id.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import base58

# Identity multihash (0x00), 36 bytes long (0x24), then protobuf: field 1 is Ed25519 (1), field 2 the 32-byte key.
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
PEER_ID_BYTES = len(_PREFIX) + 32


@dataclass(frozen=True, order=True)
class PeerId:
    """A peer's identity: its Ed25519 public key in libp2p's form."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != PEER_ID_BYTES or not self.raw.startswith(_PREFIX):
            raise ValueError("a peer id is the 38-byte identity multihash of an Ed25519 public key")

    @classmethod
    def from_public_key(cls, public_key: bytes) -> PeerId:
        """The id of the peer with this raw 32-byte Ed25519 public key."""
        return cls(_PREFIX + public_key)

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Parse base58 text. Raises ValueError if it is not an Ed25519 peer id."""
        if len(text) > 64:
            raise ValueError("peer id text is too long")
        return _parsed(text)

    @property
    def public_key(self) -> bytes:
        """The raw 32-byte Ed25519 public key."""
        return self.raw[len(_PREFIX) :]

    @cached_property
    def text(self) -> str:
        return base58.b58encode(self.raw).decode()

    @property
    def short(self) -> str:
        """The last eight characters, enough for people to distinguish the peers of a run."""
        return "…" + self.text[-8:]

    @cached_property
    def key(self) -> Key:
        """The peer's position in the DHT key space."""
        return Key(hashlib.sha256(self.raw).digest())

    def __hash__(self) -> int:
        return hash(self.raw)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"PeerId({self.short})"


@lru_cache(maxsize=4096)
def _parsed(text: str) -> PeerId:
    """Parse a peer id, with a cache: every round names members by text, and decoding one takes as long as decoding a
    whole message.

    Rejects white space, which base58 would strip, so that each peer id has exactly one text.
    """
    if text.strip() != text:
        raise ValueError("a peer id has no white space")
    return PeerId(base58.b58decode(text))


def is_peer_text(text: str) -> bool:
    """True if `text` is a valid peer id."""
    try:
        PeerId.parse(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """A point in the 256-bit DHT key space."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise ValueError("a DHT key has 32 bytes")

    @classmethod
    def of(cls, name: str) -> Key:
        """The key of a name, such as `run/stage/0`."""
        return cls(hashlib.sha256(name.encode()).digest())

    def distance(self, other: Key) -> int:
        """Kademlia's XOR distance."""
        return int.from_bytes(self.raw, "big") ^ int.from_bytes(other.raw, "big")
