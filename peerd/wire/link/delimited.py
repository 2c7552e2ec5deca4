"""Length-prefixed messages on a stream, as in libp2p's small protocols.

Hostile input: lengths above the caller's limit, endless varints; ProtocolViolation before memory is allocated.
"""

from __future__ import annotations

from peerd.core.errors import ProtocolViolation
from peerd.core.varint import decode_varint, encode_varint
from peerd.wire.link.link_stream import Stream


async def send_message(stream: Stream, raw: bytes) -> None:
    """Send `raw`, prefixed with its length as a varint."""
    await stream.send(encode_varint(len(raw)) + raw)


async def receive_message(stream: Stream, bytes_max: int) -> bytes:
    """Receive the next message. Raises ProtocolViolation if it is longer than `bytes_max`, incomplete or missing."""
    raw = await next_message(stream, bytes_max)
    if raw is None:
        raise ProtocolViolation(f"{stream.protocol} ended before a message", stream.peer)
    return raw


async def next_message(stream: Stream, bytes_max: int) -> bytes | None:
    """Like `receive_message`, but returns None at the end of the stream."""
    head = bytearray(await stream.receive_some(1))
    if not head:
        return None
    while (found := decode_varint(head)) is None:
        head += await stream.receive_exactly(1)
    size = found[0]
    if size > bytes_max:
        raise ProtocolViolation(f"a message of {size} bytes; allowed: {bytes_max}", stream.peer)
    return await stream.receive_exactly(size)
