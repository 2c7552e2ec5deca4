"""What one yamux session has to send, and in which order.

Control frames go first. Then streams with little queued, so that a small call passes a bulk transfer, each in turn with
one frame; then those with much, in turn as well. Whoever sends little all the time cannot starve the others: after each
`_FAIR_BYTES` of small frames one large one goes, if one waits. A stream that is alone may go on without a copy.
Invariants: a stream stands in one ring at most, and in one exactly while it `wants_out`; credit is never exceeded.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from peerd.machine.yamux_stream import YamuxStream
from peerd.machine.yamux_wire import DATA, FIN, HEADER, WINDOW

_HEADER_BYTES: Final = HEADER.size
_CRUMB_BYTES: Final = 512  # no data frame smaller than this is cut from a large piece to fill up a batch
_SMALL_BYTES: Final = 16 * 1024  # no more than this queued: the stream goes before those with more
_FAIR_BYTES: Final = 64 * 1024  # of small frames, then a large one has its turn


class SendQueue:
    """Control frames, and the streams that have something to send."""

    __slots__ = ("_bulk", "_passed_bytes", "_small", "control", "drained", "finished", "spill")

    def __init__(self) -> None:
        self.control = bytearray()  # whole 12-byte frames
        self.spill: memoryview | None = None  # what the last frame of `fill` goes on with, where the writer has it
        self.drained: list[YamuxStream] = []  # reached their low water; the driver empties this list
        self.finished: list[YamuxStream] = []  # their FIN has gone out; the session empties this list
        self._small: deque[YamuxStream] = deque()
        self._bulk: deque[YamuxStream] = deque()
        self._passed_bytes = 0  # of small frames since a large one went, or none waited

    @property
    def has_output(self) -> bool:
        return bool(self.control or self._small or self._bulk)

    def add(self, stream: YamuxStream) -> None:
        """The stream has more to send, or more leave to."""
        if not stream.queued and stream.wants_out:
            stream.queued = True
            self._ring_of(stream).append(stream)

    def frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queue a control frame."""
        self.control += HEADER.pack(0, kind, flags, stream_id, length)

    def fill(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Write whole frames to `into` (65,519 bytes make one full Noise frame); returns the bytes written.

        With `spill_bytes`, a stream that is alone may go on with at most so many: they are not copied to `into`, but
        left in `spill`, a multiple of its size, and have to be sent right behind it.
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
            # Two headers: the frame that opens or acknowledges may go before the data.
            if room < 3 * _HEADER_BYTES or (room < _CRUMB_BYTES and stream.out_bytes > room):
                break
            ring.popleft()
            begin = at
            if not stream.was_reset:
                at = self._emit(stream, into, at, 0 if self._small or self._bulk else spill_bytes)
            self._passed_bytes = self._passed_bytes + at - begin if ring is self._small and self._bulk else 0
            if stream.wants_out:
                self._ring_of(stream).append(stream)
            else:
                stream.queued = False
        return at

    def _next_ring(self) -> deque[YamuxStream] | None:
        """The ring whose first stream has the next turn."""
        small = self._small
        while small and self._ring_of(small[0]) is not small:  # more was queued meanwhile
            self._bulk.append(small.popleft())
        if small and not (self._bulk and self._passed_bytes >= _FAIR_BYTES):
            return small
        return self._bulk or None

    def _ring_of(self, stream: YamuxStream) -> deque[YamuxStream]:
        # What opens or acknowledges a stream is small, whatever comes behind it.
        return self._small if stream.flags_due or stream.out_bytes <= _SMALL_BYTES else self._bulk

    def _emit(self, stream: YamuxStream, into: memoryview, at: int, spill_bytes: int) -> int:
        """One turn of one stream: its flags and one data frame."""
        flags, owed = stream.flags_due, stream.owed
        if owed or (flags and not stream.out_bytes and not stream.fin_due):
            HEADER.pack_into(into, at, 0, WINDOW, flags, stream.id, owed)
            at += _HEADER_BYTES
            flags = 0
        stream.flags_due = stream.owed = 0
        size = min(stream.out_bytes, stream.send_credit, len(into) - at - _HEADER_BYTES)
        # Never with data: js-libp2p, having ended its own direction, looks at the FIN first and drops the data.
        if stream.fin_due and not stream.fin_sent and not stream.out_bytes:
            flags |= FIN
        if not size and not flags:
            return at
        at += _HEADER_BYTES
        end = at + size
        self._copy_out(stream, into[at:end])
        if spill_bytes and end == len(into):
            size += self._spill(stream, end, spill_bytes)
        HEADER.pack_into(into, at - _HEADER_BYTES, 0, DATA, flags, stream.id, size)
        if stream.out_bytes <= stream.low_water:
            stream.low_water = -1
            self.drained.append(stream)
        if flags & FIN:
            stream.fin_sent = True
            self.finished.append(stream)
        return end

    def _spill(self, stream: YamuxStream, unit: int, spill_bytes: int) -> int:
        """Take whole units of the stream's first piece without copying them; returns the bytes."""
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
