"""A stage's state as one row of bytes, cut into pieces that are checked one by one, and the messages to ask for them.

The tensors lie one after another in the order given, each at a multiple of STATE_ALIGN_BYTES, with zeros in between;
the row is cut into pieces of STATE_PIECE_BYTES. Each piece has a SHA-256; the root, a SHA-256 over position, layout
and all digests, stands for the whole state: equal roots mean equal bits at the same position. Giver and receiver both
know the layout from their own stage, so no names and shapes travel, and nothing that a peer says decides how much
memory is taken. Only a keeper of users' own loops has no model of its own: its run file has the layout's digest, and
`read_layout` reads the text of that digest. Hostile input: a text of another digest, or of a run file whose author
wrote anything (ValueError).
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

from peerd.core.frame import DTYPES
from peerd.core.limits import STATE_PIECE_BYTES, STATE_PIECES
from peerd.core.messages.encoding import Message
from peerd.core.messages.swarm import Fingerprint, Position, StageNumber, StepNumber

STATE_ALIGN_BYTES: Final = 64
DIGEST_BYTES: Final = 32
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
        """Bytes of the values; KeyError when there is no such dtype."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


class StateItem(NamedTuple):
    """One tensor of a state: raw little-endian bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    payload: memoryview


class Span(NamedTuple):
    """Bytes `begin` to `end` of one tensor, which stand at `offset` of a piece."""

    tensor: int
    begin: int
    end: int
    offset: int


class StateLayout:
    """Layout of a state: the offset of each tensor in the row, and the pieces that the row is cut into."""

    def __init__(self, tensors: Iterable[TensorSpec | StateItem], piece_bytes: int = STATE_PIECE_BYTES) -> None:
        """Lay out the tensors in a row."""
        self.tensors = [TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in tensors]
        self.piece_bytes = piece_bytes
        self.begins: list[int] = []  # of each tensor, in the row
        end = 0
        for spec in self.tensors:
            begin = -(-end // STATE_ALIGN_BYTES) * STATE_ALIGN_BYTES
            self.begins.append(begin)
            end = begin + spec.nbytes
        self.total_bytes = end
        self.pieces = -(-end // piece_bytes)
        text = "".join(f"{t.name}\0{t.dtype}\0{list(t.shape)}\0" for t in self.tensors)
        self.text = text.encode()  # names, dtypes and shapes, for those who do not know them
        self.digest = hashlib.sha256(self.text).digest()

    def piece(self, number: int) -> tuple[int, int]:
        """Begin and end of piece `number` in the row."""
        begin = number * self.piece_bytes
        return begin, min(begin + self.piece_bytes, self.total_bytes)

    def spans(self, number: int) -> list[Span]:
        """The parts of tensors that make up a piece."""
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
        """The bytes of a piece; a view where they lie in one tensor, else a copy. `payloads`: raw bytes by tensor."""
        begin, end = self.piece(number)
        spans = self.spans(number)
        if len(spans) == 1 and spans[0].end - spans[0].begin == end - begin:
            return payloads[spans[0].tensor][spans[0].begin : spans[0].end]
        joined = bytearray(end - begin)
        for tensor, first, last, offset in spans:
            joined[offset : offset + last - first] = payloads[tensor][first:last]
        return memoryview(joined)

    def views(self, row: memoryview) -> list[memoryview]:
        """Each tensor's part of a whole row."""
        return [row[b : b + t.nbytes] for b, t in zip(self.begins, self.tensors, strict=True)]

    def root(self, position: Position, digests: bytes | bytearray | memoryview) -> bytes:
        """Root hash of a state of this layout; `digests`: those of all pieces, joined."""
        lineage = position.lineage
        head = position.step.to_bytes(8, "big") + len(lineage).to_bytes(1, "big") + lineage
        return hashlib.sha256(_TAG + head + self.digest + digests).digest()


def read_layout(text: bytes | bytearray | memoryview, digest: bytes) -> list[TensorSpec]:
    """The tensors that `StateLayout.text` names; ValueError if it is not the text of this digest, or not valid."""
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


def piece_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The digest of one piece."""
    return hashlib.sha256(data).digest()


# --- messages --------------------------------------------------------------------------------------------------

Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class StateRequest(Message, frozen=True):
    """Ask a donor what its state is at its current position: it freezes a copy and vouches for it.

    With a position, `state/1` gives the total that led on from it (one tensor, at the next position), and `kept/1` the
    checkpoint of that position. Without one, `meet` is the step before which it shall not copy its state, if it
    comes soon: donors that wait for the same step vouch for the same bits.
    """

    run: Fingerprint
    stage: StageNumber
    of: Position | None = None
    meet: StepNumber = 0


class StateManifest(Message, frozen=True):
    """A donor's claim to a state; the same from all donors that hold the same bits at the same position."""

    position: Position
    layout: Root  # digest of the names, dtypes and shapes
    root: Root  # digest of position, layout and the digests of all pieces; names the copy in further calls


class StateDigests(Message, frozen=True):
    """Ask for the digests of a copy's pieces; the answer's frame has them all, uint8 [pieces, 32]."""

    run: Fingerprint
    root: Root


class StateRelease(Message, frozen=True):
    """The caller has what it wanted of a copy: the donor need not keep it for the caller's sake."""

    run: Fingerprint
    root: Root


class StatePiece(Message, frozen=True):
    """Ask for one piece of a copy; the answer's frame is its bytes."""

    run: Fingerprint
    root: Root
    piece: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
