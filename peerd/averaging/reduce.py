"""Arithmetic on the parts of an averaging round: encoding, sums in the order of the senders, checks for NaN.

Synchronous, without the state of a round; `OpenRound.computed` decides what runs on a worker. Coded versions are
decoded when their sum is due, one after the other in one job of the worker. That needs far fewer jobs, and no decoded
version waits in memory for a late member. Invariants: the bits of a sum depend neither on which versions came coded nor
on their order of arrival; values that are not finite are never passed on. Hostile input: parts that do not decode, NaN,
infinities, and large values that are finite each but have no finite sum. `SumFault` names the members that sent them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from peerd.codec.format.frame import FrameHeader, TensorFrame
from peerd.core.errors import ProtocolViolation, Refused, RemoteError

Vector = np.ndarray[Any, np.dtype[Any]]
Version = Vector | TensorFrame  # a frame if it is not decoded yet

_BYTE = np.dtype(np.uint8)
_KEPT_BYTES_LEAST = 1 << 18  # smaller vectors are cheap to allocate
_SHORT_ROUND_S = 0.2  # page faults cost about 0.2 s for 1 GB, a round of that size takes several seconds


@lru_cache(maxsize=8)
def name_of(dtype: np.dtype[Any]) -> str:
    """Name of a dtype. Cached, because making it takes longer than the rest of the check of a part's form."""
    return dtype.name


class PartCoder(Protocol):
    """Coding of the parts of a vector. Synchronous: runs on the worker, except for small plain parts."""

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        """Encode the part that begins at element `begin` as a frame.

        If `seen` is given, the values that a receiver will decode are written there. `seen` may be `values` itself.
        """
        ...

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        """Decode a part of the shape and dtype of `like`. Raises RemoteError if the frame has another form."""
        ...

    def decode_into(self, frame: TensorFrame, target: Vector, onto: Vector | None = None) -> None:
        """Decode into `target`, and add `onto` if given, which may be `target` itself.

        Raises RemoteError if a coded frame has values that are not finite.
        """
        ...


class PlainParts:
    """The `PartCoder` that leaves parts unencoded, bit for bit."""

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        if seen is not None and seen is not values:
            np.copyto(seen, values)
        return TensorFrame(name_of(values.dtype), values.shape, values.data.cast("B"))

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        check_form(frame, like)
        if frame.coding != "none" or frame.lossless:
            raise Refused("parts must not be coded in this run")
        return np.frombuffer(frame.payload, dtype=like.dtype)

    def decode_into(self, frame: TensorFrame, target: Vector, onto: Vector | None = None) -> None:
        if onto is None:
            np.copyto(target, self.decode(frame, target))
        else:
            np.add(onto, self.decode(frame, target), out=target)


def check_form(frame: TensorFrame | FrameHeader, like: Vector) -> None:
    """Raise Refused unless the frame states the length and dtype of `like`."""
    if frame.dtype != name_of(like.dtype) or frame.shape != like.shape:
        raise Refused(f"a part must be one {like.dtype.name} vector of {like.shape[0]} elements")


def is_plain(frame: TensorFrame | FrameHeader, like: Vector) -> bool:
    """True if the frame's payload is the unencoded memory of a vector like `like`."""
    uncoded = frame.coding == "none" and not frame.lossless
    return uncoded and (frame.dtype, frame.shape) == (name_of(like.dtype), like.shape)


@dataclass(frozen=True, slots=True)
class SumFault:
    """Why a part has no sum, and the indexes of the versions that are at fault."""

    versions: list[int]
    reason: str


def sum_up(coder: PartCoder, begin: int, versions: Sequence[Version], target: Vector) -> TensorFrame | SumFault:
    """Write the sum of all versions into `target`, as every receiver will decode it. Returns the encoded sum.

    Returns a SumFault if a version cannot be added. Raises PeerdError if the coder cannot encode the sum.
    """
    total: Vector | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for i, version in enumerate(versions):
            try:
                total = _added(coder, total, version, target)
            except RemoteError as error:
                return SumFault([i], f"a member sent an invalid part: {error}")
    assert total is not None
    if total is not target:
        np.copyto(target, total)
    if not finite(target):
        return SumFault(_not_finite(coder, versions, target), "a member sent values that are not finite")
    return coder.encode(begin, target, target)  # also replaces `target` by what the others decode


def _decoded(coder: PartCoder, version: Version, like: Vector) -> Vector:
    return coder.decode(version, like) if isinstance(version, TensorFrame) else version


def _added(coder: PartCoder, total: Vector | None, version: Version, target: Vector) -> Vector:
    """The sum of `total`, if any, and one more version: in `target`, or the version's own memory if it is the first."""
    if isinstance(version, TensorFrame) and not is_plain(version, target):
        coder.decode_into(version, target, total)
        return target
    values = _decoded(coder, version, target)
    return values if total is None else np.add(total, values, out=target)


def _not_finite(coder: PartCoder, versions: Sequence[Version], total: Vector) -> list[int]:
    """Indexes of the versions that make the sum infinite or NaN."""
    each = [_decoded(coder, version, total) for version in versions]
    if bad := [i for i, version in enumerate(each) if not finite(version)]:
        return bad
    place = int(np.argmin(np.isfinite(total)))  # each version is finite: the largest value overflows the sum
    return [max(range(len(each)), key=lambda i: abs(float(each[i][place])))]


def take_sum(coder: PartCoder, frame: TensorFrame, target: Vector) -> None:
    """Decode an owner's sum into `target`, unless it was received there. Raises ProtocolViolation if it is invalid."""
    try:
        total = _added(coder, None, frame, target)
    except Refused as error:
        raise ProtocolViolation(str(error)) from None
    if is_plain(frame, target) and not finite(total):
        raise ProtocolViolation("the sum is not finite")
    if not np.may_share_memory(total, target):
        np.copyto(target, total)


def finite(values: Vector) -> bool:
    """True if all values are finite."""
    return bool(np.isfinite(values).all())


class VectorMemory:
    """Allocates vectors in memory that was used before: page faults take a large part of a short round.

    A vector's memory is returned once no thread refers to it or a view of it. The last `keep` buffers are kept for
    reuse. None is kept while rounds are long, so that the memory is free for other uses during them.
    """

    def __init__(self, keep: int = 1) -> None:
        self._kept: deque[Vector] = deque(maxlen=keep)
        self._keeps = True

    def round_begins(self) -> None:
        """Keep buffers from now on, at least for the parts of this round."""
        self._keeps = True

    def round_took(self, seconds: float) -> None:
        """Record the length of a round. After a long one, all kept memory is returned to the system."""
        self._keeps = seconds < _SHORT_ROUND_S
        if not self._keeps:
            self._kept.clear()

    def vector(self, length: int, dtype: np.dtype[Any]) -> Vector:
        """A vector whose content is undefined."""
        size = length * dtype.itemsize
        if size < _KEPT_BYTES_LEAST:
            return np.empty(length, dtype)
        pages = self._pages(size)
        vector = np.frombuffer(pages.data, dtype)  # its base is not an array, so a view keeps this object alive
        weakref.finalize(vector, self._take_back, pages).atexit = False
        return vector

    def rooms(self, headers: Sequence[FrameHeader]) -> list[memoryview]:
        """Uninitialized buffers for the payloads of these frames."""
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
