"""A session below calls: hand-shake and encryption are right, what is said then is anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from multiaddr import Multiaddr

from peerd.core.addr import split_peer
from peerd.wire.link.upgrade import UpgradedLink, upgrade
from peerd.wire.noise.multistream import HEADER as MULTISTREAM
from peerd.wire.noise.multistream import encode_line
from peerd.wire.noise.noise import PLAIN_BYTES, SEALED_BYTES, Secrets
from peerd.wire.yamux.frames import ACK, DATA, FIN, HEADER, PING, RST, SYN, WINDOW
from scripts.hostile.field import Field, OwnAddress


def frame(kind: int, flags: int, stream: int, length: int = 0, payload: bytes = b"") -> bytes:
    """One yamux frame; `length` beside a payload is a lie."""
    return HEADER.pack(0, kind, flags, stream, length or len(payload)) + payload


def opening(stream: int, protocol: str, data: bytes = b"") -> bytes:
    """A stream that names its protocol and says `data`, all at once."""
    return frame(DATA, SYN, stream, payload=MULTISTREAM + encode_line(protocol) + data)


class Session:
    """One encrypted connection. Frames go out as they are given; pings of the other side are answered."""

    def __init__(self, secured: UpgradedLink) -> None:
        self._secured = secured
        self._buffer = memoryview(bytearray(SEALED_BYTES))
        self._sending = trio.Lock()
        self.ended = trio.Event()
        self._next = -1 if secured.initiator else 0

    def stream(self) -> int:
        """The number of a stream that was not opened yet."""
        self._next += 2
        return self._next

    async def send(self, *frames: bytes) -> None:
        """In as few reads of the other side as they fit into; trio.BrokenResourceError when it has hung up."""
        data = b"".join(frames)
        async with self._sending:
            for at in range(0, len(data), PLAIN_BYTES):
                size = self._secured.session.sealer.seal(data[at : at + PLAIN_BYTES], self._buffer)
                await self._secured.raw.send_all(bytes(self._buffer[:size]))

    async def read(self) -> None:
        """Throw away what comes, and keep the other side believing that somebody is there."""
        opener, rest = self._secured.session.opener, bytearray()
        try:
            while data := await self._secured.raw.receive_some(1 << 16):
                for plain in opener.feed(data):
                    rest += plain
                while len(rest) >= HEADER.size:
                    _, kind, flags, _, length = HEADER.unpack_from(rest)
                    size = HEADER.size + (length if kind == DATA else 0)
                    if len(rest) < size:
                        break
                    del rest[:size]
                    if kind == PING and flags & SYN:
                        await self.send(frame(PING, ACK, 0, length))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.ended.set()

    async def close(self) -> None:
        await self._secured.raw.aclose()


@asynccontextmanager
async def session(there: Field, target: Multiaddr, *, reads: bool = True) -> AsyncIterator[Session]:
    """A session with `target` under a new identity. Without `reads` nothing that comes is ever taken."""
    bare, expected = split_peer(target)
    raw = await OwnAddress(there.address).dial(bare)
    try:
        secrets = Secrets(there.keypair(), there.rng.randbytes(32), there.rng.randbytes(32))
        found = Session(await upgrade(raw, secrets, initiator=True, expected=expected))
        async with trio.open_nursery() as nursery:
            if reads:
                nursery.start_soon(found.read)
            yield found
            nursery.cancel_scope.cancel()
    finally:
        await raw.aclose()


__all__ = ["ACK", "DATA", "FIN", "PING", "RST", "SYN", "WINDOW", "Session", "frame", "opening", "session"]
