"""Streams whose data is sent on several connections at once: frames with offsets, and putting them in order.

A link may have further connections, called rails (`wire.link.rails`). A stream with much data to send is striped: from
then on its data frames contain their byte offset in the stream, and are sent on any rail with room; resets and ends
contain their offset as well. Each connection is parsed separately, and only streams that use it wait for it: a lost
packet of bulk data delays no small call.

Invariants: out-of-order bytes count as received against the stream's window, so the window bounds them and their
overhead; pieces neither overlap nor exceed the window. Hostile input: overlapping, far-off or very many tiny pieces,
offsets already read, end marks before the data, other frames on a rail: all raise ProtocolViolation. Wire: a yamux
header of 12 bytes with type PLACED, then the offset (u64, big-endian) and `length` bytes of data. Flags: FIN, RST, or
none.
"""

from __future__ import annotations

import struct
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.wire.buffers import BufferPool
from peerd.wire.yamux.reassembly import NOWHERE, Reassembly
from peerd.wire.yamux.stream import YamuxStream

PROTOCOL: Final = "/peerd/rail/1"  # negotiated instead of a muxer on a further connection
PLACED: Final = 4  # frame type, after yamux's own
PLACE: Final = struct.Struct(">Q")
PLACED_HEADER: Final = struct.Struct(">BBHIIQ")
BINDING_BYTES: Final = 32


class StripedLane:
    """Parser state of one connection's incoming frames."""

    __slots__ = ("at", "ended", "fin", "head", "left", "main", "stream")

    def __init__(self, *, main: bool) -> None:
        self.main = main  # the link's first connection, which may carry all frames
        self.ended = False  # the peer sends nothing more on this connection
        self.head = bytearray()  # an incomplete frame header
        self.left = 0  # payload bytes of the current data frame still to arrive
        self.at = NOWHERE  # offset of the next payload byte in its stream; NOWHERE: in order
        self.stream: YamuxStream | None = None  # None: the payload is dropped
        self.fin = False

    def place(self, size: int) -> memoryview | None:
        """Buffer of a reader for the next `size` bytes of plaintext, or None if no reader waits for them."""
        stream = self.stream
        if stream is None or size > self.left or self.at not in (NOWHERE, stream.received_bytes):
            return None
        return stream.place(size)

    def row(self) -> int:
        """Number of plaintext bytes that `place` has room for, all payload of one frame."""
        stream = self.stream
        if stream is None or stream.landing is None or self.at not in (NOWHERE, stream.received_bytes):
            return 0
        return min(self.left, len(stream.landing))


def check_place(stream: YamuxStream, held: Reassembly, at: int, length: int) -> None:
    """Raise ProtocolViolation if bytes at offset `at` were received before or exceed the granted window."""
    behind = at < stream.received_bytes and not stream.abandoned
    if behind or at + length > stream.received_bytes + held.bytes + stream.credit:
        raise ProtocolViolation(f"stream {stream.id} sends {length} bytes at {at}, which is not in its window")


def release(stream: YamuxStream, held: Reassembly, pool: BufferPool) -> None:
    """Pass the pieces that are now in order to the stream."""
    while (piece := held.take(stream.received_bytes)) is not None:
        stream.received_bytes += len(piece)
        stream.accept(piece, pool)
    first = held.first_at
    if first is not None and first < stream.received_bytes:
        raise ProtocolViolation("pieces of a stream overlap")
