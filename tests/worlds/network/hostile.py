"""A hostile peer: it shakes hands as it should, speaks correctly for as long as it likes, and then says anything.

It is no Host: one connection, driven by hand. `open`, `send` and `hear` keep to the protocol; `say` seals whatever it
is given, in one piece, so that the other side finds all of it in one read; `shout` does not even seal.
"""

from __future__ import annotations

import trio
from multiaddr import Multiaddr

from peerd.core.keys import Keypair
from peerd.wire.link.upgrade import UpgradedLink, upgrade
from peerd.wire.noise.multistream import HEADER as HELLO
from peerd.wire.noise.multistream import encode_line
from peerd.wire.noise.noise import PLAIN_BYTES, SEALED_BYTES, Secrets
from peerd.wire.transport import RawLink, Transport
from peerd.wire.yamux.frames import HEADER
from peerd.wire.yamux.frames import PROTOCOL as YAMUX
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.stream import YamuxStream


def frame(kind: int, flags: int, stream: int, length: int, body: bytes = b"", version: int = 0) -> bytes:
    """Any yamux frame at all."""
    return HEADER.pack(version & 0xFF, kind & 0xFF, flags & 0xFFFF, stream & 0xFFFFFFFF, length & 0xFFFFFFFF) + body


def hello(protocol: str) -> bytes:
    """Opening bytes of a stream."""
    return HELLO + encode_line(protocol)


def secrets(name: str) -> Secrets:
    """The identity and static key of a peer of this name."""
    seed = name.encode().ljust(32, b".")[:32]
    return Secrets(Keypair.from_seed(seed), seed)


class Hostile:
    """One end of a connection; without `secured` nothing was said yet, and nothing is sealed."""

    def __init__(self, raw: RawLink, secured: UpgradedLink | None = None) -> None:
        self.raw, self.secured = raw, secured
        self.mux = YamuxSession(initiator=secured is None or secured.initiator, now=0.0)
        self._batch = memoryview(bytearray(PLAIN_BYTES))
        self._sealed = bytearray(SEALED_BYTES)
        self.ended = False  # the other side has closed

    # --- as the protocol has it ----------------------------------------------------------------------------

    async def open(self, protocol: str) -> YamuxStream:
        """A stream that speaks `protocol`."""
        stream = self.mux.open(0.0)
        await self.send(stream, hello(protocol))
        return stream

    async def send(self, stream: YamuxStream, data: bytes) -> None:
        self.mux.write(stream, data)
        await self.pump()

    async def pump(self) -> None:
        """Send all that the protocol lets us."""
        while size := self.mux.fill(self._batch):
            await self.say(bytes(self._batch[:size]))

    async def hear(self, within_s: float = 1.0) -> bool:
        """Take one arrival; False when none comes, or none ever will."""
        data = b""
        with trio.move_on_after(within_s):
            try:
                data = await self.raw.receive_some(1 << 18)
                self.ended = not data
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.ended = True
        for plain in self.secured.session.opener.each(data) if self.secured is not None else ():
            self.mux.receive(plain, 0.0)
        return bool(data)

    async def receive(self, stream: YamuxStream, count: int) -> bytes:
        """The stream's next bytes; fewer where no more come."""
        while stream.inbox_bytes < count and await self.hear():
            pass
        data = stream.take(count)
        self.mux.consumed(stream, 0.0)
        return data

    # --- and not -------------------------------------------------------------------------------------------

    async def say(self, *plains: bytes) -> None:
        """Seal each of these, and send them together."""
        sealed, into = b"", memoryview(self._sealed)
        for plain in plains:
            if self.secured is None:
                sealed += plain
                continue
            for at in range(0, max(len(plain), 1), PLAIN_BYTES):
                size = self.secured.session.sealer.seal(plain[at : at + PLAIN_BYTES], into)
                sealed += into[:size]
        await self.shout(sealed)

    async def shout(self, data: bytes) -> None:
        """Send these bytes as they are; nothing happens when the other side has gone."""
        try:
            await self.raw.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.ended = True

    async def gone(self) -> None:
        """Read until the other side closes."""
        while not self.ended:
            try:
                self.ended = not await self.raw.receive_some(1 << 18)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.ended = True


async def enter(
    network: Transport,
    addr: Multiaddr,
    who: Secrets,
    ephemeral: bytes = bytes(range(32)),
    muxers: tuple[str, ...] = (YAMUX,),
) -> Hostile:
    """Dial a host and shake hands with it."""
    raw: RawLink = await network.dial(addr)
    return Hostile(raw, await upgrade(raw, who.fresh(ephemeral), initiator=True, muxers=muxers))
