"""One circuit's stream as a raw link. Invariants: those of `net.transport`."""

from __future__ import annotations

import trio
from multiaddr import Multiaddr

from peerd.core.errors import RemoteError
from peerd.core.protobuf.circuit import Limit
from peerd.net.stream import Stream

_VIEW_BYTES = 256 * 1024


class CircuitLink:
    """A LendingLink over a stream that a relay forwards. `limit`: what the relay allows this circuit."""

    __slots__ = ("_closed", "_stream", "bytes_in", "bytes_out", "limit", "opened_at", "remote")

    def __init__(self, stream: Stream, remote: Multiaddr, limit: Limit | None) -> None:
        self.remote, self.limit = remote, limit
        self.opened_at = trio.current_time()
        self.bytes_in = self.bytes_out = 0
        self._stream = stream
        self._closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self._check_open()
        try:
            await self._stream.send(data)
        except RemoteError as error:
            raise self._lost(error) from error
        self.bytes_out += len(data)

    def send_nowait(self, data: memoryview) -> int:
        if self._closed or not self._stream.send_nowait(bytes(data)):
            return 0
        self.bytes_out += len(data)
        return len(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self._check_open()
        try:
            data = await self._stream.receive_some(max_bytes)
        except RemoteError as error:
            raise self._lost(error) from error
        self.bytes_in += len(data)
        return data

    async def receive_view(self, useful_bytes: int = 1) -> memoryview:
        await trio.lowlevel.checkpoint()
        self._check_open()
        try:
            view = await self._stream.receive_view(_VIEW_BYTES)
        except RemoteError as error:
            raise self._lost(error) from error
        self.bytes_in += len(view)
        return view

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._stream.aclose()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the circuit is closed")

    def _lost(self, error: RemoteError) -> Exception:
        if self._closed:
            return trio.ClosedResourceError("the circuit is closed")
        return trio.BrokenResourceError(f"the circuit ended: {error.args[0]}")
