"""libp2p's messages about identity: public keys, the Noise payload, identify.

Each has `encode` and a strict `decode`. Hostile input: keys of other types, wrong lengths, too many muxers, invalid
UTF-8; each raises ProtocolViolation. If a singular field is repeated, the last value wins, as protobuf specifies.
Sources: libp2p specs `peer-ids/peer-ids.md`, `noise/README.md`, `identify/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import ADDR_BYTES, AGENT_BYTES, IDENTIFY_ADDRS, IDENTIFY_PROTOCOLS, NOISE_MUXERS, PROTOCOL_BYTES
from peerd.wire.protobuf import bytes_field, read_fields, want_bytes, want_text

_KEY_TYPES = {0: "RSA", 1: "Ed25519", 2: "secp256k1", 3: "ECDSA"}


def encode_public_key(peer: PeerId) -> bytes:
    """libp2p's PublicKey message of an Ed25519 key: the peer id without its two multihash bytes."""
    return peer.raw[2:]


def decode_public_key(data: bytes) -> PeerId:
    """The id of the peer whose key a PublicKey message contains."""
    kind, key = -1, b""
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 2:
            key = want_bytes(value, "the public key")
    if kind != 1:
        raise ProtocolViolation(f"an identity of type {_KEY_TYPES.get(kind, kind)}; only Ed25519 is supported here")
    if len(key) != 32:
        raise ProtocolViolation(f"an Ed25519 key of {len(key)} bytes")
    return PeerId.from_public_key(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePayload:
    """Payload of the Noise handshake: proof of the sender's identity, and the muxers offered early."""

    peer: PeerId
    signature: bytes
    muxers: tuple[str, ...] = ()

    def encode(self) -> bytes:
        muxers = b"".join(bytes_field(2, muxer.encode()) for muxer in self.muxers)
        body = bytes_field(1, encode_public_key(self.peer)) + bytes_field(2, self.signature)
        return body + (bytes_field(4, muxers) if muxers else b"")

    @classmethod
    def decode(cls, data: bytes) -> NoisePayload:
        peer: PeerId | None = None
        signature = b""
        muxers: tuple[str, ...] = ()
        for number, value in read_fields(data):
            if number == 1:
                peer = decode_public_key(want_bytes(value, "the identity key"))
            elif number == 2:
                signature = want_bytes(value, "the identity signature")
            elif number == 4:
                muxers = _muxers(want_bytes(value, "the extensions"))
        if peer is None:
            raise ProtocolViolation("the handshake names no identity")
        return cls(peer=peer, signature=signature, muxers=muxers)


def _muxers(extensions: bytes) -> tuple[str, ...]:
    names = tuple(want_text(v, "a muxer name", PROTOCOL_BYTES) for number, v in read_fields(extensions) if number == 2)
    if len(names) > NOISE_MUXERS:
        raise ProtocolViolation(f"{len(names)} muxers; allowed: {NOISE_MUXERS}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Identify:
    """The identify message. Addresses stay raw bytes: a peer may list kinds that this side does not know."""

    peer: PeerId | None = None
    listen_addrs: tuple[bytes, ...] = ()
    protocols: tuple[str, ...] = ()
    observed_addr: bytes = b""
    protocol_version: str = ""
    agent_version: str = ""

    def encode(self) -> bytes:
        parts = [] if self.peer is None else [bytes_field(1, encode_public_key(self.peer))]
        parts += [bytes_field(2, addr) for addr in self.listen_addrs]
        parts += [bytes_field(3, protocol.encode()) for protocol in self.protocols]
        parts.append(bytes_field(4, self.observed_addr) if self.observed_addr else b"")
        parts.append(bytes_field(5, self.protocol_version.encode()))
        parts.append(bytes_field(6, self.agent_version.encode()))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Identify:
        """Decode a message. Entries beyond the limits are dropped, not refused: peers on large hosts list many."""
        peer: PeerId | None = None
        addrs: list[bytes] = []
        protocols: list[str] = []
        observed, version, agent = b"", "", ""
        for number, value in read_fields(data):
            if number == 1:
                peer = decode_public_key(want_bytes(value, "the public key"))
            elif number == 2:
                addrs.append(want_bytes(value, "a listen address"))
            elif number == 3:
                protocols.append(want_text(value, "a protocol name", PROTOCOL_BYTES))
            elif number == 4:
                observed = want_bytes(value, "the observed address")
            elif number == 5:
                version = want_text(value, "the protocol version", AGENT_BYTES)
            elif number == 6:
                agent = want_text(value, "the agent version", AGENT_BYTES)
        return cls(
            peer=peer,
            listen_addrs=tuple(addr for addr in addrs if len(addr) <= ADDR_BYTES)[:IDENTIFY_ADDRS],
            protocols=tuple(protocols[:IDENTIFY_PROTOCOLS]),
            observed_addr=observed if len(observed) <= ADDR_BYTES else b"",
            protocol_version=version,
            agent_version=agent,
        )
