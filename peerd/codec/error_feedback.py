"""Error feedback: the coding error of one gradient is added to the next gradient, so that no part of it is lost.

A peer keeps a residual, a vector of the length of its flat gradient: the values that it meant to send minus the values
that the receivers decode. It covers the parts that it sent and the sums that it returned. The gradient is encoded with
the residual added ("1-Bit Stochastic Gradient Descent", Seide et al. 2014, and "Error Feedback Fixes SignSGD",
Karimireddy et al. 2019, which shows convergence). Over a run, the sum of all decoded gradients therefore differs from
the true sum only by the last residuals, however coarse the code and whichever peer owns which part.

A new residual takes effect once its round has succeeded (`settle`). A failed round leaves no residual, and encoding the
same gradient again gives the same bits. The residual of a peer that dies is lost, which amounts to one rounding error.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import decode, decode_onto, encode_missing
from peerd.codec.kernels.reference import CodingOutputs
from peerd.codec.policy import CodingPlan
from peerd.run.runfile import AveragingSection

Vector = np.ndarray[Any, np.dtype[Any]]


_PIECE: Final = 1 << 20  # elements; vectors are added in pieces of this size


class Pages(Protocol):
    """Memory for a vector that the system can write to disk, such as a mapped file (`state_room.StateRoom`)."""

    @property
    def row(self) -> memoryview:
        """The whole memory."""
        ...

    def used(self, count: int) -> None:
        """Count bytes that were read or written."""
        ...


class RoundResidual:
    """Residual of a round in progress.

    The vector starts uninitialized, because clearing it would take the time of filling it.
    """

    __slots__ = ("_begun", "_pages", "values")

    def __init__(self, values: Vector, pages: Pages | None = None) -> None:
        """`pages`: the memory of `values`, or None if they are in ordinary memory."""
        self.values = values
        self._pages = pages
        self._begun: list[tuple[int, int]] = []  # initialized spans: sorted, not touching

    @property
    def in_pages(self) -> bool:
        """True if the values are in `Pages`, not in ordinary memory."""
        return self._pages is not None

    def room(self, begin: int, length: int) -> tuple[Vector, bool]:
        """View for the residual of the `length` elements from `begin`, and whether it already holds values.

        If True, add to these values instead of overwriting them: a part may be encoded in several rounds.
        """
        self._used(length)
        return self.values[begin : begin + length], self._begin(begin, begin + length)

    @property
    def is_empty(self) -> bool:
        """True if no error was recorded."""
        return not self._begun

    def whole(self) -> Vector:
        """The whole residual, with zeros wherever no error was recorded."""
        if not self._begin(0, len(self.values)):
            self._clear(0, len(self.values))
        return self.values

    def folded(self, others: Iterable[RoundResidual]) -> RoundResidual:
        """This residual, after the residuals of `others` were added to it in place."""
        self.whole()
        for other in others:
            other.whole()
            other.add_to(self.values)
            self._used(len(self.values))
        return self

    def add_to(self, target: Vector) -> None:
        """Add the whole residual to `target`, in place. All of its elements must be initialized (`whole`)."""
        for begin in range(0, len(target), _PIECE):
            piece = target[begin : begin + _PIECE]
            np.add(piece, self.values[begin : begin + _PIECE], out=piece)
            self._used(len(piece))

    def _clear(self, begin: int, end: int) -> None:
        for at in range(begin, end, _PIECE):
            piece = self.values[at : min(end, at + _PIECE)]
            piece.fill(0)
            self._used(len(piece))

    def _used(self, elements: int) -> None:
        if self._pages is not None:
            self._pages.used(elements * self.values.itemsize)

    def _begin(self, begin: int, end: int) -> bool:
        """Mark the elements as initialized; True if some of them were before, in which case the others are zeroed."""
        begun = self._begun
        first, last = bisect_right(begun, begin, key=lambda span: span[1]), bisect_left(begun, (end,))
        old = begun[first:last]
        if not old:
            begun.insert(first, (begin, end))
            return False
        at = begin
        for span in (*old, (end, end)):
            self._clear(at, span[0])
            at = max(at, span[1])
        begun[first:last] = [(min(begin, old[0][0]), at)]
        return True


class ErrorFeedback:
    """One peer's residual, and the coding of the parts that it covers (a `PartCoder` of averaging).

    Synchronous, for one thread at a time. Uses two vectors, the residual and the next one. In ordinary memory they are
    kept between rounds, because allocating fresh pages costs more than the coding. The caller may provide `Pages`
    instead.
    """

    def __init__(self, plan: CodingPlan, pages: Callable[[int], Pages | None] = lambda size: None) -> None:
        """`pages`: returns memory for a vector of the given number of bytes, or None to use ordinary memory."""
        self._plan, self._pages = plan, pages
        self._residual: RoundResidual | None = None  # None: all zeros
        self._new: RoundResidual | None = None  # of the round in progress
        self._spare: RoundResidual | None = None

    @property
    def residual(self) -> Vector | None:
        """The vector that is added to the next gradient, or None if nothing is added."""
        return None if self._residual is None else self._residual.values

    def begin(self, gradient: Vector) -> RoundResidual:
        """Begin a round: add the residual to `gradient`, in place. Returns the round's new residual, for `settle`."""
        if self._residual is not None:
            self._residual.add_to(gradient)
        self._new = self._missed(gradient)
        return self._new

    def go_on(self, vector: Vector) -> RoundResidual:
        """Begin a further round on an already summed vector. Returns the residual of this round alone, for `settle`."""
        self._new = self._missed(vector)
        return self._new

    def settle_further(self, missed: Sequence[RoundResidual]) -> None:
        """Add the residuals of rounds to which this peer contributed no gradient, and so no residual of its own."""
        others = list(missed)
        if self._residual is None and others:
            self._residual = others.pop(0)
        if self._residual is not None:
            self._residual.folded(others)
        self._new = None

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        """Encode the part that begins at element `begin`.

        `seen` receives the part as the receivers decode it; it may be `values` itself. Raises NotFinite.
        """
        missed, more = self._new.room(begin, len(values)) if self._new is not None else (None, False)
        beside = CodingOutputs(_tensor(missed), more, _tensor(seen))
        return encode_missing(torch.from_numpy(values), self._plan, beside, name="a part of the gradient")

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        """Decode a part with the shape and dtype of `like`; raises ProtocolViolation if the frame has others."""
        dtype = torch.from_numpy(like[:0]).dtype
        values: Vector = decode(frame, like.shape, dtype, name="a part of a gradient", finite=True).numpy()
        return values

    def decode_into(self, frame: TensorFrame, target: Vector, onto: Vector | None = None) -> None:
        """Decode a part into `target`, whose shape and dtype it must have; `onto`, if given, is added."""
        decode_onto(frame, torch.from_numpy(target), _tensor(onto), name="a part of a gradient")

    def settle(self, new: RoundResidual | None = None, *further: RoundResidual) -> None:
        """Accept the round that began with `new`, or else the last one: its residual is added to the next gradient.

        `further`: residuals of the rounds that continued it (`go_on`).
        """
        new = new or self._new
        self._spare, self._new = self._residual, None
        missed = new is not None and not all(one.is_empty for one in (new, *further))
        self._residual = new.folded(further) if new is not None and missed else None

    def forget(self) -> None:
        """Drop the residual, because the parameters that it belongs to were replaced."""
        self._spare, self._residual, self._new = self._residual, None, None

    def _missed(self, like: Vector) -> RoundResidual:
        """An uninitialized residual with the length and dtype of `like`."""
        spare, self._spare = self._spare, None
        if (pages := self._pages(like.nbytes)) is not None:
            return RoundResidual(np.frombuffer(pages.row, like.dtype), pages)
        values = None if spare is None or spare.in_pages else spare.values
        if values is None or (values.shape, values.dtype) != (like.shape, like.dtype):
            values = np.empty_like(like)
        return RoundResidual(values)


def _tensor(vector: Vector | None) -> torch.Tensor | None:
    return None if vector is None else torch.from_numpy(vector)


def feedback_of(
    averaging: AveragingSection, pages: Callable[[int], Pages | None] = lambda size: None
) -> ErrorFeedback | None:
    """Error feedback for a run's gradient parts, with its vectors in `pages` (as in `ErrorFeedback`).

    Returns None if the parts are sent uncoded or as PowerSGD factors.
    """
    plain = averaging.code in ("none", "powersgd")  # PowerSGD has its own error feedback
    return None if plain else ErrorFeedback(CodingPlan(averaging.code, averaging.block), pages)
