"""One message with its length in front, on a stream: how libp2p's small protocols talk.

Hostile input: lengths beyond what the caller takes, lengths without end; ProtocolViolation before a byte is allocated.
"""

from __future__ import annotations

from peerd.core.errors import ProtocolViolation
from peerd.core.varint import decode_varint, encode_varint
from peerd.net.link.stream import Stream


async def send_message(stream: Stream, raw: bytes) -> None:
    """Send `raw` with its length as a varint in front."""
    await stream.send(encode_varint(len(raw)) + raw)


async def receive_message(stream: Stream, bytes_max: int) -> bytes:
    """The next message; raises ProtocolViolation when it is longer than `bytes_max`, or does not come whole."""
    raw = await next_message(stream, bytes_max)
    if raw is None:
        raise ProtocolViolation(f"{stream.protocol} ends where a message was due", stream.peer)
    return raw


async def next_message(stream: Stream, bytes_max: int) -> bytes | None:
    """As `receive_message`, but None at the end of the stream."""
    head = bytearray(await stream.receive_some(1))
    if not head:
        return None
    while (found := decode_varint(head)) is None:
        head += await stream.receive_exactly(1)
    size = found[0]
    if size > bytes_max:
        raise ProtocolViolation(f"a message of {size} bytes; allowed: {bytes_max}", stream.peer)
    return await stream.receive_exactly(size)
