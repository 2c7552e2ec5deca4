"""The wire format of calls: messages on one stream, sans-IO. `rpc/server` checks who may call, and when.

A message is a head, a block, and raw payloads:

    head     block length (4 bytes) | kind (1) | number of frames (1) | call id (8), big-endian
    block    the frames' headers (codec/format/frame), then by kind:
               REQUEST, OPEN   timeout in ms (4) | name length (1) | method name | body
               REPLY, PART     body
               ERROR           a `Failure`
               END, CANCEL     nothing
    payloads of the frames, one after the other, without framing of their own

REQUEST is answered by one REPLY or ERROR. OPEN starts a streaming call: each side sends PARTs and then END; ERROR ends
both directions. CANCEL (caller only) ends a call without an answer. Ids are chosen by the caller and ascend. A stream
may carry one call or thousands; the grammar is the same.

Hostile input: unknown kinds, block lengths or frame counts above the limits, headers that do not fit the block,
payloads without end, or packed ones that unpack to more than is allowed. All raise `ProtocolViolation`. No memory is
allocated for a payload before the driver has seen the whole block and calls `accept`; memory for a block grows only
with the bytes that have arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from peerd.codec.format.frame import MAX_HEADER_BYTES, FrameHeader, TensorFrame, decode_header, encode_header, raw_bytes
from peerd.core.errors import (
    Cause,
    LocalError,
    NotFiniteHere,
    Overloaded,
    PeerdError,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
)
from peerd.core.ids import PeerId
from peerd.core.limits import (
    RPC_BODY_BYTES,
    RPC_DEADLINE_S,
    RPC_ERROR_BYTES,
    RPC_ERROR_CHARS,
    RPC_FRAMES,
    RPC_MESSAGE_FRAME_BYTES,
    RPC_NAME_BYTES,
    RPC_ROUND_DEADLINE_S,
)
from peerd.messages.encoding import Message as Body
from peerd.messages.encoding import decode, encode

REQUEST, OPEN, REPLY, PART, END, ERROR, CANCEL = 1, 2, 3, 4, 5, 6, 7

_LEAST_MS = 1  # least timeout that is sent with a call
_HEAD = struct.Struct(">IBBQ")
_CALL = struct.Struct(">IB")
HEAD_BYTES = _HEAD.size
_HEAD_AND_CALL = struct.Struct(">IBBQIB")
_MOST_BLOCK_BYTES = {
    REQUEST: RPC_BODY_BYTES + _CALL.size + RPC_NAME_BYTES,
    OPEN: RPC_BODY_BYTES + _CALL.size + RPC_NAME_BYTES,
    REPLY: RPC_BODY_BYTES,
    PART: RPC_BODY_BYTES,
    END: 0,
    ERROR: RPC_ERROR_BYTES,
    CANCEL: 0,
}
_FRAMELESS = (END, ERROR, CANCEL)
_NAMED = ((TooSlow, "too slow"), (NotFiniteHere, "not finite"))
_CAUSES = {cause.value: cause for cause in (Cause.OTHER, Cause.OTHER_RUN_FILE, Cause.NOT_CONDUCTING, Cause.NO_TOKEN)}

Buffer = bytes | bytearray | memoryview


class RpcMessage(NamedTuple):
    """One received message; `name` and `timeout_ms` are set only for REQUEST and OPEN."""

    kind: int
    id: int
    body: bytes
    headers: tuple[FrameHeader, ...] = ()
    name: bytes = b""
    timeout_ms: int = 0
    frame_bytes: int = 0  # bytes that limits and budgets count: payloads, packed ones with their unpacked size

    @property
    def payload_bytes(self) -> int:
        """Number of bytes that follow the block."""
        return sum(header.payload_bytes for header in self.headers)

    @property
    def rows(self) -> int:
        """The largest first dimension of the frames; 0 without frames."""
        return max((header.shape[0] for header in self.headers if header.shape), default=0)


class Failure(Body, frozen=True):
    """Why a call failed, in wire form."""

    what: str  # "overloaded", "too slow", "not finite", or the cause of a refusal
    text: str
    retry_after_ms: int = 0


def encode_call(
    kind: int, call_id: int, name: bytes, timeout_s: float, body: bytes, headers: bytes = b"", frames: int = 0
) -> bytes:
    """A REQUEST or OPEN up to its payloads. `headers`: those of its `frames` frames, joined."""
    timeout_ms = max(_LEAST_MS, int(min(timeout_s, RPC_ROUND_DEADLINE_S) * 1000))
    size = len(headers) + _CALL.size + len(name) + len(body)
    if not frames:
        return _HEAD_AND_CALL.pack(size, kind, 0, call_id, timeout_ms, len(name)) + name + body
    return _HEAD.pack(size, kind, frames, call_id) + headers + _CALL.pack(timeout_ms, len(name)) + name + body


def encode_message(kind: int, call_id: int, body: bytes = b"", headers: bytes = b"", frames: int = 0) -> bytes:
    """A message of any other kind, up to its payloads."""
    return _HEAD.pack(len(headers) + len(body), kind, frames, call_id) + headers + body


def encode_frames(frames: Sequence[TensorFrame]) -> tuple[bytes, list[memoryview]]:
    """The frames' headers, joined, and their payloads as flat views. Raises LocalError if they exceed a limit."""
    headers = b"".join([encode_header(frame) for frame in frames])
    payloads = [memoryview(frame.payload).cast("B") for frame in frames]
    total = sum(raw_bytes(frame) if frame.lossless else memoryview(frame.payload).nbytes for frame in frames)
    if len(frames) > RPC_FRAMES or total > RPC_MESSAGE_FRAME_BYTES:
        limit = f"{RPC_FRAMES} frames and {RPC_MESSAGE_FRAME_BYTES} bytes"
        raise LocalError(f"a message of {len(frames)} frames and {total} bytes; allowed: {limit}")
    return headers, payloads


