"""Yamux: many streams on one ordered link, with credit windows that grow with the path, resets and fair order.

Sans-IO and pulled: the driver feeds plaintext with `receive`, asks `fill` for whole frames to seal and send, and calls
`wake` at `wake_at`. What is sent first is `yamux_sending`'s to say: a bulk transfer never starves a small call, and a
slow reader slows only its own writer. Received bytes lie in the stream's
inbox; `consumed` returns credit in steps of half a window, and doubles a window that is used up within a round trip
and a half, as long as the budget lasts.

Hostile input: more data than granted, windows beyond 2^32, streams of the wrong parity or opened twice, floods of
streams, pings or tiny frames, rapid resets. Violations raise ProtocolViolation; a reset inbound stream keeps its place
among the open ones until our handler has let go of it.
Source: https://github.com/hashicorp/yamux/blob/master/spec.md, libp2p specs `yamux/README.md`.
"""

from __future__ import annotations

from typing import Final

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import CONTROL_BYTES_PENDING, WINDOW_BYTES_LINK
from peerd.machine.buffers import BufferPool
from peerd.machine.yamux_sending import SendQueue
from peerd.machine.yamux_stream import INITIAL_WINDOW, WindowBudget, YamuxConfig, YamuxStream
from peerd.machine.yamux_wire import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    GONE_NORMAL,
    HEADER,
    PING,
    RST,
    SYN,
    WINDOW,
    Changed,
    Dead,
    Event,
    GoneAway,
    Opened,
    Pong,
)

_HEADER_BYTES: Final = HEADER.size
_PLAIN_DATA: Final = (0, DATA, 0)
_TUNE_RTT_FLOOR_S: Final = 0.002  # below it scheduling, not the path, limits the rate
_WINDOW_WALL: Final = (1 << 32) - 1
_LAST_ID: Final = (1 << 32) - 1


