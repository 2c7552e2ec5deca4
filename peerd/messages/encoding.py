"""The codec of peerd's own messages: msgspec structs in msgpack, strict and bounded.

Every message of a peerd protocol derives from `Message`. Messages are array-like: fields are encoded by position,
without names, which halves small messages. So within one protocol version a field must not be moved or removed, and an
additional optional field needs a new version, because surplus fields are errors.

A hostile peer may send: lengths beyond the data, deep nesting, huge integers, wrong types, surplus fields, trailing
bytes, invalid UTF-8, extension types. Each raises `ProtocolViolation`. Memory use is bounded by a small multiple of the
input's size, which is checked first.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from peerd.core.decoders import decoder
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import RPC_BODY_BYTES


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base class of messages: immutable, encoded by position, without unknown fields."""


class Empty(Message, frozen=True):
    """An empty message body."""


S = TypeVar("S", bound=msgspec.Struct)

# msgspec's exceptions on bad input: its own (in some versions not ValueErrors), invalid UTF-8 (ValueError), deep
# nesting (RecursionError), numbers out of range (OverflowError), and huge sizes (MemoryError).
BAD_INPUT: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, max_bytes: int = RPC_BODY_BYTES) -> bytes:
    """Encode `message` in msgpack; LocalError if it is larger than `max_bytes`, the limit of every receiver."""
    data = _ENCODER.encode(message)
    if len(data) > max_bytes:
        raise LocalError(f"a {type(message).__name__} of {len(data)} bytes is above the limit of {max_bytes}")
    return data


def decode(kind: type[S], data: bytes | bytearray | memoryview, max_bytes: int = RPC_BODY_BYTES) -> S:
    """Decode `data`, which must be exactly one message of type `kind`; else ProtocolViolation."""
    if len(data) > max_bytes:
        raise ProtocolViolation(f"a {kind.__name__} of {len(data)} bytes is above the limit of {max_bytes}")
    try:
        message = decoder(kind).decode(data)
    except BAD_INPUT as error:
        raise ProtocolViolation(f"not a valid {kind.__name__}: {error}") from None
    return message
