"""Send queue of one yamux session: what it has to send, and in which order.

Control frames go first. Then streams with little queued, so that a small call passes a bulk transfer, each in turn with
one frame; then those with much, in turn as well. Whoever sends little all the time cannot starve the others: after each
`_FAIR_BYTES` of small frames one large one goes, if one waits. What opens a large stream is small, its first bytes too:
the other side resets a stream that does not name its protocol in time, and its turn among the large ones may be far.
While none is small, one may go on without a copy. Once the link has rails (see `striping`), they take what is large,
and the first connection is left to all the rest.
Invariants: a stream stands in one ring at most, and in one exactly while it `wants_out`; credit is never exceeded; of
streams that were reset few stay in the rings, so that a peer that opens and resets them while we cannot send gains
nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from peerd.core.limits import RINGED_RESETS
from peerd.machine.mux.frames import DATA, FIN, HEADER, RST, WINDOW
from peerd.machine.mux.stream import YamuxStream
from peerd.machine.mux.striping import PLACED, PLACED_HEADER

_HEADER_BYTES: Final = HEADER.size
_ROOM_BYTES: Final = HEADER.size + PLACED_HEADER.size + 4
_CRUMB_BYTES: Final = 512  # no data frame smaller than this is cut from a large piece to fill up a batch
_SMALL_BYTES: Final = 16 * 1024  # no more than this queued: the stream goes before those with more
_FAIR_BYTES: Final = 64 * 1024  # of small frames, then a large one has its turn
_NAME_BYTES: Final = 512  # the first of a large stream: whoever accepts it waits some seconds for its protocol's name


class SendQueue:
    """Control frames, and the streams that have something to send."""

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
        self.spill: memoryview | None = None  # what the last frame of `fill` goes on with, where the writer has it
        self.drained: list[YamuxStream] = []  # reached their low water; the driver empties this list
        self.finished: list[YamuxStream] = []  # their FIN has gone out; the session empties this list
        self._small: deque[YamuxStream] = deque()
        self._bulk: deque[YamuxStream] = deque()
        self.helping = False  # the first connection takes from what is left to the rails, too
        self._railed: deque[YamuxStream] = deque()  # large, and left to the rails; empty without any
        self._rails = 0
        self._gone = 0  # streams in the rings that were reset meanwhile
        self._passed_bytes = 0  # of small frames since a large one went, or none waited

    @property
    def has_output(self) -> bool:
        return bool(self.control or self._small or self._bulk or (self.helping and self._railed))

    @property
    def has_bulk(self) -> bool:
        """True when there is something to send on rails."""
        return bool(self._railed)

    def set_rails(self, count: int) -> None:
        """So many rails take bulk from now on."""
        self._rails = count
        waiting = [*self._bulk, *self._railed]
        self._bulk.clear()
        self._railed.clear()
        for stream in waiting:
            self._ring_of(stream).append(stream)

    def add(self, stream: YamuxStream) -> None:
        """The stream has more to send, or more leave to."""
        if not stream.queued and stream.wants_out:
            stream.queued = True
            self._ring_of(stream).append(stream)

    def forget(self, stream: YamuxStream) -> None:
        """The stream was reset: it leaves its ring now and then, be the writer stuck or not."""
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
        if stream.striped:  # what went before on rails still counts, as it would on one connection
            self.control += PLACED_HEADER.pack(0, PLACED, RST, stream.id, 0, stream.sent_bytes)
        else:
            self.frame(WINDOW, RST, stream.id, 0)

    def fill(self, into: memoryview, spill_bytes: int = 0) -> int:
        """Write whole frames to `into` (65,519 bytes make one full Noise frame); returns the bytes written.

        With `spill_bytes`, a stream may go on with at most so many while none is small: they are not copied to `into`,
        but left in `spill`, a multiple of its size, and have to be sent right behind it.
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
        """As `fill`, for a rail: one frame of a large stream, which from now on is striped."""
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
        while small and self._ring_of(small[0]) is not small:  # more was queued meanwhile
            self._ring_of(small[0]).append(small.popleft())
        if small and not (self._bulk and self._passed_bytes >= _FAIR_BYTES):
            return small
        return self._bulk or (self._railed if self.helping else None) or None

    def _ring_of(self, stream: YamuxStream) -> deque[YamuxStream]:
        # What opens, acknowledges or names a stream is small, whatever comes behind it.
        if stream.flags_due or stream.out_bytes <= _SMALL_BYTES or not stream.sent_bytes:
            return self._small
        # What overtook the frame that opens its stream would belong to none.
        return self._railed if self._rails and stream.acked else self._bulk

    def _emit(self, stream: YamuxStream, into: memoryview, at: int, spill_bytes: int) -> int:
        """One turn of one stream: its flags and one data frame."""
        flags, owed = stream.flags_due, stream.owed
        others = self._small or self._bulk or self._railed
        opens_bulk = flags and stream.out_bytes > _SMALL_BYTES and others
        if owed or opens_bulk or (flags and not stream.out_bytes and not stream.fin_due):
            HEADER.pack_into(into, at, 0, WINDOW, flags, stream.id, owed)
            at += _HEADER_BYTES
            flags = 0
        stream.flags_due = stream.owed = 0
        if opens_bulk:
            return at  # what comes behind it has its turn among the large ones
        head = PLACED_HEADER.size if stream.striped else _HEADER_BYTES
        size = min(stream.out_bytes, stream.send_credit, len(into) - at - head)
        if others and not stream.sent_bytes and stream.out_bytes > _SMALL_BYTES:
            size, spill_bytes = min(size, _NAME_BYTES), 0  # its next turn is among the large ones
        # Never with data: js-libp2p, having ended its own direction, looks at the FIN first and drops the data.
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