class Yamux:
    """One session, seen from one side. The link's initiator opens odd streams, the other side even ones."""

    def __init__(
        self,
        *,
        initiator: bool,
        now: float,
        config: YamuxConfig | None = None,
        budget: WindowBudget | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        """`pool`: where the buffers of received views come from; they return to it as the inboxes are read."""
        self.config = config or YamuxConfig()
        self.budget = budget or WindowBudget(WINDOW_BYTES_LINK)
        self.pool = pool or BufferPool(0, 0)
        self.pinned = False  # the last `receive` left its buffer in an inbox
        self.streams: dict[int, YamuxStream] = {}
        self.rtt_s: float | None = None  # smoothed
        self.inbound = self.outbound = self.unacked = 0  # streams
        self.peer_gone = self.leaving = False
        self._queue = SendQueue()
        self.drained = self._queue.drained  # streams that reached their low water in `fill`; the driver empties this
        self._next_id = 1 if initiator else 2
        self._head = bytearray()  # of a frame whose header is incomplete
        self._body_left = 0  # payload bytes of the current data frame still to come
        self._body_stream: YamuxStream | None = None  # None: the payload is thrown away
        self._body_fin = False
        self._ping_id = 0
        self._ping_at: float | None = None  # when the ping in flight was sent
        self._ping_due = now
        self._heard_at = now
        self._usual_target = INITIAL_WINDOW  # what windows on this link grow to
        self._linger_at = float("inf")

    # --- what the driver asks for --------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        return self._queue.has_output

    @property
    def can_open(self) -> bool:
        """Whether `open` is possible now; if not, it may be after the next `receive` or a stream's end."""
        config = self.config
        return self.outbound < config.streams_outbound and self.unacked < config.ack_backlog

    @property
    def exhausted(self) -> bool:
        """No more streams can be opened on this link, ever."""
        return self.peer_gone or self.leaving or self._next_id > _LAST_ID

    def open(self, now: float) -> YamuxStream:
        """A new stream of ours; the peer hears of it with the next `fill`."""
        if self.exhausted or not self.can_open:
            raise LocalError("a stream was opened on a link that cannot take one")
        stream = YamuxStream(self._next_id, inbound=False, now=now, pool=self.pool)
        self._next_id += 2
        self.outbound += 1
        self.unacked += 1
        self.streams[stream.id] = stream
        self._presume(stream)
        stream.flags_due = SYN
        self._queue.add(stream)
        return stream

    def write(self, stream: YamuxStream, data: bytes | memoryview) -> None:
        """Queue `data`, which must not change until it is sent."""
        if stream.fin_due or stream.was_reset:
            raise LocalError("a stream was written to after its end")
        stream.out.append(data)
        stream.out_bytes += len(data)
        self._queue.add(stream)

    def retract(self, stream: YamuxStream, data: bytes | memoryview) -> bool:
        """Take `data` back out of the queue; False when a part of it is already sent."""
        for at, piece in enumerate(stream.out):
            if piece is data:
                del stream.out[at]
                stream.out_bytes -= len(data)
                return True
        return False

    def own(self, stream: YamuxStream) -> None:
        """Copy what is still queued: from now on the writers' memory may change."""
        out = stream.out
        for at, piece in enumerate(out):
            if isinstance(piece, memoryview):
                out[at] = bytes(piece)

    def close_write(self, stream: YamuxStream) -> None:
        """FIN after what is queued."""
        if not stream.fin_due and not stream.was_reset:
            stream.fin_due = True
            self._queue.add(stream)

    def abandon(self, stream: YamuxStream) -> None:
        """Our side is done with this stream: FIN, nothing will be read; its place is freed once it is closed."""
        self.close_write(stream)
        stream.abandoned = True
        stream.inbox.clear()
        stream.inbox_bytes = 0
        self._linger_at = min(self._linger_at, 0.0)  # look at it at the next wake
        self._settle(stream)

    def reset(self, stream: YamuxStream) -> None:
        """RST: both directions end now, what is queued is dropped."""
        stream.abandoned = True
        if not stream.closed:
            # A stream that the peer never heard of needs no goodbye.
            if not stream.flags_due & SYN:
                self._frame(WINDOW, RST, stream.id, 0)
            self._end(stream)
        stream.inbox.clear()
        stream.inbox_bytes = 0
        self._settle(stream)

    def consumed(self, stream: YamuxStream, now: float) -> None:
        """Bytes were taken from the inbox: give the peer credit when half a window is free."""
        if stream.fin_received or stream.was_reset:
            self._settle(stream)
            return
        free = stream.target - stream.credit - stream.inbox_bytes
        if free * 2 < stream.target:
            return
        grant = free + self._grow(stream, now)
        stream.credit += grant
        stream.granted_at = now
        flags, owed = stream.flags_due, stream.owed
        stream.flags_due = stream.owed = 0
        self._frame(WINDOW, flags, stream.id, grant + owed)

    def go_away(self, code: int = GONE_NORMAL) -> None:
        """Tell the peer that we leave: it opens no more streams, and neither do we."""
        if not self.leaving:
            self.leaving = True
            self._frame(GO_AWAY, 0, 0, code)

    def wake_at(self) -> float:
        """When `wake` is next needed."""
        return min(self._ping_due, self._heard_at + self.config.dead_after_s, self._linger_at)

    def wake(self, now: float) -> list[Event]:
        """Pings, the verdict on a silent peer, and resets of streams that the peer does not close."""
        if now >= self._heard_at + self.config.dead_after_s:  # summed as in `wake_at`: a rounding apart spins for ever
            return [Dead(now - self._heard_at)]
        if now >= self._ping_due:
            self._ping_due = now + self.config.keepalive_s
            if self._ping_at is None:
                self._ping_at = now
                self._ping_id = (self._ping_id + 1) & _WINDOW_WALL
                self._frame(PING, SYN, 0, self._ping_id)
        if now >= self._linger_at:
            self._sweep(now)
        return []

    # --- sending -------------------------------------------------------------------------------------------

    def fill(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Write whole frames to `into`, as `SendQueue.fill` does; returns the bytes written."""
        size = self._queue.fill(into, spill_bytes)
        if self._queue.finished:
            for stream in self._queue.finished:
                self._settle(stream)
            self._queue.finished.clear()
        return size

    @property
    def spill(self) -> memoryview | None:
        """What the last frame of `fill` goes on with, where the writer has it."""
        return self._queue.spill

    def _frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        self._queue.frame(kind, flags, stream_id, length)

    # --- receiving -----------------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, now: float) -> list[Event]:
        """Take plaintext in pieces of any size. `data` may be reused afterwards, unless `pinned` says otherwise."""
        events: list[Event] = []
        self.pinned = False
        self._heard_at = now
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            if self._body_left:
                size = min(self._body_left, end - at)
                self._take_body(view[at : at + size], end, events)
                at += size
                continue
            if self._head or end - at < _HEADER_BYTES:
                size = min(_HEADER_BYTES - len(self._head), end - at)
                self._head += view[at : at + size]
                at += size
                if len(self._head) < _HEADER_BYTES:
                    break
                header = HEADER.unpack(self._head)
                self._head.clear()
            else:
                header = HEADER.unpack_from(view, at)
                at += _HEADER_BYTES
            if header[:3] == _PLAIN_DATA and (stream := self.streams.get(header[3])) is not None:
                self._begin_body(stream, 0, header[4])  # nearly every frame of a bulk transfer
            else:
                self._take_frame(header, now, events)
        if len(self._queue.control) > CONTROL_BYTES_PENDING:
            raise ProtocolViolation("the peer asks for more answers than it reads")
        return events

    def place(self, size: int) -> memoryview | None:
        """Where a reader waits for the next `size` bytes of plaintext; None: nobody does. `receive` takes that view."""
        stream = self._body_stream
        return stream.place(size) if stream is not None and size <= self._body_left else None

    def _take_body(self, piece: memoryview, buffer_bytes: int, events: list[Event]) -> None:
        self._body_left -= len(piece)
        stream = self._body_stream
        if stream is None or stream.was_reset:
            return
        stream.credit -= len(piece)
        if not stream.abandoned:
            if stream.put(piece, buffer_bytes):
                self.pinned = True
            events.append(Changed(stream))
        elif stream.fin_sent:  # the peer sends what nobody will read
            self.reset(stream)
            return
        if not self._body_left and self._body_fin:
            self._take_fin(stream, events)

    def _take_frame(self, header: tuple[int, int, int, int, int], now: float, events: list[Event]) -> None:
        version, kind, flags, stream_id, length = header
        if version or kind > GO_AWAY:
            raise ProtocolViolation(f"a yamux frame of version {version}, type {kind}")
        if kind == PING:
            self._take_ping(flags, length, now, events)
            return
        if kind == GO_AWAY:
            self.peer_gone = True
            events.append(GoneAway(length))
            return
        stream = self._find(stream_id, flags, now, events)
        if kind == DATA:
            self._begin_body(stream, flags, length)
        elif stream is not None:
            self._take_credit(stream, length)
        if stream is None:
            return
        if flags & ACK and not stream.acked:
            stream.acked = True
            self.unacked -= 1
        if flags & RST:
            self._take_reset(stream, events)
        elif flags & FIN and not self._body_left:
            self._take_fin(stream, events)

    def _find(self, stream_id: int, flags: int, now: float, events: list[Event]) -> YamuxStream | None:
        """The stream a frame belongs to; None when it is refused, or gone and the frame was under way."""
        if not flags & SYN:
            if stream_id == 0:
                raise ProtocolViolation("a frame for stream 0")
            return self.streams.get(stream_id)
        ours = stream_id % 2 == self._next_id % 2
        if stream_id == 0 or ours or stream_id in self.streams:
            raise ProtocolViolation(f"stream {stream_id} cannot be opened by the peer")
        if self.leaving or self.inbound >= self.config.streams_inbound:
            self._frame(WINDOW, RST, stream_id, 0)
            return None
        stream = YamuxStream(stream_id, inbound=True, now=now, pool=self.pool)
        self.inbound += 1
        self.streams[stream_id] = stream
        self._presume(stream)
        stream.flags_due = ACK
        self._queue.add(stream)
        events.append(Opened(stream))
        return stream

    def _begin_body(self, stream: YamuxStream | None, flags: int, length: int) -> None:
        if stream is not None:
            if stream.fin_received and length:
                raise ProtocolViolation(f"data after the end of stream {stream.id}")
            if length > stream.credit:
                raise ProtocolViolation(f"stream {stream.id} sends {length} bytes into a window of {stream.credit}")
        self._body_left, self._body_stream, self._body_fin = length, stream, bool(flags & FIN)

    def _take_credit(self, stream: YamuxStream, length: int) -> None:
        stream.send_credit += length
        if stream.send_credit > _WINDOW_WALL:
            raise ProtocolViolation(f"the window of stream {stream.id} exceeds 2^32")
        self._queue.add(stream)

    def _take_ping(self, flags: int, value: int, now: float, events: list[Event]) -> None:
        if flags & SYN:
            self._frame(PING, ACK, 0, value)
        elif flags & ACK and self._ping_at is not None and value == self._ping_id:
            sample = now - self._ping_at
            self._ping_at = None
            self.rtt_s = sample if self.rtt_s is None else 0.75 * self.rtt_s + 0.25 * sample
            events.append(Pong(sample))

    def _take_fin(self, stream: YamuxStream, events: list[Event]) -> None:
        if not stream.fin_received:
            stream.fin_received = True
            events.append(Changed(stream))
            self._settle(stream)

    def _take_reset(self, stream: YamuxStream, events: list[Event]) -> None:
        """What came before stays in the inbox: whether it still counts is the driver's to say."""
        self._end(stream)
        self._settle(stream)
        events.append(Changed(stream))

    # --- the life of a stream ------------------------------------------------------------------------------

    def _end(self, stream: YamuxStream) -> None:
        stream.was_reset = True
        stream.out.clear()
        stream.out_bytes = stream.flags_due = 0

    def _settle(self, stream: YamuxStream) -> None:
        """Forget a closed stream; an inbound one fills its place until our side has let go of it."""
        if not stream.closed:
            return
        if self.streams.pop(stream.id, None) is not None:
            self.budget.give(stream.target - INITIAL_WINDOW)
            if not stream.acked:
                stream.acked = True
                self.unacked -= 1
        if stream.counted and (stream.abandoned or not stream.inbound):
            stream.counted = False
            if stream.inbound:
                self.inbound -= 1
            else:
                self.outbound -= 1

    def _sweep(self, now: float) -> None:
        self._linger_at = float("inf")
        for stream in [s for s in self.streams.values() if s.abandoned]:
            if not stream.linger_until:
                stream.linger_until = now + self.config.linger_s
            if now >= stream.linger_until:
                self.reset(stream)
            else:
                self._linger_at = min(self._linger_at, stream.linger_until)

    # --- windows -------------------------------------------------------------------------------------------

    def _presume(self, stream: YamuxStream) -> None:
        """Start a new stream with the window that others on this link have needed, as far as that is cheap."""
        extra = min(self._usual_target - INITIAL_WINDOW, (self.budget.limit_bytes - self.budget.used_bytes) // 4)
        if extra > 0 and self.budget.take(extra):
            stream.target += extra
            stream.credit += extra
            stream.owed = extra

    def _grow(self, stream: YamuxStream, now: float) -> int:
        """Double the window when half of it went by within a round trip and a half; returns the bytes added."""
        if self.rtt_s is None or now - stream.granted_at > 1.5 * max(self.rtt_s, _TUNE_RTT_FLOOR_S):
            return 0
        more = min(stream.target, self.config.window_bytes_max - stream.target)
        if more <= 0 or not self.budget.take(more):
            return 0
        stream.target += more
        self._usual_target = max(self._usual_target, stream.target)
        return more
