"""The protobuf wire format, as far as libp2p's small messages use it, with every loop bounded.

`read_fields` yields every field; callers skip unknown ones, as protobuf requires. Groups (wire types 3 and 4) are
refused. Hostile input: lengths beyond the end, endless varints, a million tiny fields, field number zero; each raises
ProtocolViolation.
Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import PROTOBUF_FIELDS
from peerd.core.varint import encode_varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) in order: an int for varints and fixed-size numbers, bytes for all other fields."""
    at = 0
    for _ in range(PROTOBUF_FIELDS):
        if at == len(data):
            return
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ProtocolViolation("a message has field number 0")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif kind == _BYTES:
            size, at = _varint(data, at)
            yield number, _slice(data, at, size)
            at += size
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            yield number, int.from_bytes(_slice(data, at, size), "little")
            at += size
        else:
            raise ProtocolViolation(f"a message uses wire type {kind}")
    if at != len(data):
        raise ProtocolViolation(f"a message has more than {PROTOBUF_FIELDS} fields")


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise ProtocolViolation("a message ends inside a field")
    return data[at : at + size]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    # Protobuf allows ten bytes and padding, unlike multiformats.
    value = 0
    for count in range(10):
        if at + count >= len(data):
            raise ProtocolViolation("a message ends inside a number")
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & (1 << 64) - 1, at + count + 1
    raise ProtocolViolation("a number in a message is longer than 10 bytes")


def bytes_field(number: int, value: bytes) -> bytes:
    """Encode a length-delimited field."""
    return encode_varint(number << 3 | _BYTES) + encode_varint(len(value)) + value


def number_field(number: int, value: int) -> bytes:
    """Encode a varint field."""
    return encode_varint(number << 3 | _VARINT) + encode_varint(value)


def want_number(value: int | bytes, what: str) -> int:
    """Return `value` if it is a number; raise ProtocolViolation if the field contained bytes."""
    if not isinstance(value, int):
        raise ProtocolViolation(f"{what} is not a number")
    return value


def want_bytes(value: int | bytes, what: str) -> bytes:
    """Return `value` if it is bytes; raise ProtocolViolation if the field contained a number."""
    if isinstance(value, int):
        raise ProtocolViolation(f"{what} is a number")
    return value


def want_text(value: int | bytes, what: str, bytes_max: int) -> str:
    """Decode `value` as UTF-8 of at most `bytes_max` bytes; raise ProtocolViolation if it is anything else."""
    raw = want_bytes(value, what)
    if len(raw) > bytes_max:
        raise ProtocolViolation(f"{what} has {len(raw)} bytes; allowed: {bytes_max}")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolViolation(f"{what} is not UTF-8") from None
