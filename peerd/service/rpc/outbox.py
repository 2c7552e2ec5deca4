"""Writing the messages of one stream: whole, in order, and payloads while they are still being made.

`Outbox` has one writer per stream, so that no cancelled task leaves half a message behind, and messages queued together
leave together. A `GrowingPayload` payload is sent as far as it is final; the task that put it feeds it, so that an
error of its maker reaches that task, and the messages behind it wait. What was begun cannot be taken back: when the
rest of a payload never comes, the stream is reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import trio

from peerd.core.errors import LocalError, PeerdError, RemoteError
from peerd.core.frame import ReadyBytes, TensorFrame
from peerd.core.limits import RPC_FREE_STREAM_BYTES, RPC_OUTBOX_BYTES
from peerd.machine.budget.tab import Tab
from peerd.machine.rpc.message_codec import Buffer, encode_frames
from peerd.service.rpc.types import RpcStream

_JOIN_BYTES = 8 << 10  # a message up to this size is copied together, payloads and all
_AT_ONCE_BYTES = 60 << 10  # up to this size, if it can leave at once: streams copy it anyway, and take it whole
_BATCH_BYTES = 32 << 10  # buffers below this are joined before they are sent; larger ones are not copied
_PIECE_BYTES = 1 << 20  # of a growing payload, handed to the stream at once


class GrowingPayload:
    """A payload of which so many bytes are final, and so many sent."""

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
        """True when all of it is final."""
        return self._final == len(self._view)

    @property
    def sent(self) -> bool:
        return self._sent == len(self._view)

    async def grow(self) -> None:
        """Wait until more is final; raises what its maker does."""
        final = min(await self._ready.more(self._final), len(self._view))
        if final <= self._final:
            raise LocalError(f"a payload stays at {final} of {len(self._view)} bytes, though more was said to be ready")
        self._final = final

    def take(self) -> memoryview:
        """The next bytes to send; empty while they are being made."""
        begin = self._sent
        self._sent = min(self._final, begin + _PIECE_BYTES)
        return self._view[begin : self._sent]


Outgoing = Buffer | GrowingPayload


def _own_bytes(buffers: Iterable[Outgoing]) -> int:
    """Bytes of these that lie in memory that nobody else has."""
    return sum(len(buffer) for buffer in buffers if isinstance(buffer, bytes))


def outgoing(frames: Sequence[TensorFrame]) -> tuple[bytes, list[Outgoing]]:
    """The frames' headers, joined, and their payloads, which are not copied. LocalError: too many, or too big."""
    headers, views = encode_frames(frames)
    payloads: list[Outgoing] = []
    for frame, view in zip(frames, views, strict=True):
        ready = frame.ready
        payloads.append(view if ready is None or ready.ready_bytes >= len(view) else GrowingPayload(view, ready))
    return headers, payloads


class Outbox:
    """Messages that wait to be written to one stream. Anyone puts, `run` alone writes.

    Bounded by its callers: they wait for `room` (or `flushed`) before the next message. What is queued is written down
    in `unread`, if there is such a tab, but for payloads: they lie in memory of the callers that put them.
    """

    def __init__(self, unread: Tab | None = None) -> None:
        self._queue: deque[Outgoing] = deque()
        self._unread = unread
        self._put_bytes = 0
        self._sent_bytes = 0
        self._leaving: Buffer = b""  # what the stream is taking
        self._own_bytes = 0  # queued in memory that nobody else has; more than there is, until somebody must know
        self._stream: RpcStream | None = None
        self._writer: trio.lowlevel.Task | None = None  # set while it has nothing to write
        self._lull: trio.CancelScope | None = None  # set while what it would write is still being made
        self._feeds: list[trio.CancelScope] = []  # of the tasks in `feed`
        self._waiting = trio.lowlevel.ParkingLot()
        self._ending = False
        self._broken = False
        self.closed = False
        self.on_room: dict[int, Callable[[], None]] = {}  # by call; the writer's task calls them whenever there is room
        self.failure: PeerdError | None = None  # of the maker of a payload, which cost us the stream

    def put(self, *buffers: Outgoing) -> str | None:
        """Send one whole message now or soon; dropped when the stream is over, which its reader will notice.

        A caller whose payloads grow calls `feed` next. When the other side has too much unread, here and elsewhere,
        nothing is put, and this says so.
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
        """Wait until all of a message that was put is final, and let it be sent meanwhile.

        Returns at once after `close`. When the rest never comes, by an error or because the caller is cancelled, the
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
        """Half of a message was promised and will not come: nothing else can follow."""
        if not self.closed:
            self._broken = True
            self.close()
            if self._stream is not None:
                self._stream.reset()

    @property
    def sent_bytes(self) -> int:
        """Bytes that the stream has taken of what was queued."""
        return self._sent_bytes

    @property
    def left_bytes(self) -> int:
        """Approximate number of queued bytes that have left this peer."""
        under_way = len(self._leaving) - self._stream.unsent_bytes if self._leaving and self._stream is not None else 0
        return self._sent_bytes + max(0, under_way)

    @property
    def full(self) -> bool:
        """True when so much is queued that whoever puts must wait for `room`."""
        return self._put_bytes - self._sent_bytes > RPC_OUTBOX_BYTES

    @property
    def pending(self) -> bool:
        """True while anything put was not yet taken by the stream."""
        return self._sent_bytes < self._put_bytes

    async def room(self) -> bool:
        """Wait until little enough is queued; returns at once after `close`. Whether it had to wait."""
        waited = False
        while self.full and not self.closed:
            await self._waiting.park()
            waited = True
        return waited

    async def flushed(self) -> bool:
        """Wait until everything put so far was taken by the stream; returns at once after `close`. As `room`."""
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
        """Write nothing more."""
        self.closed = True
        self._queue.clear()
        if self._unread is not None:
            self._unread.hold(0)
        self._wake()
        for feeding in self._feeds:
            feeding.cancel()
        self._waiting.unpark_all()

    async def run(self, stream: RpcStream) -> None:
        """The writer."""
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
            pass  # the reader of the same stream learns it too, and wakes the waiting tasks
        except trio.Cancelled:
            stream.reset()  # the service stops: the other side need not wait for its deadlines
            raise
        finally:
            self.close()

    def _write_down(self, unread: Tab, more: Sequence[Outgoing] = ()) -> str | None:
        """Bring the tab up to what is queued, and `more`. Little is counted with the stream, and costs nothing here."""
        own = self._own_bytes + (len(more[0]) if len(more) == 1 else _own_bytes(more))
        if unread.used or own > RPC_FREE_STREAM_BYTES:
            own = _own_bytes((self._leaving, *self._queue, *more))
            full = unread.hold(own if own > RPC_FREE_STREAM_BYTES else 0)
            if full is not None:
                return full
        self._own_bytes = own
        return None

    def _send_now(self, message: Outgoing) -> bool:
        """While the writer rests, a message need not wait for it: that is half the latency of a small call."""
        return self._stream is not None and isinstance(message, bytes) and self._stream.send_nowait(message)

    def _take(self) -> Buffer:
        """The next large buffer, or as many small ones as make up a batch; empty when nothing can be sent yet."""
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
        """Wait until the payload at hand has grown, or the stream is over: nobody else may be there to notice that."""
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