def encode_failure(call_id: int, error: PeerdError) -> bytes:
    """The ERROR message that reports `error` to the caller; an error without a kind of its own becomes a refusal."""
    text = str(error.args[0] if error.args else error)[:RPC_ERROR_CHARS]
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded
    if isinstance(error, Overloaded):
        failure = Failure("overloaded", text, int(min(max(error.retry_after_s, 0.0), RPC_DEADLINE_S) * 1000))
    else:
        refused = error.cause.value if isinstance(error, Refused) and error.cause.value in _CAUSES else "refused"
        found = next((what for kind, what in _NAMED if isinstance(error, kind)), refused)
        failure = Failure(found, text)
    return encode_message(ERROR, call_id, encode(failure))


def decode_failure(body: bytes, peer: PeerId) -> RemoteError:
    """The error that an ERROR message of `peer` represents."""
    failure = decode(Failure, body, RPC_ERROR_BYTES)
    text = "".join(char if char.isprintable() else "?" for char in failure.text)  # it may reach a terminal
    if failure.what == "overloaded":
        return Overloaded(text, min(max(failure.retry_after_ms / 1000, 0.0), RPC_DEADLINE_S), peer)
    if failure.what == "too slow":
        return TooSlow(text, peer)
    if failure.what == "not finite":
        return NotFiniteHere(text, peer)
    if (cause := _CAUSES.get(failure.what)) is not None:
        return Refused(text, peer, cause)
    raise ProtocolViolation("an error of unknown kind")


