"""Network lines and pipes of the simulated network: access lines that serve pipes in turn, and one-way ordered pipes.

A pipe accepts segments from its writer while fewer than `window_bytes` are in flight or unread (back-pressure). It
sends each through the source's uplink, the path's own line, if it has a rate, and the target's downlink, and delivers
them to its reader in order. Each line forwards bits as they arrive, so only the slowest line's time counts. A loss is a
delay, as in TCP: a lost packet is retransmitted after the timeout, and everything behind it waits. Segments that cannot
pass (partition, dead or stalled node) are held and retried. Not modelled: congestion control, headers,
acknowledgements (the writer knows at once when the window has room).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from tests.worlds.simulation.clock import SimAgenda

TURN_S: Final = 0.01  # of one pipe on an access line: short, so that pipes share smoothly,
TURN_BYTES_MIN: Final = 4 << 10  # but not so short
TURN_BYTES_MAX: Final = 128 << 10  # that the simulation has an event for every packet
PACKET_BYTES: Final = 1448  # TCP payload of one Ethernet packet; the unit of loss
MOMENT_S: Final = 0.0005  # segments that take less time on a line have no event for their start
RETRANSMIT_MIN_S: Final = 0.2  # Linux' minimum of the retransmission timeout
RETRANSMIT_MAX_S: Final = 120.0  # its maximum (RFC 6298 allows 60 s or more)


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes in flight in a pipe; `last` marks the end of the stream."""

    pipe: SimPipe[Any]
    data: bytes
    last: bool = False
    complete_s: float = -math.inf  # when its last bit arrives at the path's own line

    def joined(self, after: Segment) -> Segment:
        return Segment(self.pipe, self.data + after.data, after.last, after.complete_s)


@dataclass(slots=True, eq=False)
class SimulatedLine:
    """One direction of a network line: sends one segment at a time, from each waiting pipe in turn.

    Calls `begun(segment, start_s, end_s)` when a segment starts, and `done(segment)` at its end.
    """

    agenda: SimAgenda
    begun: Callable[[Segment, float, float], None] | None = None
    done: Callable[[Segment], None] | None = None
    bytes_per_s: float = math.inf
    busy_s: float = 0.0  # seconds spent sending so far
    _free_at_s: float = -math.inf
    _wakes: bool = False  # a call of `_next` is scheduled for when the line is free
    _waiting: dict[SimPipe[Any], deque[Segment]] = field(default_factory=dict)

    def offer(self, segment: Segment, *, came_s: float = 0.0) -> None:
        """Queue the segment behind the others of its pipe.

        `came_s`: the time for which its bits have been arriving, during which an idle line has forwarded them.
        """
        if not self._waiting and self._free_at_s <= trio.current_time():
            self._start(segment, came_s)
            return
        self._waiting.setdefault(segment.pipe, deque()).append(segment)
        self._wake()

    def _wake(self) -> None:
        if not self._wakes:
            self._wakes = True
            self.agenda.at(self._free_at_s, self._next)

    def _next(self) -> None:
        self._wakes = False
        while self._waiting and self._free_at_s <= trio.current_time():
            pipe = next(iter(self._waiting))
            queue = self._waiting.pop(pipe)
            segment = queue.popleft()
            while queue and len(segment.data) + len(queue[0].data) <= TURN_BYTES_MIN:
                segment = segment.joined(queue.popleft())  # small waiting segments are sent together
            if queue:
                self._waiting[pipe] = queue  # at the end, behind the other pipes
            self._start(segment, 0.0)
        if self._waiting:
            self._wake()

    def _start(self, segment: Segment, came_s: float) -> None:
        now = trio.current_time()
        took_s = len(segment.data) / self.bytes_per_s
        start_s = max(now - min(came_s, took_s), self._free_at_s)
        end_s = max(now, start_s + took_s - 1e-12) if came_s else start_s + took_s  # rounding must not cost an event
        self.busy_s += took_s
        self._free_at_s = end_s
        if self.begun is not None:
            self.begun(segment, start_s, end_s)
        done = self.done
        if done is not None:
            self.agenda.at(end_s, lambda: done(segment))


class Endpoint(Protocol):
    """A machine at one end of a pipe."""

    uplink: SimulatedLine
    downlink: SimulatedLine
    sent_bytes: int
    received_bytes: int


N = TypeVar("N", bound=Endpoint)
M = TypeVar("M", bound=Endpoint, contravariant=True)


class Medium(Protocol[M]):
    """The network between two machines; `simnet.SimNet` is one."""

    agenda: SimAgenda

    @property
    def window_bytes(self) -> int:
        """Window of a pipe: the most bytes in flight or unread."""
        ...

    def bottleneck(self, source: M, target: M) -> SimulatedLine | None:
        """The line that all bytes from `source` to `target` share, or None if the path has no rate of its own."""
        ...

    def delay(self, source: M, target: M, size: int) -> float: ...

    def latency(self, source: M, target: M) -> float: ...

    def passes(self, source: M, target: M) -> bool: ...

    def hold(self, pipe: SimPipe[Any]) -> None: ...

    def damage(self, source: M, data: bytes) -> bytes: ...

    def note_delivery(self, source: M, target: M, data: bytes) -> None: ...


