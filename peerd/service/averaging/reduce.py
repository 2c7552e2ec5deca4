"""Arithmetic on the parts of an averaging round: coding, sums in the order of the senders, looks for NaN.

Synchronous and without a round's books: `OpenRound.computed` says what runs on a worker. Versions that came coded are
decoded only when the sum is due, one after the other in the same visit to the worker: that is a fraction of the visits,
and nobody's decoded version waits in memory for somebody late. Invariants: a sum has the same bits whatever came coded
and in which order it came; what is not finite is never passed on. Hostile: parts that do not decode, NaN, infinities,
and large values that are finite each but not together: `SumFault` says from which members they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from peerd.core.errors import ProtocolViolation, Refused, RemoteError
from peerd.core.frame import FrameHeader, TensorFrame

Vector = np.ndarray[Any, np.dtype[Any]]
Version = Vector | TensorFrame  # a frame where it is still to be decoded

_BYTE = np.dtype(np.uint8)
_KEPT_BYTES_LEAST = 1 << 18  # smaller vectors are cheap to allocate
_SHORT_ROUND_S = 0.2  # new pages for a vector cost about 0.2 s a GB, a round of it several seconds


@lru_cache(maxsize=8)
def name_of(dtype: np.dtype[Any]) -> str:
    """Name of a dtype by numpy, cached: asking takes longer than all else that a look at a part's form does."""
    return dtype.name


class PartCoder(Protocol):
    """Coding of the parts of a vector. Synchronous: runs on the worker, but for small plain parts."""

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        """The part that begins at element `begin` as a frame.

        `seen` gets it as whoever decodes that will see it; it may be `values` themselves.
        """
        ...

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        """The part, in the shape and dtype of `like`; raises RemoteError for anything else."""
        ...

    def decode_into(self, frame: TensorFrame, target: Vector, onto: Vector | None = None) -> None:
        """As `decode`, into `target`, with `onto`, which may be `target`, added.

        RemoteError for what is coded and not finite.
        """
        ...


class PlainParts:
    """Parts as they are, bit for bit."""

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        if seen is not None and seen is not values:
            np.copyto(seen, values)
        return TensorFrame(name_of(values.dtype), values.shape, values.data.cast("B"))

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        check_form(frame, like)
        if frame.coding != "none" or frame.lossless:
            raise Refused("parts travel uncoded")
        return np.frombuffer(frame.payload, dtype=like.dtype)

    def decode_into(self, frame: TensorFrame, target: Vector, onto: Vector | None = None) -> None:
        if onto is None:
            np.copyto(target, self.decode(frame, target))
        else:
            np.add(onto, self.decode(frame, target), out=target)


def check_form(frame: TensorFrame | FrameHeader, like: Vector) -> None:
    """Raises Refused unless the frame says that it is a vector of this length and dtype."""
    if frame.dtype != name_of(like.dtype) or frame.shape != like.shape:
        raise Refused(f"a part must be one {like.dtype.name} vector of {like.shape[0]} elements")


def is_plain(frame: TensorFrame | FrameHeader, like: Vector) -> bool:
    """True when the frame's payload is what lies in memory of such a vector."""
    uncoded = frame.coding == "none" and not frame.lossless
    return uncoded and (frame.dtype, frame.shape) == (name_of(like.dtype), like.shape)


@dataclass(frozen=True, slots=True)
class SumFault:
    """The versions of a part that make its sum impossible, and why."""

    versions: list[int]
    reason: str


def sum_up(coder: PartCoder, begin: int, versions: Sequence[Version], target: Vector) -> TensorFrame | SumFault:
    """The sum of all versions into `target`, as everyone will see it; returns how it travels.

    Raises PeerdError when the coder cannot code the sum.
    """
    total: Vector | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for i, version in enumerate(versions):
            try:
                total = _added(coder, total, version, target)
            except RemoteError as error:
                return SumFault([i], f"a member sent what it may not: {error}")
    assert total is not None
    if total is not target:
        np.copyto(target, total)
    if not finite(target):
        return SumFault(_not_finite(coder, versions, target), "a member sent values that are not finite")
    return coder.encode(begin, target, target)  # we go on with what the others can decode


def _decoded(coder: PartCoder, version: Version, like: Vector) -> Vector:
    return coder.decode(version, like) if isinstance(version, TensorFrame) else version


def _added(coder: PartCoder, total: Vector | None, version: Version, target: Vector) -> Vector:
    """The sum of what there is, if anything, and one more version: in `target`, or, of one alone, where it lies."""
    if isinstance(version, TensorFrame) and not is_plain(version, target):
        coder.decode_into(version, target, total)
        return target
    values = _decoded(coder, version, target)
    return values if total is None else np.add(total, values, out=target)


def _not_finite(coder: PartCoder, versions: Sequence[Version], total: Vector) -> list[int]:
    """Indexes of the versions to blame for a sum that is not finite."""
    each = [_decoded(coder, version, total) for version in versions]
    if bad := [i for i, version in enumerate(each) if not finite(version)]:
        return bad
    place = int(np.argmin(np.isfinite(total)))  # each is finite, and too large: the largest is
    return [max(range(len(each)), key=lambda i: abs(float(each[i][place])))]


def take_sum(coder: PartCoder, frame: TensorFrame, target: Vector) -> None:
    """Take an owner's answer into `target`, where it may lie already. What is wrong about it is the owner's doing."""
    try:
        total = _added(coder, None, frame, target)
    except Refused as error:
        raise ProtocolViolation(str(error)) from None
    if is_plain(frame, target) and not finite(total):
        raise ProtocolViolation("the sum is not finite")
    if not np.may_share_memory(total, target):
        np.copyto(target, total)


def finite(values: Vector) -> bool:
    """True when all values are finite."""
    return bool(np.isfinite(values).all())


class VectorMemory:
    """Vectors in memory that is already there: faulting in new pages costs a large part of a short round.

    A vector's memory comes back when nobody holds it, or any view of it, any more, in whichever thread that is; the
    last `keep` are kept. None is kept while rounds take long: the memory is better used by others meanwhile.
    """

    def __init__(self, keep: int = 1) -> None:
        self._kept: deque[Vector] = deque(maxlen=keep)
        self._keeps = True

    def round_begins(self) -> None:
        """Keep memory, at least for the parts of this round."""
        self._keeps = True

    def round_took(self, seconds: float) -> None:
        """Take note of the length of a round: after a long one, all memory goes back to the system."""
        self._keeps = seconds < _SHORT_ROUND_S
        if not self._keeps:
            self._kept.clear()

    def vector(self, length: int, dtype: np.dtype[Any]) -> Vector:
        """A vector with any content."""
        size = length * dtype.itemsize
        if size < _KEPT_BYTES_LEAST:
            return np.empty(length, dtype)
        pages = self._pages(size)
        vector = np.frombuffer(pages.data, dtype)  # its base is no array: views of it hold on to itself
        weakref.finalize(vector, self._take_back, pages).atexit = False
        return vector

    def rooms(self, headers: Sequence[FrameHeader]) -> list[memoryview]:
        """Room for the payloads of these frames, not cleared: they fill it."""
        return [self.vector(header.payload_bytes, _BYTE).data for header in headers]

    def _take_back(self, pages: Vector) -> None:
        if self._keeps:
            self._kept.append(pages)

    def _pages(self, size: int) -> Vector:
        for _ in range(len(self._kept)):
            pages = self._kept.popleft()
            if len(pages) == size:
                return pages
            self._kept.append(pages)
        return np.empty(size, np.uint8)
