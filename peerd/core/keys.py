"""Ed25519 identities: key pairs that sign records and handshakes, and verification against a PeerId.

Stores no keys and draws no randomness: the caller passes the 32-byte seed. Hostile input: signatures of any length and
content, for which `verify` returns False.
"""

from __future__ import annotations

from typing import Protocol

from nacl import bindings, exceptions

from peerd.core.ids import PeerId

SEED_BYTES = 32
SIGNATURE_BYTES = 64


class _SecureBytes(Protocol):
    def __call__(self, count: int, /) -> bytes: ...


class Keypair:
    """A peer's identity: an Ed25519 key pair and its PeerId."""

    __slots__ = ("_secret", "peer_id", "seed")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}")
        self.seed = bytes(seed)
        public, self._secret = bindings.crypto_sign_seed_keypair(self.seed)
        self.peer_id = PeerId.from_public_key(public)

    @classmethod
    def from_seed(cls, seed: bytes) -> Keypair:
        """The identity of this 32-byte secret seed. Raises ValueError for another length."""
        return cls(seed)

    @classmethod
    def generate(cls, secure_bytes: _SecureBytes) -> Keypair:
        """Generate an identity from a secure random source, such as `clock.secure_bytes`."""
        return cls(secure_bytes(SEED_BYTES))

    def sign(self, data: bytes) -> bytes:
        """The 64-byte signature of `data`."""
        return bytes(bindings.crypto_sign(data, self._secret)[:SIGNATURE_BYTES])

    def __repr__(self) -> str:
        return f"Keypair({self.peer_id.short})"  # without the secret


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """True if `signature` is the signature of `data` by `peer`."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        bindings.crypto_sign_open(signature + data, peer.public_key)
    except exceptions.BadSignatureError:
        return False
    return True
