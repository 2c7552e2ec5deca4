"""Unsigned varints of multiformats and protobuf: seven bits per byte, least significant group first.

Hostile input: endless continuation bytes, values above 63 bits, zero padding (a second encoding of the same number).
Each raises ProtocolViolation; only an incomplete varint does not.
"""

from __future__ import annotations

from peerd.core.errors import ProtocolViolation

VARINT_BYTES_MAX = 9  # 63 bits: the multiformats bound


def encode_varint(value: int) -> bytes:
    """Encode `value`, 0 <= value < 2^63, in the fewest bytes."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int] | None:
    """Decode the varint at `at`. Returns (value, index after it), or None if `data` ends inside the varint."""
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
