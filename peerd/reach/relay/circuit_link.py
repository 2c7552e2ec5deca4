"""A circuit, which is a stream over a relay, as a raw link. Invariants: those of `wire.transport`."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio
from multiaddr import Multiaddr

from peerd.core.errors import RemoteError
from peerd.reach.messages.circuit_message import Limit
from peerd.wire.link.link_stream import Stream

_VIEW_BYTES = 256 * 1024
_BATCH_BYTES = 128 * 1024
_WORN = 0.8  # fraction of the circuit's bytes or time after which it is replaced


class CircuitLink:
    """A LendingLink over a stream that a relay forwards. `limit`: the relay's limits on this circuit."""

    __slots__ = (
        "_stream",
        "_worn_bytes",
        "bytes_in",
        "bytes_out",
        "closed",
        "limit",
        "opened_at",
        "remote",
        "when_worn",
    )

    def __init__(self, stream: Stream, remote: Multiaddr, limit: Limit | None) -> None:
        self.remote, self.limit = remote, limit
        self.opened_at = trio.current_time()
        self.bytes_in = self.bytes_out = 0
        self._stream = stream
        self._worn_bytes = math.inf if limit is None or not limit.data_bytes else _WORN * limit.data_bytes
        self.closed = False
        self.when_worn: Callable[[], None] | None = None  # called once, when its bytes are nearly used up

    @property
    def batch_bytes(self) -> int:
        """Two frames: nothing of this circuit can overtake bytes that wait in the stream."""
        return _BATCH_BYTES

    def begin_small(self) -> None:
        """No-op: the buffer is small anyway."""

    def never_rest(self, always: bool) -> None:
        """No-op: other streams share the connection to the relay."""

    def pace(self, bytes_per_s: float) -> None:
        """No-op: a circuit has no TCP connection of its own that could be paced."""

    def is_worn(self, now: float) -> bool:
        """True if the relay will soon close the circuit, because its time or bytes are nearly used up."""
        duration_s = self.limit.duration_s if self.limit is not None else 0
        aged = bool(duration_s) and now - self.opened_at >= _WORN * duration_s
        return aged or max(self.bytes_in, self.bytes_out) >= self._worn_bytes

    def _count(self, bytes_in: int, bytes_out: int) -> None:
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        if self.when_worn is not None and max(self.bytes_in, self.bytes_out) >= self._worn_bytes:
            self.when_worn()
            self.when_worn = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self._check_open()
        try:
            await self._stream.send(data)
        except RemoteError as error:
            raise self._lost(error) from error
        self._count(0, len(data))

    def send_nowait(self, data: memoryview) -> int:
        if self.closed or not self._stream.send_nowait(bytes(data)):
            return 0
        self._count(0, len(data))
        return len(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self._check_open()
        try:
            data = await self._stream.receive_some(max_bytes)
        except RemoteError as error:
            raise self._lost(error) from error
        self._count(len(data), 0)
        return data

    async def receive_view(self, useful_bytes: int = 1) -> memoryview:
        await trio.lowlevel.checkpoint()
        self._check_open()
        try:
            view = await self._stream.receive_view(_VIEW_BYTES)
        except RemoteError as error:
            raise self._lost(error) from error
        self._count(len(view), 0)
        return view

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            await self._stream.aclose()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError("the circuit is closed")

    def _lost(self, error: RemoteError) -> Exception:
        if self.closed:
            return trio.ClosedResourceError("the circuit is closed")
        return trio.BrokenResourceError(f"the circuit ended: {error.args[0]}")
