"""The codec of our own messages: msgspec structs in msgpack, strict and bounded.

Every message of a peerd protocol derives from `Message` and is defined beside the service that speaks it. Messages
are array-like: fields travel by position, without names, which halves small messages. So a field may never be moved
or removed within one protocol version; new optional fields need a new version too, because surplus fields are errors.

A hostile peer may send: lengths beyond the data, deep nesting, huge integers, wrong types, surplus fields, trailing
bytes, broken UTF-8, extension types. Each raises `ProtocolViolation`, whatever the bytes; memory stays within a
small multiple of the input, whose size is checked first.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from peerd.core.decoders import decoder
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import RPC_BODY_BYTES


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of every message: immutable, fields by position, nothing unknown allowed."""


class Empty(Message, frozen=True):
    """A body that says nothing."""


S = TypeVar("S", bound=msgspec.Struct)

# What msgspec raises on bad input: its own errors (in some of its versions no ValueErrors), broken UTF-8 (ValueError),
# nesting (RecursionError), numbers that no type holds (OverflowError), and sizes that no memory holds.
BAD_INPUT: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, max_bytes: int = RPC_BODY_BYTES) -> bytes:
    """`message` in msgpack; LocalError when it is larger than any receiver would take."""
    data = _ENCODER.encode(message)
    if len(data) > max_bytes:
        raise LocalError(f"a {type(message).__name__} of {len(data)} bytes is above the limit of {max_bytes}")
    return data


def decode(kind: type[S], data: bytes | bytearray | memoryview, max_bytes: int = RPC_BODY_BYTES) -> S:
    """The message of type `kind` that `data` holds, all of it; ProtocolViolation when it does not."""
    if len(data) > max_bytes:
        raise ProtocolViolation(f"a {kind.__name__} of {len(data)} bytes is above the limit of {max_bytes}")
    try:
        message = decoder(kind).decode(data)
    except BAD_INPUT as error:
        raise ProtocolViolation(f"not a valid {kind.__name__}: {error}") from None
    return message
