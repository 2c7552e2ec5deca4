"""Yamux: many streams on one ordered link, with credit windows that grow with the path, resets and fair order.

Sans-IO: the driver passes plaintext to `receive`, gets whole frames to encrypt and send from `fill`, and calls `wake`
at `wake_at`. `send_queue` decides what to send first: a bulk transfer never starves a small call, and a slow reader
slows only its own writer. Received bytes wait in the stream's inbox; `consumed` grants new credit through
`receive_window`. Frames on further connections are handled in `striping`. Hostile input: more data than granted,
windows beyond 2^32, streams of the wrong parity or opened twice, floods of streams, pings or tiny frames, rapid resets.
Violations raise ProtocolViolation; a reset inbound stream counts as open until our handler has released it. Source:
https://github.com/hashicorp/yamux/blob/master/spec.md, libp2p specs `yamux/README.md`.
"""

from __future__ import annotations

from typing import Final

from peerd.core.errors import LocalError, ProtocolViolation, Unreachable
from peerd.core.limits import CONTROL_BYTES_PENDING, WINDOW_BYTES_LINK
from peerd.wire.buffers import BufferPool
from peerd.wire.yamux.frames import (
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
from peerd.wire.yamux.reassembly import Reassembly
from peerd.wire.yamux.receive_window import ReceiveWindow
from peerd.wire.yamux.rtt import RttPings
from peerd.wire.yamux.send_queue import SendQueue
from peerd.wire.yamux.silence import Silence
from peerd.wire.yamux.stream import INITIAL_WINDOW, WindowBudget, YamuxConfig, YamuxStream
from peerd.wire.yamux.striping import PLACE, PLACED, PLACED_HEADER, StripedLane, check_place, release

_HEADER_BYTES: Final = HEADER.size
_PLAIN_DATA: Final = (0, DATA, 0)
_WINDOW_WALL: Final = (1 << 32) - 1
_CALM_RTT_S: Final = 1.0  # pings for a window are as rare as on a path with this round trip
_LAST_ID: Final = (1 << 32) - 1


class YamuxSession:
    """One session from one side's view. The link's initiator opens odd streams, the other side even ones."""

    def __init__(
        self,
        *,
        initiator: bool,
        now: float,
        config: YamuxConfig | None = None,
        budget: WindowBudget | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        """`pool`: source of the buffers of received views; they return to it as the inboxes are read."""
        self.config = config or YamuxConfig()
        self.budget = budget or WindowBudget(WINDOW_BYTES_LINK)
        self.pool = pool or BufferPool(0, 0)
        self.pinned = False  # the last `receive` left its buffer in an inbox
        self.streams: dict[int, YamuxStream] = {}
        self.rtt_s: float | None = None  # smoothed
        self.rtt_min_s: float | None = None  # the least sample: that of the idle path
        self.inbound = self.outbound = self.unacked = self.early = 0  # streams; early: ours, before the peer was ready
        self.ready = True  # the driver clears it for a peer of another implementation, until that uses a stream itself
        self.peer_gone = self.leaving = False
        self._queue = SendQueue()
        self._credit = ReceiveWindow(self.config, self.budget, self._queue)
        self.drained = self._queue.drained  # streams that reached their low water; the driver empties this
        self._next_id = 1 if initiator else 2
        self._lane = StripedLane(main=True)
        self.place, self.row = self._lane.place, self._lane.row
        self.takes_placed = False  # the peer may stripe its streams
        self.pings = RttPings()
        self._ping_due = now
        self.silence = Silence(self.config, now)
        self._linger_at = float("inf")

    # --- for the driver ------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        return self._queue.has_output

    @property
    def heard_at(self) -> float:
        """When the last bytes of the peer arrived."""
        return self.silence.heard_at

    @property
    def can_open(self) -> bool:
        """True if `open` is possible now; if not, it may be after the next `receive` or the end of a stream."""
        config = self.config
        if not self.ready and self.early >= config.streams_early:
            return False
        return self.outbound < config.streams_outbound and self.unacked < config.ack_backlog

    @property
    def exhausted(self) -> bool:
        """True if no more streams can ever be opened on this link."""
        return self.peer_gone or self.leaving or self._next_id > _LAST_ID

    def open(self, now: float) -> YamuxStream:
        """Open a new stream; the peer is informed by the next `fill`."""
        if self.exhausted or not self.can_open:
            raise LocalError("a stream was opened on a link that cannot take one")
        stream = YamuxStream(self._next_id, inbound=False, now=now, pool=self.pool)
        self._next_id += 2
        self.outbound += 1
        self.unacked += 1
        self.early += not self.ready
        self.streams[stream.id] = stream
        self._credit.presume(stream)
        stream.flags_due = SYN
        self._queue.add(stream)
        return stream

    def write(self, stream: YamuxStream, data: bytes | memoryview) -> None:
        """Queue `data`, which must not change until it is sent."""
        if stream.was_reset:
            raise Unreachable("the stream was reset")
        if stream.fin_due:
            raise LocalError("a stream was written to after its end")
        stream.out.append(data)
        stream.out_bytes += len(data)
        self._queue.add(stream)

    def close_write(self, stream: YamuxStream) -> None:
        """Send FIN after the queued data."""
        if not stream.fin_due and not stream.was_reset:
            stream.fin_due = True
            self._queue.add(stream)

    def abandon(self, stream: YamuxStream) -> None:
        """Finish our side of this stream: send FIN and drop what arrives. Its slot is freed once it is closed."""
        self.close_write(stream)
        stream.abandoned = True
        stream.forget()
        self._linger_at = min(self._linger_at, 0.0)  # check it at the next wake
        self._settle(stream)

    def reset(self, stream: YamuxStream) -> None:
        """Send RST: both directions end now, and queued data is dropped."""
        stream.abandoned = True
        if not stream.closed:
            if not stream.flags_due & SYN:
                self._queue.mark_reset(stream)
            elif self.early:  # the peer does not know the stream: no RST is needed
                self.early -= 1
            self._end(stream)
        stream.forget()
        self._settle(stream)

    def consumed(self, stream: YamuxStream, now: float) -> None:
        """Record that bytes were read from the inbox, and grant credit if due."""
        if stream.fin_received or stream.was_reset:
            self._settle(stream)
        elif stream.held is not None:
            self._flow(stream, stream.held, 0, now)
        elif self._credit.consumed(stream, now, self.pings.latest_s(self.rtt_s)):
            self._measure(now, _CALM_RTT_S)

    def go_away(self, code: int = GONE_NORMAL) -> None:
        """Inform the peer that we leave: neither side opens more streams."""
        if not self.leaving:
            self.leaving = True
            self._frame(GO_AWAY, 0, 0, code)

    def wake_at(self) -> float:
        """Time at which `wake` is next needed."""
        return min(self._ping_due, self.silence.ends_at, self._linger_at)

    def wake(self, now: float) -> list[Event]:
        """Send pings, report a silent peer as Dead, and reset streams that the peer does not close."""
        if now >= self.silence.ends_at:
            return [Dead(self.silence.lasts_s(now))]
        if now >= self._ping_due:
            self._ping_due = now + self.config.keepalive_s
            self._ping(now)
        if now >= self._linger_at:
            self._sweep(now)
        return []

    def doubt(self, now: float, *, patient: bool = False) -> float:
        """Ping a peer that has been silent for a while; returns the seconds since its last bytes.

        So a caller whose request timed out need not wait for `dead_after_s`. `patient`: see `Silence.doubt`.
        """
        if self.silence.doubt(now, self.rtt_s, patient=patient):
            self._ping(now)
        return self.silence.lasts_s(now)

    def _ping(self, now: float) -> None:
        if self.pings.idle:
            self._frame(PING, SYN, 0, self.pings.send(now))

    # --- sending -------------------------------------------------------------------------------------------

    def fill(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Write whole frames to `into`, like `SendQueue.fill`; returns the bytes written."""
        return self._filled(self._queue.fill(into, spill_bytes))

    def fill_rail(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Like `fill`, for a rail."""
        return self._filled(self._queue.fill_rail(into, spill_bytes))

    def _filled(self, size: int) -> int:
        if self._queue.finished:
            for stream in self._queue.finished:
                self._settle(stream)
            self._queue.finished.clear()
        return size

    @property
    def has_bulk(self) -> bool:
        """True if there is data to send on rails."""
        return self._queue.has_bulk

    @property
    def waiting_bytes(self) -> int:
        """Bytes that all streams still have to send."""
        return sum(stream.out_bytes for stream in self.streams.values())

    def set_rails(self, count: int, *, helping: bool) -> None:
        """Set the number of rails that call `fill_rail`; `helping`: `fill` also sends bulk data."""
        self._queue.helping = helping
        self._queue.set_rails(count)

    @property
    def spill(self) -> memoryview | None:
        """The rest of the last frame of `fill`, in the writer's own memory, or None."""
        return self._queue.spill

    def _frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        self._queue.frame(kind, flags, stream_id, length)

    # --- receiving -----------------------------------------------------------------------------------------

    def receive(
        self, data: bytes | memoryview, now: float, lane: StripedLane | None = None, events: list[Event] | None = None
    ) -> list[Event]:
        """Process plaintext in pieces of any size, from rail `lane` or (None) from the first connection.

        The caller may reuse `data` afterwards unless `pinned` is set. Events are appended to `events`, including those
        before a violation. A stream in an event may have been reset since, even one that has just opened.
        """
        events = [] if events is None else events
        self.pinned = False
        self.silence.ended(now)
        lane = lane or self._lane
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            if lane.left:
                size = min(lane.left, end - at)
                self._take_body(lane, view[at : at + size], end, events)
                stream = lane.stream
                if stream is not None and stream.held is not None and not (stream.abandoned or stream.fin_received):
                    self._flow(stream, stream.held, size, now)
                at += size
                continue
            if lane.head or end - at < _HEADER_BYTES:
                at += self._take_head(lane, view[at:], now, events)
                continue
            header = HEADER.unpack_from(view, at)
            if header[1] == PLACED and self.takes_placed:
                at += self._take_head(lane, view[at:], now, events)
                continue
            at += _HEADER_BYTES
            if header[:3] == _PLAIN_DATA and lane.main and (stream := self.streams.get(header[3])) is not None:
                self._begin_body(lane, stream, 0, header[4])  # nearly every frame of a bulk transfer
            else:
                self._take_frame(lane, header, now, events)
        if len(self._queue.control) > CONTROL_BYTES_PENDING:
            raise ProtocolViolation(f"flood of control frames: {len(self._queue.control):,} bytes of replies unread")
        return events

    def _take_head(self, lane: StripedLane, view: memoryview, now: float, events: list[Event]) -> int:
        """Extend an incomplete header and process it once it is complete; returns the bytes used."""
        head, at = lane.head, 0
        for whole in (_HEADER_BYTES, PLACED_HEADER.size):
            size = min(whole - len(head), len(view) - at) if len(head) < whole else 0
            head += view[at : at + size]
            at += size
            if len(head) < whole:
                return at
            if head[1] != PLACED or not self.takes_placed:
                break
        header = HEADER.unpack_from(head)
        if len(head) > _HEADER_BYTES:
            place = PLACE.unpack_from(head, _HEADER_BYTES)[0]
            head.clear()
            self._take_placed(lane, header, place, events)
        else:
            head.clear()
            self._take_frame(lane, header, now, events)
        return at

    def _take_body(self, lane: StripedLane, piece: memoryview, buffer_bytes: int, events: list[Event]) -> None:
        size, at = len(piece), lane.at
        lane.left -= size
        if at >= 0:
            lane.at = at + size
        stream = lane.stream
        if stream is None or stream.was_reset:
            return
        stream.credit -= size
        if stream.credit < 0:  # each lane alone may be within the window
            raise ProtocolViolation(f"stream {stream.id} sends more than its window")
        if stream.abandoned:
            stream.received_bytes += size
            if stream.fin_sent:  # nobody will read this data
                self.reset(stream)
                return
        elif at < 0 or at == stream.received_bytes:
            stream.received_bytes += size
            if stream.put(piece, buffer_bytes):
                self.pinned = True
            events.append(Changed(stream))
        elif stream.held is not None and stream.held.put(at, piece, buffer_bytes, stream.target):
            self.pinned = True
        if stream.held is not None:
            self._go_on(stream, stream.held, events)
        if not lane.left and lane.fin:
            self._take_fin(stream, events)

    def _flow(self, stream: YamuxStream, held: Reassembly, size: int, now: float) -> None:
        """Process the arrival (`size` bytes) or the reading (0) of a striped stream's bytes."""
        self._credit.flow(stream, held, size, now, self.rtt_min_s, self.pings.queue_s(now, self.rtt_min_s))
        if size:
            self._measure(now, self.rtt_min_s or 0.0)

    def _measure(self, now: float, rtt_s: float) -> None:
        """Send a ping if one is due on a path with this round trip."""
        if self.pings.due(now, rtt_s):
            self._frame(PING, SYN, 0, self.pings.send(now))

    def _take_placed(
        self, lane: StripedLane, header: tuple[int, int, int, int, int], at: int, events: list[Event]
    ) -> None:
        """Process a frame that contains its offset in its stream."""
        version, _, flags, stream_id, length = header
        if version or flags & ~(FIN | RST) or (flags and length):
            raise ProtocolViolation(f"a striped frame of version {version} with flags {flags} and {length} bytes")
        stream = self.streams.get(stream_id)
        lane.left, lane.stream, lane.fin, lane.at = length, stream, False, at
        if stream is None:
            return
        held = stream.held = stream.held or Reassembly(self.silence.heard_at)
        if stream.fin_received and length:
            raise ProtocolViolation(f"data after the end of stream {stream.id}")
        check_place(stream, held, at, length)
        if flags & FIN:
            held.fin_at = at
        if flags & RST:
            held.reset_at = at
        self._go_on(stream, held, events)

    def _go_on(self, stream: YamuxStream, held: Reassembly, events: list[Event]) -> None:
        """After bytes, an end or a reset of a striped stream arrived, process everything that is now in order."""
        if held.bytes:
            before = stream.received_bytes
            release(stream, held, self.pool)
            if stream.received_bytes > before:
                events.append(Changed(stream))
        if 0 <= held.fin_at <= stream.received_bytes:
            self._take_fin(stream, events)
        if 0 <= held.reset_at <= stream.received_bytes and not stream.was_reset:
            self._take_reset(stream, events)

    def _take_frame(
        self, lane: StripedLane, header: tuple[int, int, int, int, int], now: float, events: list[Event]
    ) -> None:
        version, kind, flags, stream_id, length = header
        if version or kind > GO_AWAY or not (lane.main or kind == GO_AWAY):
            raise ProtocolViolation(f"a yamux frame of version {version}, type {kind}")
        if not lane.main:
            lane.ended = True
            return
        if kind == PING:
            self._take_ping(flags, length, now, events)
            return
        if kind == GO_AWAY:
            self.peer_gone = True
            events.append(GoneAway(length))
            return
        stream = self._find(stream_id, flags, now, events)
        if kind == DATA:
            self._begin_body(lane, stream, flags, length)
        elif stream is not None:
            self._take_credit(stream, length)
        if stream is None:
            return
        if flags & ACK and not stream.acked:
            stream.acked = True
            self.unacked -= 1
        if flags & RST:
            self._take_reset(stream, events)
        elif flags & FIN and not lane.left:
            self._take_fin(stream, events)

    def _find(self, stream_id: int, flags: int, now: float, events: list[Event]) -> YamuxStream | None:
        """The stream of a frame, or None if it is refused or the frame was in flight when the stream ended."""
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
        self.ready = True
        stream = YamuxStream(stream_id, inbound=True, now=now, pool=self.pool)
        self.inbound += 1
        self.streams[stream_id] = stream
        self._credit.presume(stream)
        stream.flags_due = ACK
        self._queue.add(stream)
        events.append(Opened(stream))
        return stream

    def _begin_body(self, lane: StripedLane, stream: YamuxStream | None, flags: int, length: int) -> None:
        if stream is not None:
            self.ready = True
            if stream.fin_received and length:
                raise ProtocolViolation(f"data after the end of stream {stream.id}")
            if length > stream.credit:
                raise ProtocolViolation(f"stream {stream.id} sends {length} bytes into a window of {stream.credit}")
        lane.left, lane.stream, lane.fin, lane.at = length, stream, bool(flags & FIN), -1

    def _take_credit(self, stream: YamuxStream, length: int) -> None:
        stream.send_credit += length
        if stream.send_credit > _WINDOW_WALL:
            raise ProtocolViolation(f"the window of stream {stream.id} exceeds 2^32")
        self._queue.add(stream)

    def _take_ping(self, flags: int, value: int, now: float, events: list[Event]) -> None:
        if flags & SYN:
            self._frame(PING, ACK, 0, value)
        elif flags & ACK and (sample := self.pings.answered(value, now)) is not None:
            self.rtt_min_s = min(sample, self.rtt_min_s or sample)
            self.rtt_s = sample if self.rtt_s is None else 0.75 * self.rtt_s + 0.25 * sample
            events.append(Pong(sample))

    def _take_fin(self, stream: YamuxStream, events: list[Event]) -> None:
        if not stream.fin_received:
            stream.fin_received = True
            events.append(Changed(stream))
            self._settle(stream)

    def _take_reset(self, stream: YamuxStream, events: list[Event]) -> None:
        """End a stream that the peer reset. Earlier data stays in the inbox; the driver decides if it still counts."""
        self._end(stream)
        self._settle(stream)
        events.append(Changed(stream))

    # --- ends of streams -----------------------------------------------------------------------------------

    def _end(self, stream: YamuxStream) -> None:
        if not stream.was_reset:
            stream.was_reset = True
            self._queue.forget(stream)
        stream.out.clear()
        stream.out_bytes = stream.flags_due = 0

    def _settle(self, stream: YamuxStream) -> None:
        """Forget a closed stream; an inbound one keeps its slot until our side has released it."""
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
