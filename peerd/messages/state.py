"""A stage's state as a byte array that is transferred in verified pieces, and the messages that request them.

The tensors are concatenated in the given order, each aligned to STATE_ALIGN_BYTES with zero padding; this byte array is
cut into pieces of STATE_PIECE_BYTES. Each piece has a SHA-256. The root, a SHA-256 over position, layout and all piece
digests, identifies the whole state: equal roots mean equal bits at the same position. Donor and receiver both know the
layout from their own stage, so names and shapes are not sent, and no peer decides how much memory is allocated.

Only a backbone that keeps checkpoints of users' own loops has no model: its run file has the layout's digest, and
`read_layout` parses the text with that digest. Hostile input: a text with another digest, or a malformed text whose
digest a run file's author chose (ValueError).
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

from peerd.codec.format.frame import DTYPES
from peerd.core.limits import STATE_PIECE_BYTES, STATE_PIECES
from peerd.messages.encoding import Message
from peerd.messages.swarm import Fingerprint, Position, StageNumber, StepNumber

STATE_ALIGN_BYTES: Final = 64
DIGEST_BYTES: Final = 32
Bytes = bytes | bytearray | memoryview
_TAG: Final = b"peerd state 1\0"
_SHAPE: Final = re.compile(r"\[(\d{1,15}(, \d{1,15}){0,7})?\]")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of a state, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values. Raises KeyError for an unknown dtype."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class StateItem(NamedTuple):
    """One tensor of a state: raw little-endian bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    payload: memoryview


class Span(NamedTuple):
    """Bytes `begin` to `end` of one tensor, located at `offset` in a piece."""

    tensor: int
    begin: int
    end: int
    offset: int


class Pieces:
    """Division of a byte array into pieces, of which the last may be shorter. `digests`: of all pieces, joined."""

    def __init__(self, total_bytes: int, piece_bytes: int = STATE_PIECE_BYTES) -> None:
        self.total_bytes, self.piece_bytes = total_bytes, piece_bytes
        self.pieces = -(-total_bytes // piece_bytes)

    def piece(self, number: int) -> tuple[int, int]:
        """Begin and end of piece `number` in the byte array."""
        begin = number * self.piece_bytes
        return begin, min(begin + self.piece_bytes, self.total_bytes)

    def is_right(self, number: int, data: Bytes, digests: Bytes) -> bool:
        """True if piece `number` has this content."""
        at = number * DIGEST_BYTES
        return piece_digest(data) == digests[at : at + DIGEST_BYTES]


class StateLayout(Pieces):
    """Layout of a state: the offset of each tensor in the byte array, and the pieces of the byte array."""

    def __init__(self, tensors: Iterable[TensorSpec | StateItem], piece_bytes: int = STATE_PIECE_BYTES) -> None:
        """Assign each tensor its offset, in the given order."""
        self.tensors = [TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in tensors]
        self.begins: list[int] = []  # offset of each tensor
        end = 0
        for spec in self.tensors:
            begin = -(-end // STATE_ALIGN_BYTES) * STATE_ALIGN_BYTES
            self.begins.append(begin)
            end = begin + spec.nbytes
        super().__init__(end, piece_bytes)
        text = "".join(f"{t.name}\0{t.dtype}\0{list(t.shape)}\0" for t in self.tensors)
        self.text = text.encode()  # names, dtypes and shapes, for peers without the model
        self.digest = hashlib.sha256(self.text).digest()

    def spans(self, number: int) -> list[Span]:
        """The parts of tensors in a piece."""
        begin, end = self.piece(number)
        spans = []
        for tensor in range(max(0, bisect_right(self.begins, begin) - 1), len(self.begins)):
            at = self.begins[tensor]
            if at >= end:
                break
            first, last = max(begin, at), min(end, at + self.tensors[tensor].nbytes)
            if first < last:
                spans.append(Span(tensor, first - at, last - at, first - begin))
        return spans

    def cut_out(self, number: int, payloads: Sequence[memoryview]) -> memoryview:
        """The bytes of a piece: a view if they are in one tensor, else a copy. `payloads`: raw bytes of each tensor."""
        begin, end = self.piece(number)
        spans = self.spans(number)
        if len(spans) == 1 and spans[0].end - spans[0].begin == end - begin:
            return payloads[spans[0].tensor][spans[0].begin : spans[0].end]
        joined = bytearray(end - begin)
        for tensor, first, last, offset in spans:
            joined[offset : offset + last - first] = payloads[tensor][first:last]
        return memoryview(joined)

    def views(self, row: memoryview) -> list[memoryview]:
        """Each tensor's part of the whole byte array."""
        return [row[b : b + t.nbytes] for b, t in zip(self.begins, self.tensors, strict=True)]

    def root(self, position: Position, digests: Bytes) -> bytes:
        """Root hash of a state with this layout. `digests`: the digests of all pieces, concatenated."""
        lineage = position.lineage
        head = position.step.to_bytes(8, "big") + len(lineage).to_bytes(1, "big") + lineage
        return hashlib.sha256(_TAG + head + self.digest + digests).digest()


def read_layout(text: Bytes, digest: bytes) -> list[TensorSpec]:
    """Parse `StateLayout.text`. Raises ValueError if the text has another digest or is malformed."""
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("the layout of the state has the wrong digest")
    parts = bytes(text).decode().split("\0")
    if parts.pop() or len(parts) % 3:
        raise ValueError("the layout of the state is cut off")
    specs = []
    for name, dtype, shape in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if dtype not in DTYPES or not _SHAPE.fullmatch(shape):
            raise ValueError(f"the layout of the state has a tensor {dtype[:20]!r} {shape[:80]!r}")
        specs.append(TensorSpec(name, dtype, tuple(int(part) for part in shape[1:-1].split(",") if part)))
    names = [spec.name for spec in specs]
    if not names or names != sorted(set(names)):
        raise ValueError("the tensors of the layout are not sorted by name, each named once")
    if sum(spec.nbytes for spec in specs) > STATE_PIECES * STATE_PIECE_BYTES:
        raise ValueError("the layout is of a state that is larger than any that can be given")
    return specs


def piece_digest(data: Bytes) -> bytes:
    """The digest of one piece."""
    return hashlib.sha256(data).digest()


# --- messages --------------------------------------------------------------------------------------------------

Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class StateRequest(Message, frozen=True):
    """A request for the manifest of a donor's current state, of which it freezes a copy.

    With a position `of`, `state/1` returns the manifest of the total of the step from that position (one tensor, at the
    next position), and `kept/1` that of the checkpoint of that position. Without one, the donor waits until step
    `meet`, if it comes soon, before it copies its state, so that all donors report the same bits.
    """

    run: Fingerprint
    stage: StageNumber
    of: Position | None = None
    meet: StepNumber = 0


class StateManifest(Message, frozen=True):
    """A donor's description of a state; equal for all donors with the same bits at the same position."""

    position: Position
    layout: Root  # digest of the names, dtypes and shapes
    root: Root  # digest of position, layout and all pieces' digests; identifies the copy in further calls


class StateDigests(Message, frozen=True):
    """A request for the digests of a copy's pieces; the answer's frame has all of them, uint8 [pieces, 32]."""

    run: Fingerprint
    root: Root


class StateRelease(Message, frozen=True):
    """Notice that the caller is done with a copy, so that the donor need not keep it for the caller."""

    run: Fingerprint
    root: Root


class StatePiece(Message, frozen=True):
    """A request for one piece of a copy; the answer's frame has its bytes."""

    run: Fingerprint
    root: Root
    piece: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
