"""Streams whose data travels on several connections at once: frames that name their place, and putting them in order.

A link may have further connections, called rails (`net.link.rails`). A stream with much to send is striped: from then
on its data frames say at which byte of the stream they belong, and go out on whichever rail has room; resets and ends
name their place, too. Each connection is parsed by itself, and only streams that use it wait for it: a lost packet of
bulk data delays no small call.

Invariants: what is held ahead of its turn counts as received against the stream's window, so that the window bounds it,
and what keeping the pieces costs is bounded by it, too; pieces neither overlap nor lie beyond the window.
Hostile input: overlapping, far-off or countless tiny pieces, places behind what was read, marks before the data, frames
of another kind on a rail: all raise ProtocolViolation.
Wire: a frame of yamux's form with type PLACED, whose 12 bytes are followed by the place (u64, big-endian) and `length`
bytes. Flags: FIN, RST, or none.
"""

from __future__ import annotations

import struct
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.machine.buffers import BufferPool
from peerd.machine.mux.reassembly import NOWHERE, Reassembly
from peerd.machine.mux.stream import YamuxStream

PROTOCOL: Final = "/peerd/rail/1"  # takes a muxer's place in the hand-shake of a further connection
PLACED: Final = 4  # frame type, after yamux's own
PLACE: Final = struct.Struct(">Q")
PLACED_HEADER: Final = struct.Struct(">BBHIIQ")
BINDING_BYTES: Final = 32


class StripedLane:
    """One connection's incoming frames: where in a frame its bytes stand."""

    __slots__ = ("at", "ended", "fin", "head", "left", "main", "stream")

    def __init__(self, *, main: bool) -> None:
        self.main = main  # the link's first connection: carries everything
        self.ended = False  # the peer sends nothing more here
        self.head = bytearray()  # of a frame whose header is incomplete
        self.left = 0  # payload bytes of the current data frame still to come
        self.at = NOWHERE  # the next one's place in its stream; -1: they come in order
        self.stream: YamuxStream | None = None  # None: the payload is thrown away
        self.fin = False

    def place(self, size: int) -> memoryview | None:
        """Buffer of a reader that waits for the next `size` bytes of plaintext; None: nobody does. What comes next is
        that.
        """
        stream = self.stream
        if stream is None or size > self.left or self.at not in (NOWHERE, stream.received_bytes):
            return None
        return stream.place(size)

    def row(self) -> int:
        """Number of bytes of plaintext that `place` has room for, all data of one frame."""
        stream = self.stream
        if stream is None or stream.landing is None or self.at not in (NOWHERE, stream.received_bytes):
            return 0
        return min(self.left, len(stream.landing))


def check_place(stream: YamuxStream, held: Reassembly, at: int, length: int) -> None:
    """ProtocolViolation when bytes at `at` were there before, or lie beyond all that was ever granted."""
    behind = at < stream.received_bytes and not stream.abandoned
    if behind or at + length > stream.received_bytes + held.bytes + stream.credit:
        raise ProtocolViolation(f"stream {stream.id} sends {length} bytes at {at}, which is not in its window")


def release(stream: YamuxStream, held: Reassembly, pool: BufferPool) -> None:
    """Give the stream the pieces whose turn has come."""
    while (piece := held.take(stream.received_bytes)) is not None:
        stream.received_bytes += len(piece)
        stream.accept(piece, pool)
    first = held.first_at
    if first is not None and first < stream.received_bytes:
        raise ProtocolViolation("pieces of a stream overlap")
