"""Unsigned varints as multiformats and protobuf write them: seven bits a byte, least significant first.

Hostile input: endless continuation bytes, values beyond 63 bits, padding with zero groups (two spellings of one
number). All but "not enough bytes yet" raise ProtocolViolation.
"""

from __future__ import annotations

from peerd.core.errors import ProtocolViolation

VARINT_BYTES_MAX = 9  # 63 bits: the multiformats bound


def encode_varint(value: int) -> bytes:
    """`value` in the fewest bytes; 0 <= value < 2^63."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int] | None:
    """(value, index after it), or None when `data` ends before the number does."""
    value = 0
    for count in range(VARINT_BYTES_MAX):
        if at + count >= len(data):
            return None
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            if byte == 0 and count:
                raise ProtocolViolation("a varint is padded with zeros")
            return value, at + count + 1
    raise ProtocolViolation(f"a varint is longer than {VARINT_BYTES_MAX} bytes")
