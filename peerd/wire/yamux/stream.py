"""State of one yamux stream, the settings of a session, and the budget that pays for large windows.

Plain state, changed by `wire.yamux.session`, which contains the protocol. Invariants: `credit` is what the peer may
still send and never negative; inbox plus credit never exceed `target`; the pieces of an inbox occupy less than twice
their own size in memory, and a buffer belongs to at most one piece.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from peerd.core import limits
from peerd.wire.buffers import BufferPool
from peerd.wire.yamux.reassembly import MERGE_BYTES, Piece, Reassembly

INITIAL_WINDOW: Final = limits.WINDOW_BYTES_INITIAL


@dataclass(frozen=True, slots=True, kw_only=True)
class YamuxConfig:
    """Bounds and times of one session."""

    streams_inbound: int = limits.STREAMS_INBOUND
    streams_outbound: int = limits.STREAMS_OUTBOUND
    ack_backlog: int = limits.STREAM_ACK_BACKLOG  # streams opened by us that the peer has not acknowledged
    streams_early: int = limits.STREAMS_EARLY  # opened by us before a peer of another implementation has used any
    window_bytes_max: int = limits.WINDOW_BYTES_MAX  # of one stream
    keepalive_s: float = 10.0  # between pings
    dead_after_s: float = 30.0  # silence after which the peer counts as dead
    doubt_s: float = 5.0  # time for a suspected peer to answer if no round trip was measured yet
    linger_s: float = 30.0  # time after which a stream that we closed and the peer did not is reset


class WindowBudget:
    """Budget for window bytes beyond the initial windows; a session's budget is a part of its host's (`parent`)."""

    __slots__ = ("limit_bytes", "parent", "used_bytes")

    def __init__(self, limit_bytes: int, parent: WindowBudget | None = None) -> None:
        self.limit_bytes, self.parent, self.used_bytes = limit_bytes, parent, 0

    def take(self, count: int) -> bool:
        """Reserve `count` bytes and return True, or reserve nothing and return False."""
        if self.used_bytes + count > self.limit_bytes or (self.parent is not None and not self.parent.take(count)):
            return False
        self.used_bytes += count
        return True

    def give(self, count: int) -> None:
        self.used_bytes -= count
        if self.parent is not None:
            self.parent.give(count)

    def close(self) -> None:
        """End the session's use: return everything to the parent's budget and draw nothing more from it."""
        if self.parent is not None:
            self.parent.give(self.used_bytes)
            self.parent = None


class YamuxStream:
    """Both directions of one stream. Drivers read the fields; only the session writes them."""

    __slots__ = (
        "abandoned",
        "acked",
        "counted",
        "credit",
        "fin_due",
        "fin_received",
        "fin_sent",
        "flags_due",
        "granted_at",
        "held",
        "id",
        "inbound",
        "inbox",
        "inbox_bytes",
        "landed_bytes",
        "landing",
        "lent",
        "linger_until",
        "low_water",
        "out",
        "out_bytes",
        "owed",
        "owner",
        "passed_bytes",
        "placed",
        "pool",
        "queued",
        "received_bytes",
        "send_credit",
        "sent_bytes",
        "striped",
        "target",
        "was_reset",
        "window_bytes_max",
    )

    def __init__(self, stream_id: int, *, inbound: bool, now: float, pool: BufferPool) -> None:
        self.id, self.inbound, self.pool = stream_id, inbound, pool
        self.owner: object = None  # for the driver's use
        # Outgoing.
        self.out: deque[bytes | memoryview] = deque()
        self.out_bytes = 0
        self.send_credit = INITIAL_WINDOW
        self.sent_bytes = 0
        self.striped = False  # frames contain their offset (see `striping`)
        self.flags_due = 0  # SYN or ACK, for the next frame
        self.fin_due = self.fin_sent = False
        self.queued = False  # in a ring of the send queue
        self.low_water = -1  # report this stream once at most this many bytes wait; -1: no report
        # Incoming.
        self.inbox: deque[Piece] = deque()
        self.inbox_bytes = 0
        self.landing: memoryview | None = None  # unfilled rest of a reader's buffer; only while the inbox is empty
        self.landed_bytes = 0  # bytes written there; the driver resets it
        self.placed = False  # the next piece is in `landing` already
        self.lent: tuple[memoryview, bool] | None = None  # from `lend`: the view, and whether it ends its buffer
        self.credit = self.target = INITIAL_WINDOW
        self.window_bytes_max = limits.WINDOW_BYTES_MAX  # limit of the target; the driver may set it
        self.owed = 0  # part of the credit that no frame has announced yet
        self.granted_at = now  # start of the current measurement of the window's use
        self.passed_bytes = 0  # bytes of the window used since then
        self.received_bytes = 0  # in order
        self.held: Reassembly | None = None  # data that arrived out of order
        self.fin_received = False
        # Life.
        self.acked = inbound
        self.was_reset = False  # by either side; no more data moves
        self.abandoned = False  # our side will not read again
        self.counted = True  # counts as an open stream
        self.linger_until = 0.0

    @property
    def closed(self) -> bool:
        """True if nothing more can arrive or leave."""
        return self.was_reset or (self.fin_sent and self.fin_received)

    @property
    def wants_out(self) -> bool:
        if self.was_reset:
            return False
        if self.flags_due:
            return True
        if self.out_bytes:
            return self.send_credit > 0
        return self.fin_due and not self.fin_sent

    def retract(self, data: bytes | memoryview) -> bool:
        """Remove `data` from the queue; returns False if a part of it was already sent."""
        for at, piece in enumerate(self.out):
            if piece is data:
                del self.out[at]
                self.out_bytes -= len(data)
                return True
        return False

    def own(self) -> None:
        """Copy the queued data, so that the writers may change their memory from now on."""
        for at, piece in enumerate(self.out):
            if isinstance(piece, memoryview):
                self.out[at] = bytes(piece)

    def place(self, size: int) -> memoryview | None:
        """Buffer of a reader for the next `size` bytes, or None; write them there before passing them to `put`."""
        into = self.landing
        if into is None or len(into) < size or self.abandoned or self.was_reset:
            return None
        self.placed = True
        return into[:size]

    def put(self, piece: memoryview, buffer_bytes: int) -> bool:
        """Add received bytes, a slice of a buffer of `buffer_bytes`; returns True if that must not be reused yet."""
        if self.landing is not None:
            placed, piece = self.placed, self._land(self.landing, piece)
            if not piece:
                return placed
        size = len(piece)
        self.inbox_bytes += size
        if size * 2 > buffer_bytes and size > MERGE_BYTES:
            self.inbox.append(piece)
            return True
        last = self.inbox[-1] if self.inbox else None
        if isinstance(last, bytearray) and len(last) + size <= MERGE_BYTES:
            last += piece
        else:
            self.inbox.append(bytearray(piece))
        return False

    def accept(self, piece: Piece, pool: BufferPool) -> None:
        """Add a received piece whose memory already belongs to the stream."""
        if self.landing is not None:
            self.placed = False
            rest = self._land(self.landing, memoryview(piece))
            if not rest:
                if isinstance(piece, memoryview):
                    pool.give(piece.obj)
                return
            piece = rest
        self.inbox_bytes += len(piece)
        last = self.inbox[-1] if self.inbox else None
        if isinstance(last, bytearray) and len(last) + len(piece) <= MERGE_BYTES:
            last += piece
            if isinstance(piece, memoryview):
                pool.give(piece.obj)
        else:
            self.inbox.append(piece)

    def _land(self, into: memoryview, piece: memoryview) -> memoryview:
        """Copy bytes into the waiting reader's buffer; returns the surplus."""
        size = min(len(into), len(piece))
        if not self.placed:
            into[:size] = piece[:size]
        self.placed = False
        self.landing = into[size:] if size < len(into) else None
        self.landed_bytes += size
        return piece[size:]

    def take(self, max_bytes: int) -> bytes:
        """Remove up to `max_bytes` from the inbox; the caller must then call the session's `consumed`."""
        inbox = self.inbox
        parts: list[Piece] = []
        left = max_bytes
        while inbox and left:
            piece = inbox[0]
            if len(piece) <= left:
                parts.append(inbox.popleft())
                left -= len(piece)
            else:
                view = memoryview(piece)
                inbox[0] = view[left:]
                parts.append(bytes(view[:left]))
                left = 0
        self.inbox_bytes -= max_bytes - left
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        for part in parts:
            if isinstance(part, memoryview):
                self.pool.give(part.obj)
        return data

    def lend(self, max_bytes: int) -> memoryview:
        """Like `take`, but of one piece and without a copy: the view is valid until the next `lend` or `end_loan`."""
        self.end_loan()
        piece = memoryview(self.inbox.popleft())
        if len(piece) > max_bytes:
            self.inbox.appendleft(piece[max_bytes:])
        view = piece[:max_bytes].toreadonly()
        self.lent = view, len(view) == len(piece)
        self.inbox_bytes -= len(view)
        return view

    def forget(self) -> None:
        """Drop the received data, because nobody will read it."""
        self.inbox.clear()
        self.inbox_bytes = 0
        if self.held is not None:
            self.received_bytes += self.held.drop()

    def end_loan(self) -> None:
        """Invalidate the lent view; access to it then raises ValueError instead of showing other data."""
        if self.lent is not None:
            (view, ended), self.lent = self.lent, None
            buffer = view.obj
            view.release()
            if ended:
                self.pool.give(buffer)

    def take_into(self, into: memoryview) -> int:
        """Move bytes from the inbox to `into`; returns their number."""
        inbox = self.inbox
        at = 0
        while inbox and at < len(into):
            piece = inbox[0]
            size = min(len(piece), len(into) - at)
            view = memoryview(piece)
            into[at : at + size] = view[:size]
            at += size
            if size < len(piece):
                inbox[0] = view[size:]
            else:
                inbox.popleft()
                self.pool.give(view.obj)
        self.inbox_bytes -= at
        return at

    def give_back(self, piece: bytes) -> None:
        """Put bytes back at the front of the inbox."""
        if piece:
            self.inbox.appendleft(piece)
            self.inbox_bytes += len(piece)
