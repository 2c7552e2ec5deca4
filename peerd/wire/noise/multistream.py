"""multistream-select: agreement on the protocol of a stream, by lines of text in both directions.

`Proposal` is the opener's side and optimistic: its hello may be sent together with the first data.
`MultistreamSelector` is the accepting side; its header is sent before anything is received. Neither keeps application
data: the bytes after the last line are returned. Hostile input: endless lines, padding, missing newlines, endless
proposals, an answer to another proposal. Source: https://github.com/multiformats/multistream-select
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.limits import MULTISTREAM_ATTEMPTS, MULTISTREAM_LINE_BYTES
from peerd.core.varint import decode_varint, encode_varint


def encode_line(text: str) -> bytes:
    """One length-prefixed line."""
    raw = text.encode() + b"\n"
    return encode_varint(len(raw)) + raw


HEADER = encode_line("/multistream/1.0.0")


@lru_cache(maxsize=256)
def hello(protocol: str) -> bytes:
    """The first bytes of a stream whose opener proposes `protocol`."""
    return HEADER + encode_line(protocol)


NOT_AVAILABLE = encode_line("na")


def take_line(buffer: bytearray) -> bytes | None:
    """Remove and return the next complete line without its newline, or None while it is incomplete."""
    found = decode_varint(buffer)
    if found is None:
        return None
    size, start = found
    if not 0 < size <= MULTISTREAM_LINE_BYTES:
        raise ProtocolViolation(f"a negotiation line of {size} bytes; allowed: 1 to {MULTISTREAM_LINE_BYTES}")
    if len(buffer) < start + size:
        return None
    line = bytes(buffer[start : start + size])
    if line[-1:] != b"\n":
        raise ProtocolViolation("a negotiation line does not end with a newline")
    del buffer[: start + size]
    return line[:-1]


class Proposal:
    """The opener's side: proposes one protocol."""

    __slots__ = ("_buffer", "_greeted", "hello", "protocol")

    def __init__(self, protocol: str, hello: bytes = b"") -> None:
        """`hello`: the encoded proposal, for callers that cache it."""
        self.protocol = protocol
        self.hello = hello or HEADER + encode_line(protocol)
        self._buffer = bytearray()
        self._greeted = False

    def feed(self, data: bytes | bytearray | memoryview) -> bytes | None:
        """Process bytes of the negotiation. Returns the bytes after the agreement, or None until it is reached.

        Raises Refused if the peer rejects the protocol.
        """
        if not self._buffer and data == self.hello:  # the usual answer, in one piece
            return b""
        self._buffer += data
        if not self._greeted and not HEADER.startswith(bytes(self._buffer[: len(HEADER)])):
            raise ProtocolViolation(f"the negotiation begins with {bytes(self._buffer[:20])!r}")
        while (line := take_line(self._buffer)) is not None:
            if not self._greeted:
                self._greeted = True
            elif line == b"na":
                raise Refused(f"the peer does not speak {self.protocol}")
            elif line == self.protocol.encode():
                return bytes(self._buffer)
            else:
                raise ProtocolViolation(f"asked for {self.protocol}, the peer answers {line[:40]!r}")
        return None


def _name(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ProtocolViolation("a protocol name is not UTF-8") from None


class MultistreamSelector:
    """The accepting side: chooses the first proposal that it supports."""

    __slots__ = ("_buffer", "_deaf", "_greeted", "_left", "_speaks")

    def __init__(self, speaks: Callable[[str], bool]) -> None:
        self._speaks = speaks
        self._buffer = bytearray()
        self._greeted = False
        self._left = MULTISTREAM_ATTEMPTS
        self._deaf = False  # further bytes belong to a protocol that we have refused

    def feed(self, data: bytes | bytearray | memoryview) -> tuple[bytes, str | None, bytes]:
        """Returns (answer to send, chosen protocol or None so far, bytes after the choice). The caller sends HEADER."""
        self._buffer += data
        answer = b""
        try:
            while not self._deaf and (line := take_line(self._buffer)) is not None:
                if not self._greeted:
                    if line != HEADER[1:-1]:
                        raise ProtocolViolation(f"negotiation begins with {line[:40]!r}")
                    self._greeted = True
                    continue
                protocol = _name(line)
                if self._speaks(protocol):
                    return answer + encode_line(protocol), protocol, bytes(self._buffer)
                self._left -= 1
                if self._left == 0:
                    raise ProtocolViolation(f"{MULTISTREAM_ATTEMPTS} proposals, none of them supported here")
                answer += NOT_AVAILABLE
        except ProtocolViolation:
            # An optimistic opener sends its first data before it receives "na": no proposal, but no violation either.
            if self._left == MULTISTREAM_ATTEMPTS:
                raise
            self._deaf = True
        if self._deaf:
            self._buffer.clear()
        return answer, None, b""
