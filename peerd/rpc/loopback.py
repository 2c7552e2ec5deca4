"""A stream from this peer to itself: two ends in memory, with the same windows, resets and ends as a real one.

So a call to oneself takes the same path as any other: limits, deadlines, cancellation, and no shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.rpc.inbound import renewed

_WINDOW_BYTES = 256 << 10
_OFFER_BYTES = 16 << 10


class LoopbackStream:
    """One end of a stream within this process, made by `local_pair`."""

    superseded = False  # there is no better path to oneself
    link = None

    def __init__(self, peer: PeerId, protocol: str) -> None:
        self.peer = peer
        self.protocol = protocol
        self._other: LoopbackStream = self
        self._chunks: deque[bytes] = deque()  # arrived, not yet received
        self._bytes = 0
        self._finished = False  # we send no more
        self._closed = False  # nor do we receive
        self._gone: RemoteError | None = None  # why, once the stream is over
        self._changed = trio.lowlevel.ParkingLot()

    def doubt(self) -> None:
        """Does nothing: the local peer is always reachable."""

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        view, other = memoryview(data).cast("B"), self._other
        await trio.lowlevel.checkpoint()
        while view:
            if self._gone is not None:
                raise renewed(self._gone).blame(self.peer)
            if self._finished:
                raise Unreachable("this side has closed the stream", self.peer)
            room = _WINDOW_BYTES - other._bytes
            if room <= 0:
                await self._changed.park()
                continue
            other._chunks.append(bytes(view[:room]))
            other._bytes += len(other._chunks[-1])
            other._changed.unpark_all()
            view = view[room:]

    def send_nowait(self, data: bytes) -> bool:
        other = self._other
        if self._gone is not None or self._finished or other._bytes + len(data) > _WINDOW_BYTES:
            return False
        other._chunks.append(data)
        other._bytes += len(data)
        other._changed.unpark_all()
        return True

    @property
    def unsent_bytes(self) -> int:
        return 0  # sent data has arrived

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self._gone is not None:
                raise renewed(self._gone).blame(self.peer)
            if self._other._finished:
                return b""
            await self._changed.park()
        data = self._chunks.popleft()
        if self._chunks and len(data) < max_bytes:
            data = b"".join([data, *self._chunks])
            self._chunks.clear()
        if len(data) > max_bytes:
            self._chunks.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        self._bytes -= len(data)
        self._other._changed.unpark_all()
        return data

    async def receive_view(self, max_bytes: int) -> memoryview:
        return memoryview(await self.receive_some(max_bytes))

    async def receive_into(self, into: memoryview, landed: Callable[[int], None]) -> None:
        while into:
            data = await self.receive_some(len(into))
            if not data:
                raise ProtocolViolation(f"the stream ends {len(into)} bytes early", self.peer)
            into[: len(data)] = data
            landed(len(data))
            into = into[len(data) :]

    async def receive_each(self, take: Callable[[bytes], bool]) -> bool:
        while data := await self.receive_some(_OFFER_BYTES):
            if not take(data):
                return True
        return False

    async def wait_gone(self) -> None:
        while self._gone is None and not self._closed:
            await self._changed.park()

    @property
    def closed(self) -> bool:
        """True if both sides have closed it, or it was reset."""
        return self._gone is not None or (self._closed and self._other._closed)

    def reset(self) -> None:
        self.lose(Unreachable("the stream was reset"))

    def lose(self, why: RemoteError) -> None:
        """End both directions at once; unreceived data is lost."""
        for end in (self, self._other):
            if end._gone is None:
                end._gone = why
                end._chunks.clear()
            end._changed.unpark_all()

    async def close_write(self) -> None:
        self._finished = True
        self._other._changed.unpark_all()
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self._closed = True
        self._changed.unpark_all()
        await self.close_write()


def local_pair(opener: PeerId, acceptor: PeerId, protocol: str) -> tuple[LoopbackStream, LoopbackStream]:
    """The opener's end and the acceptor's end of a new stream."""
    ours, theirs = LoopbackStream(acceptor, protocol), LoopbackStream(opener, protocol)
    ours._other, theirs._other = theirs, ours
    return ours, theirs
