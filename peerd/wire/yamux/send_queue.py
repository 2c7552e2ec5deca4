"""Send queue of one yamux session: what to send next.

Control frames go first. Then come streams with little queued data, so that a small call overtakes a bulk transfer; they
take turns of one frame. Then come streams with much queued data, in turns as well. Small frames cannot starve the
others: after `_FAIR_BYTES` of small frames a waiting large stream gets one turn. The frame that opens a large stream
and its first bytes count as small, because the other side resets a stream that does not name its protocol in time, and
its turn among the large ones may come late. While no small stream waits, a large one may send without a copy. Once the
link has rails (see `striping`), they carry the large streams, and the first connection everything else. Invariants: a
stream is in at most one ring, and is in one exactly while it `wants_out`; credit is never exceeded; few reset streams
remain in the rings, so that a peer gains nothing by opening and resetting streams while we cannot send.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from peerd.core.limits import RINGED_RESETS
from peerd.wire.yamux.frames import DATA, FIN, HEADER, RST, WINDOW
from peerd.wire.yamux.stream import YamuxStream
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER

_HEADER_BYTES: Final = HEADER.size
_ROOM_BYTES: Final = HEADER.size + PLACED_HEADER.size + 4
_CRUMB_BYTES: Final = 512  # least data frame that is cut from a large piece to fill up a batch
_SMALL_BYTES: Final = 16 * 1024  # a stream with at most this much queued is small
_FAIR_BYTES: Final = 64 * 1024  # small frames that may be sent before a waiting large stream gets a turn
_NAME_BYTES: Final = 512  # first data frame of a large stream: the acceptor waits only seconds for the protocol's name


class SendQueue:
    """Control frames, and the streams that have data to send."""

    __slots__ = (
        "_bulk",
        "_gone",
        "_passed_bytes",
        "_railed",
        "_rails",
        "_small",
        "control",
        "drained",
        "finished",
        "helping",
        "spill",
    )

    def __init__(self) -> None:
        self.control = bytearray()  # whole frames
        self.spill: memoryview | None = None  # the rest of the last frame of `fill`, in the writer's own memory
        self.drained: list[YamuxStream] = []  # streams that reached their low water; the driver empties this list
        self.finished: list[YamuxStream] = []  # streams whose FIN was sent; the session empties this list
        self._small: deque[YamuxStream] = deque()
        self._bulk: deque[YamuxStream] = deque()
        self.helping = False  # the first connection also sends streams of the rails
        self._railed: deque[YamuxStream] = deque()  # large streams for the rails; empty without rails
        self._rails = 0
        self._gone = 0  # reset streams that are still in the rings
        self._passed_bytes = 0  # small frames sent while a large stream waits, since its last turn

    @property
    def has_output(self) -> bool:
        return bool(self.control or self._small or self._bulk or (self.helping and self._railed))

    @property
    def has_bulk(self) -> bool:
        """True if there is data to send on rails."""
        return bool(self._railed)

    def set_rails(self, count: int) -> None:
        """Set the number of rails that carry bulk data from now on."""
        self._rails = count
        waiting = [*self._bulk, *self._railed]
        self._bulk.clear()
        self._railed.clear()
        for stream in waiting:
            self._ring_of(stream).append(stream)

    def add(self, stream: YamuxStream) -> None:
        """Queue the stream if it has data and credit to send."""
        if not stream.queued and stream.wants_out:
            stream.queued = True
            self._ring_of(stream).append(stream)

    def forget(self, stream: YamuxStream) -> None:
        """Count a reset stream; its ring is cleaned up from time to time, even if the writer is stuck."""
        if stream.queued:
            self._gone += 1
            if self._gone > RINGED_RESETS:
                self._sweep()

    def _sweep(self) -> None:
        self._gone = 0
        for ring in (self._small, self._bulk, self._railed):
            waiting = [stream for stream in ring if not stream.was_reset]
            ring.clear()
            ring.extend(waiting)

    def frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queue a control frame."""
        self.control += HEADER.pack(0, kind, flags, stream_id, length)

    def mark_reset(self, stream: YamuxStream) -> None:
        """Queue the reset of a stream that the peer knows."""
        if stream.striped:  # data sent before on rails still counts, as it would on one connection
            self.control += PLACED_HEADER.pack(0, PLACED, RST, stream.id, 0, stream.sent_bytes)
        else:
            self.frame(WINDOW, RST, stream.id, 0)

    def fill(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Write whole frames to `into` (65,519 bytes make one full Noise frame); returns the bytes written.

        With `spill_bytes` and no small stream waiting, a large stream may add up to that many bytes to its frame
        without a copy: they are left in `spill`, a multiple of the bytes written, and must be sent directly after
        `into`.
        """
        at = 0
        self.spill = None
        control = self.control
        if control:
            at = min(len(control), len(into) // _HEADER_BYTES * _HEADER_BYTES)
            into[:at] = control[:at]
            del control[:at]
        while (ring := self._next_ring()) is not None:
            stream = ring[0]
            room = len(into) - at
            # Two headers: a frame that opens or acknowledges the stream may precede the data.
            if room < _ROOM_BYTES or (room < _CRUMB_BYTES and stream.out_bytes > room):
                break
            ring.popleft()
            begin = at
            if not stream.was_reset:
                at = self._emit(stream, into, at, 0 if self._small else spill_bytes)
            self._passed_bytes = self._passed_bytes + at - begin if ring is self._small and self._bulk else 0
            if stream.wants_out:
                self._ring_of(stream).append(stream)
            else:
                stream.queued = False
        return at

    def fill_rail(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Like `fill`, for a rail: one frame of a large stream, which is striped from now on."""
        self.spill = None
        while self._railed:
            stream = self._railed.popleft()
            size = 0
            if not stream.was_reset and self._ring_of(stream) is self._railed:
                stream.striped = True
                size = self._emit(stream, into, 0, 0 if self._railed else spill_bytes)
            if stream.wants_out:
                self._ring_of(stream).append(stream)
            else:
                stream.queued = False
            if size:
                return size
        return 0

    def _next_ring(self) -> deque[YamuxStream] | None:
        """The ring whose first stream has the next turn."""
        small = self._small
        while small and self._ring_of(small[0]) is not small:  # it has become large
            self._ring_of(small[0]).append(small.popleft())
        if small and not (self._bulk and self._passed_bytes >= _FAIR_BYTES):
            return small
        return self._bulk or (self._railed if self.helping else None) or None

    def _ring_of(self, stream: YamuxStream) -> deque[YamuxStream]:
        # The frame that opens, acknowledges or names a stream is small, even if much data follows.
        if stream.flags_due or stream.out_bytes <= _SMALL_BYTES or not stream.sent_bytes:
            return self._small
        # Before the acknowledgement, data on a rail could overtake the frame that opens the stream.
        return self._railed if self._rails and stream.acked else self._bulk

    def _emit(self, stream: YamuxStream, into: memoryview, at: int, spill_bytes: int) -> int:
        """Write one turn of a stream: its flags and one data frame. Returns the new offset in `into`."""
        flags, owed = stream.flags_due, stream.owed
        others = self._small or self._bulk or self._railed
        opens_bulk = flags and stream.out_bytes > _SMALL_BYTES and others
        if owed or opens_bulk or (flags and not stream.out_bytes and not stream.fin_due):
            HEADER.pack_into(into, at, 0, WINDOW, flags, stream.id, owed)
            at += _HEADER_BYTES
            flags = 0
        stream.flags_due = stream.owed = 0
        if opens_bulk:
            return at  # its data is sent in its turn among the large ones
        head = PLACED_HEADER.size if stream.striped else _HEADER_BYTES
        size = min(stream.out_bytes, stream.send_credit, len(into) - at - head)
        if others and not stream.sent_bytes and stream.out_bytes > _SMALL_BYTES:
            size, spill_bytes = min(size, _NAME_BYTES), 0  # its next turn is among the large ones
        # No FIN together with data: js-libp2p drops the data if it has closed its own direction.
        if stream.fin_due and not stream.fin_sent and not stream.out_bytes:
            flags |= FIN
        if not size and not flags:
            return at
        place = stream.sent_bytes
        end = at + head + size
        self._copy_out(stream, into[at + head : end])
        if spill_bytes and end == len(into):
            size += self._spill(stream, end, spill_bytes)
        if stream.striped:
            PLACED_HEADER.pack_into(into, at, 0, PLACED, flags, stream.id, size, place)
        else:
            HEADER.pack_into(into, at, 0, DATA, flags, stream.id, size)
        if stream.out_bytes <= stream.low_water:
            stream.low_water = -1
            self.drained.append(stream)
        if flags & FIN:
            stream.fin_sent = True
            self.finished.append(stream)
        return end

    def _spill(self, stream: YamuxStream, unit: int, spill_bytes: int) -> int:
        """Take whole units of the stream's first piece without a copy; returns the bytes taken."""
        out = stream.out
        if not out:
            return 0
        size = min(len(out[0]), stream.send_credit, spill_bytes) // unit * unit
        if size:
            view = memoryview(out[0])
            self.spill = view[:size]
            if size == len(view):
                out.popleft()
            else:
                out[0] = view[size:]
            stream.out_bytes -= size
            stream.send_credit -= size
            stream.sent_bytes += size
        return size

    def _copy_out(self, stream: YamuxStream, into: memoryview) -> None:
        out = stream.out
        at, size = 0, len(into)
        while at < size:
            piece = out[0]
            left = size - at
            if len(piece) <= left:
                into[at : at + len(piece)] = piece
                out.popleft()
                at += len(piece)
            else:
                view = memoryview(piece)
                into[at:size] = view[:left]
                out[0] = view[left:]
                at = size
        stream.out_bytes -= size
        stream.send_credit -= size
        stream.sent_bytes += size