class MessageParser:
    """Parser of a stream: bytes in, messages out.

    `feed` returns the complete messages. It stops after a message with frames: then the driver calls `accept` or
    `skip`, passes the `wanted` bytes to `fill`, and continues with `feed(b"")`.
    """

    def __init__(self) -> None:
        self.wanted = 0  # payload bytes still to arrive; while positive, call `fill` instead of `feed`
        self._rest: bytes | bytearray = b""
        self._need = _HEAD.size  # `_rest` contains no complete message until it is this long
        self._pending: RpcMessage | None = None  # a message whose frames wait for `accept` or `skip`
        self._targets: list[memoryview] = []  # buffers for the next payload bytes, in order; empty while skipping

    @property
    def partial(self) -> tuple[int, int]:
        """Bytes stored of an incomplete message, and bytes it needs before its payloads; (0, 0) if there is none."""
        return (0, 0) if self._pending is not None or self.wanted else (len(self._rest), self._need)

    @property
    def clean(self) -> bool:
        """True if the stream may end here."""
        return not self._rest and not self.wanted and self._pending is None

    def feed(self, data: bytes) -> list[RpcMessage]:
        """Messages completed by `data`; the last one may wait for `accept` or `skip`."""
        if self._pending is not None or self.wanted:
            raise LocalError("feed was called before the payload was read")
        if self._rest:
            rest = self._rest if isinstance(self._rest, bytearray) else bytearray(self._rest)
            rest += data
            if len(rest) < self._need:
                self._rest = rest
                return []
            data = bytes(rest)
        messages: list[RpcMessage] = []
        end, at = len(data), 0
        while end - at >= _HEAD.size:
            size, kind, frames, call_id = _HEAD.unpack_from(data, at)
            stop = at + _HEAD.size + size
            _check_head(size, kind, frames)
            if stop > end:
                self._need = stop - at
                break
            message = _read_block(data, at + _HEAD.size, stop, kind, frames, call_id)
            messages.append(message)
            at = stop
            if frames:
                self._pending = message
                break
        else:
            self._need = _HEAD.size
        self._rest = data[at:] if at < end else b""
        return messages

    def accept(self, into: Sequence[memoryview] | None = None) -> Sequence[bytearray | memoryview]:
        """Receive the pending message's payloads into these buffers, or new ones; they are full once `wanted` is 0."""
        headers = self._waiting().headers
        buffers = [bytearray(header.payload_bytes) for header in headers] if into is None else into
        if [len(buffer) for buffer in buffers] != [header.payload_bytes for header in headers]:
            raise LocalError("the buffers and the payloads differ in size")
        self._targets = [memoryview(buffer) for buffer in buffers if buffer]
        self._begin()
        return buffers

    def skip(self) -> None:
        """Skip the payloads of the pending message, or the rest of them."""
        self._targets = []
        if self._pending is not None:
            self._begin()

    def room(self) -> memoryview | None:
        """Buffer for the next payload bytes, at most the rest of one frame, or None if they are skipped."""
        return self._targets[0] if self._targets else None

    def filled(self, count: int) -> None:
        """Record that `count` bytes were written to `room`."""
        target = self._targets[0]
        self.wanted -= count
        if count == target.nbytes:
            del self._targets[0]
        else:
            self._targets[0] = target[count:]

    def fill(self, data: bytes | memoryview) -> None:
        """Process payload bytes, at most `wanted` of them."""
        if len(data) > self.wanted:
            raise LocalError("more bytes than the payload needs")
        self.wanted -= len(data)
        if not self._targets:
            return
        at = 0
        while at < len(data):
            target = self._targets[0]
            count = min(target.nbytes, len(data) - at)
            target[:count] = data[at : at + count] if at or count < len(data) else data
            at += count
            if count == target.nbytes:
                del self._targets[0]
            else:
                self._targets[0] = target[count:]

    def _waiting(self) -> RpcMessage:
        if self._pending is None:
            raise LocalError("no message waits for its payload")
        return self._pending

    def _begin(self) -> None:
        self.wanted, self._pending = self._waiting().payload_bytes, None
        have, self._rest = self._rest[: self.wanted], self._rest[self.wanted :]
        self._need = _HEAD.size
        self.fill(bytes(have))


def read_head(data: bytes) -> tuple[int, int, int, int]:
    """Fields of a message's head (HEAD_BYTES): the block's size, the kind, the number of frames, the call's id."""
    size, kind, frames, call_id = _HEAD.unpack(data)
    _check_head(size, kind, frames)
    return size, kind, frames, call_id


def _check_head(size: int, kind: int, frames: int) -> None:
    most = _MOST_BLOCK_BYTES.get(kind)
    if most is None:
        raise ProtocolViolation(f"message of unknown kind {kind}")
    if frames > (0 if kind in _FRAMELESS else RPC_FRAMES):
        raise ProtocolViolation(f"a message of kind {kind} with {frames} frames")
    if size > most + frames * MAX_HEADER_BYTES:
        raise ProtocolViolation(f"a message of kind {kind} with {size} bytes; allowed: {most}")


def _read_block(data: bytes, at: int, stop: int, kind: int, frames: int, call_id: int) -> RpcMessage:
    headers: tuple[FrameHeader, ...] = ()
    total = 0
    if frames:
        headers, total, at = _read_headers(data[:stop], at, frames)
    if kind > OPEN:
        return RpcMessage(kind, call_id, data[at:stop], headers, frame_bytes=total)
    if stop - at < _CALL.size:
        raise ProtocolViolation("a request is cut short")
    timeout_ms, name_bytes = _CALL.unpack_from(data, at)
    at += _CALL.size
    body_at = at + name_bytes
    if name_bytes > RPC_NAME_BYTES or body_at > stop or stop - body_at > RPC_BODY_BYTES:
        raise ProtocolViolation("a request whose name or body does not fit")
    return RpcMessage(kind, call_id, data[body_at:stop], headers, data[at:body_at], timeout_ms, total)


def _read_headers(data: bytes, at: int, frames: int) -> tuple[tuple[FrameHeader, ...], int, int]:
    """The headers, the total bytes of their frames, and the offset behind the headers."""
    headers, total = [], 0
    for _ in range(frames):
        header, at = decode_header(data, at)
        headers.append(header)
        total += header.raw_bytes
    if total > RPC_MESSAGE_FRAME_BYTES:
        raise ProtocolViolation(f"frames of {total} bytes in one message; allowed: {RPC_MESSAGE_FRAME_BYTES}")
    return tuple(headers), total, at
