"""Noise XX as in libp2p: mutual authentication, session keys, early choice of the muxer; then encrypted frames.

`NoiseHandshake` implements the three messages from either side; `Sealer` and `Opener` each handle one direction
afterwards. No sockets and no randomness: secrets are passed in. Input may arrive byte by byte. If both sides have AES
in hardware they use it instead of ChaCha20, which costs more CPU time; this is an extension of this program, negotiated
together with the muxers, with separate keys and Noise's REKEY. Invariants: a nonce is used once; no plaintext is
returned before its tag is checked; the identity is proven by its signature over the static key before `result` is set.
Hostile input: frames of any length, points of low order, signatures of other keys, invalid payloads, replayed or
reordered frames: all raise ProtocolViolation. Sources: https://noiseprotocol.org/noise.html, libp2p specs
`noise/README.md`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from nacl import bindings
from nacl import exceptions as nacl_exceptions

from peerd.core.errors import Cause, ProtocolViolation, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair, verify
from peerd.core.limits import NOISE_HANDSHAKE_BYTES
from peerd.wire.buffers import BufferPool
from peerd.wire.identify_message import NoisePayload

PROTOCOL: Final = "/noise"
TAG_BYTES: Final = 16
FRAME_BYTES: Final = 65535  # encrypted, without the two bytes of length
PLAIN_BYTES: Final = FRAME_BYTES - TAG_BYTES
SEALED_BYTES: Final = FRAME_BYTES + 2
_KEY_BYTES: Final = 32  # of any key; only a first message, which is just a key, is this short
_POOLED_BYTES: Final = 4096  # plaintexts below this are cheap to allocate
_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
_SIGNED_PREFIX: Final = b"noise-libp2p-static-key:"
_OFFER: Final = "/peerd/aes-256-gcm/1"  # listed with the muxers by a side with the cipher in hardware
_AES_KEYS: Final = b"peerd aes-256-gcm"  # separates its keys from those that Noise derives
_NONCE: Final = struct.Struct("<4xQ")
_NONCE_MAX: Final = (1 << 64) - 1  # only for REKEY
_LENGTH: Final = struct.Struct(">H")

Place = Callable[[int], memoryview | None]  # returns the buffer for a plaintext of this size, if known
Row = Callable[[], int]  # returns the number of plaintext bytes that belong there contiguously


@dataclass(frozen=True, slots=True)
class Suite:
    """Cipher suite that encrypts the frames after a handshake."""

    cipher: type[ChaCha20Poly1305 | AESGCM]
    nonce: struct.Struct
    key_frames: float  # frames per key, after which both sides derive the next key


CHACHA: Final = Suite(ChaCha20Poly1305, _NONCE, math.inf)  # as in libp2p
# A terabyte: what GCM can encrypt with a distinguishing advantage of at most 2^-57, the bound of TLS 1.3.
AES: Final = Suite(AESGCM, struct.Struct(">4xQ"), 1 << 24)


class _Direction:
    """The key of one direction, and the number of its next frame."""

    __slots__ = ("_cipher", "_count", "_nonce", "_renew_at", "_suite")

    def __init__(self, key: bytes, suite: Suite = CHACHA) -> None:
        self._suite, self._nonce = suite, suite.nonce.pack
        self._cipher = suite.cipher(key)
        self._count, self._renew_at = 0, suite.key_frames

    def _renew(self) -> None:
        """Noise's REKEY (sections 4.2 and 11.3); due when `_count` has reached `_renew_at`."""
        key = self._cipher.encrypt(self._nonce(_NONCE_MAX), bytes(_KEY_BYTES), None)[:_KEY_BYTES]
        self._cipher = self._suite.cipher(key)
        self._renew_at += self._suite.key_frames