class SimPipe(Generic[N]):
    """One direction of a connection, from a writer on `source` to a reader on `target`."""

    def __init__(self, net: Medium[N], source: N, target: N) -> None:
        self.net = net
        self.source = source
        self.target = target
        self.unread_bytes = 0  # accepted from the writer and not yet read
        self.ended = False  # the last segment has arrived; there may still be unread bytes
        self.writer_error: str | None = None
        self.reader_error: str | None = None  # bytes that have arrived stay readable
        self.reader_gone = False
        self.writer_gone = False  # its machine is dead, so nothing more is sent
        self.on_refused: Callable[[], None] = lambda: None  # called if bytes arrive and the reader is gone
        self.on_given_up: Callable[[], None] = lambda: None  # called if retransmission took too long
        self.floor_s = trio.current_time()  # earliest arrival of the next segment, to keep the order
        self._arrived: deque[bytes] = deque()
        self._held: deque[Segment] = deque()
        self.held_since_s = 0.0
        self._reader = trio.lowlevel.ParkingLot()
        self._writer = trio.lowlevel.ParkingLot()

    # --- the writer's side ---

    def room(self) -> int:
        """Number of bytes that the writer may send now, as one segment."""
        slower = min(self.source.uplink.bytes_per_s, self.target.downlink.bytes_per_s)
        between = self.net.bottleneck(self.source, self.target)
        if between is not None:
            slower = min(slower, between.bytes_per_s)
        turn_bytes = int(min(max(TURN_S * slower, TURN_BYTES_MIN), TURN_BYTES_MAX))
        return max(0, min(turn_bytes, self.net.window_bytes - self.unread_bytes))

    async def wait_room(self) -> None:
        await self._writer.park()

    def accept(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes of the writer, at most `room()`."""
        self.unread_bytes += len(data)
        self.source.sent_bytes += len(data)
        self.source.uplink.offer(Segment(self, data, last))

    def fail_writer(self, why: str) -> None:
        self.writer_error = self.writer_error or why
        self._writer.unpark_all()

    # --- the reader's side ---

    def readable(self) -> bool:
        return bool(self._arrived) or self.ended or self.reader_error is not None

    async def wait_readable(self) -> None:
        await self._reader.park()

    def take(self, max_bytes: int) -> bytes:
        """Take bytes that have arrived, at most `max_bytes`; returns b"" if there are none."""
        parts: list[bytes] = []
        left = max_bytes
        while self._arrived and left > 0:
            part = self._arrived.popleft()
            if len(part) > left:
                self._arrived.appendleft(part[left:])
                part = part[:left]
            parts.append(part)
            left -= len(part)
        taken = max_bytes - left
        if taken:
            self.unread_bytes -= taken
            self._writer.unpark_all()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fail_reader(self, why: str) -> None:
        self.reader_error = self.reader_error or why
        self._reader.unpark_all()

    # --- in flight ---

    def leave(self, segment: Segment, start_s: float, end_s: float) -> None:
        """Schedule the segment's transit of the path; the uplink transmits it from `start_s` to `end_s`."""
        between = self.net.bottleneck(self.source, self.target)
        if between is None:
            self.cross(segment, start_s, end_s)
            return
        segment.complete_s = end_s
        self.net.agenda.at(start_s, lambda: between.offer(segment))

    def cross(self, segment: Segment, start_s: float, end_s: float) -> None:
        """Schedule the segment's arrival at the downlink; the line before transmits it from `start_s` to `end_s`."""
        end_s = max(end_s, segment.complete_s)
        size = len(segment.data)
        first_s = max(start_s + self.net.delay(self.source, self.target, size), self.floor_s)
        self.floor_s = last_s = first_s + (end_s - start_s)  # arrival of the first and the last bit
        # The downlink forwards bits as they arrive; if it is faster than they arrive, it is busy only for its own time.
        # Segments that take less than MOMENT_S on it are handled when they are complete, in one event instead of two.
        down_s = size / self.target.downlink.bytes_per_s
        came_s = min(down_s, last_s - first_s) if down_s < MOMENT_S else 0.0
        reach_s = last_s if came_s else max(first_s, last_s - down_s)
        self.net.agenda.at(reach_s, lambda: self._reach(segment, came_s))

    def _reach(self, segment: Segment, came_s: float) -> None:
        if self.writer_gone:
            return
        if self._held or not self.net.passes(self.source, self.target):
            if not self._held:
                self.held_since_s = trio.current_time()
                self.net.hold(self)
            self._held.append(segment)
        else:
            self.target.downlink.offer(segment, came_s=came_s)

    def deliver(self, segment: Segment) -> None:
        """Deliver a segment to the reader, when it has passed the downlink."""
        if self.reader_gone:
            self.on_refused()
            return
        if self.reader_error is not None:
            return
        data = self.net.damage(self.source, segment.data)
        self.target.received_bytes += len(data)
        self.net.note_delivery(self.source, self.target, data)
        if data:
            self._arrived.append(data)
        self.ended = self.ended or segment.last
        self._reader.unpark_all()

    # --- held segments ---

    def retry_at(self) -> float:
        """Time of the next retransmission of held segments, with exponential back-off since the first one was held."""
        now = trio.current_time()
        wait_s = max(RETRANSMIT_MIN_S, 2 * self.net.latency(self.source, self.target))
        at_s = self.held_since_s + wait_s
        while at_s < now:
            wait_s = min(2 * wait_s, RETRANSMIT_MAX_S)
            at_s += wait_s
        return at_s

    def release(self) -> None:
        """Send the held segments, in order."""
        held, self._held = self._held, deque()
        for segment in held:
            self.target.downlink.offer(segment)

    def forget(self) -> None:
        """Drop the held segments."""
        self._held.clear()
