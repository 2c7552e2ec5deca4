"""Writing the messages of one stream: whole, in order, and payloads while they are still being produced.

`Outbox` has one writer per stream, so that a cancelled task never leaves a partial message, and messages queued
together are sent together. A `GrowingPayload` is sent as far as it is final. The task that put it also feeds it, so
that an error of its producer reaches that task; messages behind it wait. A message that was begun cannot be withdrawn:
if the rest of a payload never comes, the stream is reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import trio

from peerd.codec.format.frame import ReadyBytes, TensorFrame
from peerd.core.errors import LocalError, PeerdError, RemoteError
from peerd.core.limits import RPC_FREE_STREAM_BYTES, RPC_OUTBOX_BYTES
from peerd.rpc.methods.message_codec import Buffer, encode_frames
from peerd.rpc.rpc_types import RpcStream
from peerd.wire.budget.tab import UsageTab

_JOIN_BYTES = 8 << 10  # messages up to this size are joined with their payloads
_AT_ONCE_BYTES = 60 << 10  # likewise if it can be sent at once, as streams copy it anyway and accept it whole
_BATCH_BYTES = 32 << 10  # buffers below this are joined before they are sent; larger ones are not copied
_PIECE_BYTES = 1 << 20  # largest piece of a growing payload


class GrowingPayload:
    """A payload that is still being produced: tracks how many of its bytes are final and how many are sent."""

    __slots__ = ("_final", "_ready", "_sent", "_view")

    def __init__(self, view: memoryview, ready: ReadyBytes) -> None:
        self._view = view
        self._ready = ready
        self._final = min(ready.ready_bytes, len(view))
        self._sent = 0

    def __len__(self) -> int:
        return len(self._view)

    @property
    def whole(self) -> bool:
        """True if all of it is final."""
        return self._final == len(self._view)

    @property
    def sent(self) -> bool:
        return self._sent == len(self._view)

    async def grow(self) -> None:
        """Wait until more is final. Raises the errors of its producer."""
        final = min(await self._ready.more(self._final), len(self._view))
        if final <= self._final:
            raise LocalError(f"a payload stays at {final} of {len(self._view)} bytes, although more was announced")
        self._final = final

    def take(self) -> memoryview:
        """The next bytes to send; empty while they are being produced."""
        begin = self._sent
        self._sent = min(self._final, begin + _PIECE_BYTES)
        return self._view[begin : self._sent]


Outgoing = Buffer | GrowingPayload


def _own_bytes(buffers: Iterable[Outgoing]) -> int:
    """Total size of the buffers that only the queue refers to; payloads belong to callers."""
    return sum(len(buffer) for buffer in buffers if isinstance(buffer, bytes))


def outgoing(frames: Sequence[TensorFrame]) -> tuple[bytes, list[Outgoing]]:
    """The frames' headers, joined, and their payloads, not copied. Raises LocalError if they are too many or too
    large.
    """
    headers, views = encode_frames(frames)
    payloads: list[Outgoing] = []
    for frame, view in zip(frames, views, strict=True):
        ready = frame.ready
        payloads.append(view if ready is None or ready.ready_bytes >= len(view) else GrowingPayload(view, ready))
    return headers, payloads


class Outbox:
    """Messages that wait to be written to one stream. Any task may put; only `run` writes.

    Callers keep it bounded: they wait for `room` (or `flushed`) before the next message. Queued bytes are accounted in
    `unread`, if given, except payloads, whose memory belongs to the callers that put them.
    """

    def __init__(self, unread: UsageTab | None = None) -> None:
        self._queue: deque[Outgoing] = deque()
        self._unread = unread
        self._put_bytes = 0
        self._sent_bytes = 0
        self._leaving: Buffer = b""  # the batch being sent
        self._own_bytes = 0  # upper bound of queued bytes in memory of our own
        self._stream: RpcStream | None = None
        self._writer: trio.lowlevel.Task | None = None  # set while the writer is idle
        self._lull: trio.CancelScope | None = None  # set while the next payload is still being produced
        self._feeds: list[trio.CancelScope] = []  # scopes of tasks in `feed`
        self._waiting = trio.lowlevel.ParkingLot()
        self._ending = False
        self._broken = False
        self.closed = False
        self.on_room: dict[int, Callable[[], None]] = {}  # by call; called by the writer's task when there is room
        self.failure: PeerdError | None = None  # a producer's error that cost us the stream

    def put(self, *buffers: Outgoing) -> str | None:
        """Queue one whole message. It is dropped if the stream is over, which the stream's reader notices.

        A caller whose payloads grow calls `feed` next. Returns None, or, if the other side has too much unread on all
        streams, the reason why nothing was queued.
        """
        if self.closed:
            return None
        most_bytes = _JOIN_BYTES if self._writer is None else _AT_ONCE_BYTES
        if len(buffers) > 1 and sum(map(len, buffers)) <= most_bytes:
            final = [buffer for buffer in buffers if not isinstance(buffer, GrowingPayload)]
            buffers = (b"".join(final),) if len(final) == len(buffers) else buffers
        if len(buffers) == 1 and self._writer is not None and self._send_now(buffers[0]):
            return None
        if self._unread is not None and (full := self._write_down(self._unread, buffers)) is not None:
            return full
        for buffer in buffers:
            if buffer:
                self._put_bytes += len(buffer)
                self._queue.append(buffer)
        self._wake()
        return None

    async def feed(self, buffers: Sequence[Outgoing]) -> None:
        """Wait until all payloads of a queued message are final; they are sent meanwhile.

        Returns at once after `close`. If the rest never comes, by an error or because the caller is cancelled, the
        stream is reset.
        """
        growing = [buffer for buffer in buffers if isinstance(buffer, GrowingPayload)]
        if not growing or self.closed:
            return
        whole = False
        with trio.CancelScope() as feeding:
            self._feeds.append(feeding)
            try:
                for payload in growing:
                    while not payload.whole:
                        await payload.grow()
                        self._wake()
                whole = True
            except PeerdError as error:
                self.failure = error
                raise
            finally:
                self._feeds.remove(feeding)
                if not whole:
                    self._break_off()

    def _break_off(self) -> None:
        """Reset the stream: a partly sent message will not be completed, so nothing can follow."""
        if not self.closed:
            self._broken = True
            self.close()
            if self._stream is not None:
                self._stream.reset()

    @property
    def sent_bytes(self) -> int:
        """Queued bytes that the stream has accepted."""
        return self._sent_bytes

    @property
    def left_bytes(self) -> int:
        """Approximate number of queued bytes that have left this peer."""
        under_way = len(self._leaving) - self._stream.unsent_bytes if self._leaving and self._stream is not None else 0
        return self._sent_bytes + max(0, under_way)

    @property
    def full(self) -> bool:
        """True if so much is queued that callers must wait for `room`."""
        return self._put_bytes - self._sent_bytes > RPC_OUTBOX_BYTES

    @property
    def pending(self) -> bool:
        """True while the stream has not accepted everything queued."""
        return self._sent_bytes < self._put_bytes

    async def room(self) -> bool:
        """Wait until little enough is queued; returns at once after `close`. Returns True if it had to wait."""
        waited = False
        while self.full and not self.closed:
            await self._waiting.park()
            waited = True
        return waited

    async def flushed(self) -> bool:
        """Wait until the stream has accepted everything queued so far. Otherwise as `room`."""
        goal, waited = self._put_bytes, False
        while self._sent_bytes < goal and not self.closed:
            await self._waiting.park()
            waited = True
        return waited

    async def ended(self) -> None:
        """Wait until the writer has stopped."""
        while not self.closed:
            await self._waiting.park()

    def end(self) -> None:
        """Write what is queued, then close our side of the stream."""
        self._ending = True
        self._wake()

    def close(self) -> None:
        """Stop writing and discard the queue."""
        self.closed = True
        self._queue.clear()
        if self._unread is not None:
            self._unread.hold(0)
        self._wake()
        for feeding in self._feeds:
            feeding.cancel()
        self._waiting.unpark_all()

    async def run(self, stream: RpcStream) -> None:
        """Write queued messages to `stream` until closed."""
        self._stream = stream
        if self._broken:
            stream.reset()
        try:
            while not self.closed:
                if batch := self._take():
                    self._leaving = batch
                    await stream.send(batch)
                    self._leaving = b""
                    self._sent_bytes += len(batch)
                    if self._unread is not None and self._unread.used:
                        self._write_down(self._unread)
                    if self._waiting:
                        self._waiting.unpark_all()
                    for then in [*self.on_room.values()] if self.on_room and not self.full else ():
                        then()
                elif self._queue:
                    await self._wait_for_more(stream)
                elif self._ending:
                    await stream.aclose()
                    return
                else:
                    await self._sleep()
        except RemoteError:
            pass  # the stream's reader gets it too and wakes the waiting tasks
        except trio.Cancelled:
            stream.reset()  # the service stops; spare the other side waiting for its deadlines
            raise
        finally:
            self.close()

    def _write_down(self, unread: UsageTab, more: Sequence[Outgoing] = ()) -> str | None:
        """Account the queued bytes plus `more` in `unread`, unless they are few. Returns None, or the reason why they
        exceed the limit.
        """
        own = self._own_bytes + (len(more[0]) if len(more) == 1 else _own_bytes(more))
        if unread.used or own > RPC_FREE_STREAM_BYTES:
            own = _own_bytes((self._leaving, *self._queue, *more))
            full = unread.hold(own if own > RPC_FREE_STREAM_BYTES else 0)
            if full is not None:
                return full
        self._own_bytes = own
        return None

    def _send_now(self, message: Outgoing) -> bool:
        """Send a message directly while the writer is idle; that saves half the latency of a small call."""
        return self._stream is not None and isinstance(message, bytes) and self._stream.send_nowait(message)

    def _take(self) -> Buffer:
        """The next large buffer, or small ones joined to a batch; empty if nothing can be sent yet."""
        if not self._queue:
            return b""
        first = self._queue[0]
        if isinstance(first, GrowingPayload):
            piece = first.take()
            if first.sent:
                self._queue.popleft()
            return piece
        self._queue.popleft()
        if not self._queue or len(first) >= _BATCH_BYTES:
            return first
        batch, size = [first], len(first)
        while self._queue and size + len(self._queue[0]) <= _BATCH_BYTES:
            following = self._queue[0]
            if isinstance(following, GrowingPayload):
                break
            size += len(following)
            batch.append(following)
            self._queue.popleft()
        return b"".join(batch)

    def _wake(self) -> None:
        if self._writer is not None:
            trio.lowlevel.reschedule(self._writer)
            self._writer = None
        if self._lull is not None:
            self._lull.cancel()

    async def _wait_for_more(self, stream: RpcStream) -> None:
        """Wait until the current payload has grown or the stream is over; perhaps no other task notices the latter."""
        with trio.CancelScope() as self._lull:
            await stream.wait_gone()
            self.close()
        self._lull = None

    async def _sleep(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._writer = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._writer = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)