class Sealer(_Direction):
    """Encrypts one direction into length-prefixed frames."""

    __slots__ = ()

    def seal(self, plain: bytes | memoryview, into: memoryview) -> int:
        """Write one frame with `plain` (at most PLAIN_BYTES) to `into`; returns the bytes written."""
        if self._count >= self._renew_at:
            self._renew()
        size = len(plain) + TAG_BYTES
        _LENGTH.pack_into(into, 0, size)
        self._cipher.encrypt_into(self._nonce(self._count), plain, None, into[2 : 2 + size])
        self._count += 1
        return 2 + size


class Opener(_Direction):
    """Decrypts the other direction, from pieces of any size.

    With a pool (of SEALED_BYTES buffers), large plaintexts are views of its buffers, which the caller then owns; small
    ones, and all without a pool, are bytes. `place` may return other memory for a large plaintext of the given size: it
    is called once all earlier plaintexts were taken from the iterator, and the memory's content is undefined if the tag
    is wrong. With `row`, contiguous full frames are returned as one plaintext.
    """

    __slots__ = ("_part", "_part_bytes", "pool")

    def __init__(self, key: bytes, pool: BufferPool | None = None, suite: Suite = CHACHA) -> None:
        super().__init__(key, suite)
        self.pool = pool
        self._part: bytearray | None = None  # the beginning of an incomplete frame
        self._part_bytes = 0

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """The plaintexts of all frames that are now complete; `data` may be reused afterwards."""
        return list(self.each(data))

    @property
    def missing_bytes(self) -> int:
        """Least number of further bytes with which a frame may become complete; feeding fewer is useless."""
        part = self._part
        if part is None or self._part_bytes < 2:
            return 1
        return 2 + (part[0] << 8 | part[1]) - self._part_bytes

    def each(
        self, data: bytes | memoryview, place: Place | None = None, row: Row | None = None
    ) -> Iterator[bytes | memoryview]:
        """Like `feed`, one plaintext after the other; `data` may be reused once the last one was taken."""
        view = memoryview(data)
        at = 0
        if self._part is not None and view:
            at = self._add_to_part(self._part, view)
            if (plain := self._finish_part(self._part, place)) is not None:
                yield plain
        end = len(view)
        while end - at >= 2:
            size = view[at] << 8 | view[at + 1]
            if end - at - 2 < size:
                break
            if size == FRAME_BYTES and end - at >= 2 * SEALED_BYTES and place is not None and row is not None:
                frames = min(row() // PLAIN_BYTES, (end - at) // SEALED_BYTES)
                into = place(frames * PLAIN_BYTES) if frames > 1 else None
                if into is not None and (opened := self._open_row(view[at:], into)):
                    yield into[: opened * PLAIN_BYTES]
                    at += opened * SEALED_BYTES
                    continue
            yield self._open(view[at + 2 : at + 2 + size], place)
            at += 2 + size
        if at < end:
            self._part = self.pool.take() if self.pool is not None else bytearray(SEALED_BYTES)
            self._part[: end - at] = view[at:]
            self._part_bytes = end - at

    def _add_to_part(self, part: bytearray, view: memoryview) -> int:
        """Append to the frame in `part`; returns the number of bytes used of `view`."""
        have, at = self._part_bytes, 0
        if have < 2:
            part[1] = view[0]
            have, at = 2, 1
        want = 2 + (part[0] << 8 | part[1])
        take = min(want - have, len(view) - at)
        part[have : have + take] = view[at : at + take]
        self._part_bytes = have + take
        return at + take

    def _finish_part(self, part: bytearray, place: Place | None) -> bytes | memoryview | None:
        """The plaintext of the frame in `part` if it is complete, else None."""
        if self._part_bytes < 2 or self._part_bytes < (want := 2 + (part[0] << 8 | part[1])):
            return None
        plain = self._open(memoryview(part)[2:want], place)
        self._part = None
        if self.pool is not None:
            self.pool.give(part)
        return plain

    def _open_row(self, view: memoryview, into: memoryview) -> int:
        """Decrypt full frames into `into` until it is full or a frame is not full or invalid; returns their number."""
        decrypt, nonce, count = self._cipher.decrypt_into, self._nonce, self._count
        try:
            for at, to in zip(range(0, len(view), SEALED_BYTES), range(0, len(into), PLAIN_BYTES), strict=False):
                if view[at] != 0xFF or view[at + 1] != 0xFF or count >= self._renew_at:
                    break
                sealed = view[at + 2 : at + SEALED_BYTES]
                decrypt(nonce(count), sealed, None, into[to : to + PLAIN_BYTES])
                count += 1
        except InvalidTag:
            pass  # frames before it count; this one is decrypted again by itself, and rejected
        opened, self._count = count - self._count, count
        return opened

    def _open(self, sealed: memoryview, place: Place | None) -> bytes | memoryview:
        size = len(sealed) - TAG_BYTES
        if size < 0:
            raise ProtocolViolation("an encrypted frame is shorter than its tag")
        if self._count >= self._renew_at:
            self._renew()
        nonce = self._nonce(self._count)
        self._count += 1
        try:
            if size < _POOLED_BYTES or self.pool is None:
                return self._cipher.decrypt(nonce, sealed, None)
            plain = place(size) if place is not None else None
            if plain is None:
                plain = memoryview(self.pool.take())[:size]
            self._cipher.decrypt_into(nonce, sealed, None, plain)
            return plain
        except InvalidTag:
            raise ProtocolViolation("an encrypted frame does not authenticate") from None


@dataclass(frozen=True, slots=True)
class Session:
    """Result of a handshake."""

    peer: PeerId
    sealer: Sealer
    opener: Opener
    muxer: str | None  # chosen early, or None if it must be negotiated
    rest: bytes  # bytes after the last handshake message
    offers: tuple[str, ...]  # muxers and extensions of the other side
    binding: bytes  # unique id of this session (Noise section 11.2); public to observers of the handshake


class _Symmetric:
    """The SymmetricState of the Noise specification, section 5.2."""

    __slots__ = ("_cipher", "_count", "chain", "digest")

    def __init__(self) -> None:
        self.digest = self.chain = _NAME  # exactly one hash long, so it is used directly
        self._cipher: ChaCha20Poly1305 | None = None
        self._count = 0
        self.mix_hash(b"")  # the empty prologue

    def mix_hash(self, data: bytes) -> None:
        self.digest = hashlib.sha256(self.digest + data).digest()

    def mix_key(self, secret: bytes, public: bytes) -> None:
        try:
            shared = bindings.crypto_scalarmult(secret, public)
        except nacl_exceptions.RuntimeError:
            raise ProtocolViolation("a handshake key is of low order") from None
        self.chain, key = _hkdf(self.chain, shared)
        self._cipher = ChaCha20Poly1305(key)
        self._count = 0

    def encrypt(self, plain: bytes) -> bytes:
        sealed = plain
        if self._cipher is not None:
            sealed = self._cipher.encrypt(_NONCE.pack(self._count), plain, self.digest)
            self._count += 1
        self.mix_hash(sealed)
        return sealed

    def decrypt(self, sealed: bytes) -> bytes:
        plain = sealed
        if self._cipher is not None:
            try:
                plain = self._cipher.decrypt(_NONCE.pack(self._count), sealed, self.digest)
            except InvalidTag:
                raise ProtocolViolation("a handshake message does not authenticate") from None
            self._count += 1
        self.mix_hash(sealed)
        return plain


def _hkdf(chain: bytes, material: bytes) -> tuple[bytes, bytes]:
    key = hmac.digest(chain, material, "sha256")
    first = hmac.digest(key, b"\x01", "sha256")
    return first, hmac.digest(key, first + b"\x02", "sha256")


def _check_key(what: str, secret: bytes) -> None:
    """Raise ValueError unless the key has 32 bytes, because libsodium would read beyond a shorter one."""
    if len(secret) != _KEY_BYTES:
        raise ValueError(f"{what} has {_KEY_BYTES} bytes, not {len(secret)}")


class Secrets:
    """Keys of one side of a handshake: `static` (32 secret bytes) may be reused, `ephemeral` must not."""

    __slots__ = ("ephemeral", "identity", "signature", "static", "static_public")

    def __init__(self, identity: Keypair, static: bytes, ephemeral: bytes = b"") -> None:
        _check_key("a static key", static)
        self.identity, self.static, self.ephemeral = identity, static, ephemeral
        self.static_public = bindings.crypto_scalarmult_base(static)
        self.signature = identity.sign(_SIGNED_PREFIX + self.static_public)

    def fresh(self, ephemeral: bytes) -> Secrets:
        """The same identity and static key with a new `ephemeral` key for the next handshake."""
        copy = object.__new__(Secrets)
        copy.identity, copy.static, copy.ephemeral = self.identity, self.static, ephemeral
        copy.static_public, copy.signature = self.static_public, self.signature
        return copy


class NoiseHandshake:
    """One handshake, as initiator (which sends the first message) or responder.

    Send the bytes that `start` and `feed` return; once `result` is set, the bytes that `feed` returned last are the
    last message. Raises Unreachable if the other side is not `expected`: an initiator knows this before it reveals its
    identity. A responder reveals its identity to everybody, like every peer that can be dialed.

    If both sides dialed each other at once, on one connection, both are initiators and receive a first message instead
    of a second one. Then the side with the smaller ephemeral key becomes the responder, with the same key, from which
    no secret was derived before. Other implementations give up in this case. So an attacker that answers this way
    learns who dials, but no more: one of the two must identify itself first, when neither can know the other.
    """

    def __init__(
        self,
        secrets: Secrets,
        *,
        initiator: bool,
        muxers: Sequence[str],
        expected: PeerId | None = None,
        aes: bool = False,
    ) -> None:
        """`aes`: offer AES, which is used if the other side offers it as well."""
        _check_key("an ephemeral key", secrets.ephemeral)
        self.result: Session | None = None
        self._secrets, self._initiator, self._muxers, self._expected = secrets, initiator, tuple(muxers), expected
        self._aes = aes
        self._state = _Symmetric()
        self._buffer = bytearray()
        self._greeted = False  # responder: the first message has arrived
        self._crossed = False  # both sides have sent a first message
        self._their_ephemeral = b""

    @property
    def initiator(self) -> bool:
        """True if this side is the initiator, possibly after both sides had been."""
        return self._initiator

    def start(self) -> bytes:
        """The initiator's first message; empty for a responder."""
        if not self._initiator:
            return b""
        return self._framed(self._write_ephemeral() + self._state.encrypt(b""))

    def feed(self, data: bytes) -> bytes:
        """Process received bytes; returns the bytes to send, often none."""
        self._buffer += data
        out = b""
        while self.result is None and (message := self._take()) is not None:
            if self._initiator and len(message) == _KEY_BYTES and not self._crossed:
                out += self._cross(message)
            elif self._initiator:
                out += self._answer_second(message)
            elif not self._greeted:
                self._greeted = True
                out += self._answer_first(message)
            else:
                self._read_third(message)
        return out

    def _cross(self, message: bytes) -> bytes:
        """Both sides have sent a first message: one becomes the responder, the other waits for its answer."""
        self._crossed = True
        own = bindings.crypto_scalarmult_base(self._secrets.ephemeral)
        if own == message:
            raise Unreachable("that is this peer itself: its own handshake came back", cause=Cause.OURSELVES)
        if own > message:
            return b""
        self._initiator, self._greeted = False, True
        self._state = _Symmetric()
        return self._answer_first(message)

    def _take(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        size = buffer[0] << 8 | buffer[1]
        if size > NOISE_HANDSHAKE_BYTES:
            raise ProtocolViolation(f"a handshake message of {size} bytes; allowed: {NOISE_HANDSHAKE_BYTES}")
        if len(buffer) < 2 + size:
            return None
        message = bytes(buffer[2 : 2 + size])
        del buffer[: 2 + size]
        return message

    @staticmethod
    def _framed(message: bytes) -> bytes:
        return _LENGTH.pack(len(message)) + message

    def _answer_first(self, message: bytes) -> bytes:
        """Read e; write e, ee, s, es and our proof."""
        self._read_ephemeral(message)
        self._state.decrypt(message[32:])
        own = self._write_ephemeral()
        self._state.mix_key(self._secrets.ephemeral, self._their_ephemeral)
        return self._framed(own + self._write_static(self._their_ephemeral) + self._write_proof())

    def _answer_second(self, message: bytes) -> bytes:
        """Read e, ee, s, es and their proof; write s, se and ours."""
        self._read_ephemeral(message)
        self._state.mix_key(self._secrets.ephemeral, self._their_ephemeral)
        payload = self._read_proof(message[32:])
        last = self._framed(self._write_static(self._their_ephemeral) + self._write_proof())
        self._finish(payload)
        return last

    def _read_third(self, message: bytes) -> None:
        """Read s, se and their proof."""
        self._finish(self._read_proof(message))

    def _write_ephemeral(self) -> bytes:
        public = bindings.crypto_scalarmult_base(self._secrets.ephemeral)
        self._state.mix_hash(public)
        return public

    def _read_ephemeral(self, message: bytes) -> None:
        if len(message) < 32:
            raise ProtocolViolation("a handshake message is too short for a key")
        self._their_ephemeral = message[:32]
        self._state.mix_hash(self._their_ephemeral)

    def _write_static(self, their_ephemeral: bytes) -> bytes:
        sealed = self._state.encrypt(self._secrets.static_public)
        self._state.mix_key(self._secrets.static, their_ephemeral)
        return sealed

    def _write_proof(self) -> bytes:
        secrets = self._secrets
        offers = (*self._muxers, _OFFER) if self._aes else self._muxers
        payload = NoisePayload(peer=secrets.identity.peer_id, signature=secrets.signature, muxers=offers)
        return self._state.encrypt(payload.encode())

    def _read_proof(self, message: bytes) -> NoisePayload:
        """Read their static key, mix it with our ephemeral key, and verify the identity that signed it."""
        static = self._state.decrypt(message[: 32 + TAG_BYTES])
        if len(static) != 32:
            raise ProtocolViolation("a handshake message is too short for a key")
        self._state.mix_key(self._secrets.ephemeral, static)
        payload = NoisePayload.decode(self._state.decrypt(message[32 + TAG_BYTES :]))
        if not verify(payload.peer, _SIGNED_PREFIX + static, payload.signature):
            raise ProtocolViolation(f"the handshake names {payload.peer} without its signature")
        if self._expected not in (None, payload.peer):
            raise Unreachable(f"expected {self._expected}, but the peer there is {payload.peer}")
        return payload

    def _finish(self, payload: NoisePayload) -> None:
        aes = self._aes and _OFFER in payload.muxers
        suite, keys = (AES, _hkdf(self._state.chain, _AES_KEYS)) if aes else (CHACHA, _hkdf(self._state.chain, b""))
        mine, theirs = (keys[0], keys[1]) if self._initiator else (keys[1], keys[0])
        ours, others = (self._muxers, payload.muxers) if self._initiator else (payload.muxers, self._muxers)
        muxer = next((name for name in ours if name in others), None)
        rest, binding = bytes(self._buffer), self._state.digest
        sealer, opener = Sealer(mine, suite), Opener(theirs, suite=suite)
        self.result = Session(payload.peer, sealer, opener, muxer, rest, payload.muxers, binding)
        self._buffer.clear()
