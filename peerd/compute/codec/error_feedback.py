"""Error feedback: what a code takes from a gradient now is added to the next one, so that nothing is lost for good.

A peer keeps a residual, as long as its flat gradient: what it meant to send minus what the others could decode, for
the parts that it sent and for the sums that it returned. The gradient is coded with the residual added ("1-Bit
Stochastic Gradient Descent", Seide et al. 2014, and "Error Feedback Fixes SignSGD", Karimireddy et al. 2019, which
shows convergence). So the sum of all that arrives differs from the true sum by the last residuals only, however
coarse the code, and whoever owns which part.

A new residual counts once its round has succeeded (`settle`); of a round that failed nothing remains, and the same
gradient coded again has the same bits. A peer that dies takes its residual with it, as one rounding.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from peerd.compute.codec.frames import decode, decode_onto, encode_missing
from peerd.compute.codec.policy import CodingPlan
from peerd.compute.kernels.reference import Beside
from peerd.core.frame import TensorFrame
from peerd.core.run.runfile import AveragingSection

Vector = np.ndarray[Any, np.dtype[Any]]


_PIECE: Final = 1 << 20  # elements: large vectors are added piece by piece


class Pages(Protocol):
    """Memory for a vector that the system may take back, as a mapped file is (`state_room.StateRoom`)."""

    @property
    def row(self) -> memoryview:
        """All of it."""
        ...

    def used(self, count: int) -> None:
        """Take note that so many bytes were read or written."""
        ...


class Missed:
    """Residual of a round, while it is made. It begins uncleared: that would cost as much as filling it."""

    __slots__ = ("_begun", "_pages", "values")

    def __init__(self, values: Vector, pages: Pages | None = None) -> None:
        """`pages`: where `values` lie; None: in ordinary memory."""
        self.values = values
        self._pages = pages
        self._begun: list[tuple[int, int]] = []  # where something was added: sorted and apart

    @property
    def in_pages(self) -> bool:
        """True when it does not lie in ordinary memory."""
        return self._pages is not None

    def room(self, begin: int, length: int) -> tuple[Vector, bool]:
        """The place for the residual of the `length` elements from `begin` on.

        True: something stands there that it must be added to, as a part may be coded in several rounds.
        """
        self._used(length)
        return self.values[begin : begin + length], self._begin(begin, begin + length)

    def whole(self) -> Vector:
        """All of the residual; nothing was missed where nothing was added."""
        if not self._begin(0, len(self.values)):
            self.values.fill(0)
            self._used(len(self.values))
        return self.values

    def folded(self, others: Iterable[Missed]) -> Missed:
        """This one, with those of other rounds added for good."""
        self.whole()
        for other in others:
            other.whole()
            other.add_to(self.values)
            self._used(len(self.values))
        return self

    def add_to(self, target: Vector) -> None:
        """Add all of the residual to `target`, in place. It must be whole."""
        for begin in range(0, len(target), _PIECE):
            piece = target[begin : begin + _PIECE]
            np.add(piece, self.values[begin : begin + _PIECE], out=piece)
            self._used(len(piece))

    def _used(self, elements: int) -> None:
        if self._pages is not None:
            self._pages.used(elements * self.values.itemsize)

    def _begin(self, begin: int, end: int) -> bool:
        """Count these as begun; where some of them were before, which is the answer, the others are cleared."""
        begun = self._begun
        first, last = bisect_right(begun, begin, key=lambda span: span[1]), bisect_left(begun, (end,))
        old = begun[first:last]
        if not old:
            begun.insert(first, (begin, end))
            return False
        at = begin
        for span in (*old, (end, end)):
            self.values[at : max(at, span[0])] = 0
            at = max(at, span[1])
        begun[first:last] = [(min(begin, old[0][0]), at)]
        return True


class ErrorFeedback:
    """One peer's residual, and the coding of the parts it belongs to (a `PartCoder` of averaging).

    Synchronous; one thread at a time. Two vectors, the residual and the next one: in memory that is kept from round to
    round, as new pages cost more than coding, or in pages of the caller's.
    """

    def __init__(self, plan: CodingPlan, pages: Callable[[int], Pages | None] = lambda size: None) -> None:
        """`pages`: where a vector of so many bytes should lie; None: in ordinary memory."""
        self._plan, self._pages = plan, pages
        self._residual: Missed | None = None  # None: all zeros
        self._new: Missed | None = None  # of the round under way
        self._spare: Missed | None = None

    @property
    def residual(self) -> Vector | None:
        """What the next gradient gets added; None: nothing."""
        return None if self._residual is None else self._residual.values

    def begin(self, gradient: Vector) -> Missed:
        """A round begins: the residual is added to `gradient`, in place. Gives the new one to be, for `settle`."""
        if self._residual is not None:
            self._residual.add_to(gradient)
        self._new = self._missed(gradient)
        return self._new

    def go_on(self, vector: Vector) -> Missed:
        """A sum of such vectors is summed further, in a round of its own: gives what this one misses, for `settle`."""
        self._new = self._missed(vector)
        return self._new

    def settle_further(self, missed: Sequence[Missed]) -> None:
        """Rounds count to which we brought no gradient, and so no residual: what they missed is added to it."""
        others = list(missed)
        if self._residual is None and others:
            self._residual = others.pop(0)
        if self._residual is not None:
            self._residual.folded(others)
        self._new = None

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        """Code the part that begins at element `begin`; `seen`, perhaps `values`, gets it as decoded. NotFinite."""
        missed, more = self._new.room(begin, len(values)) if self._new is not None else (None, False)
        beside = Beside(_tensor(missed), more, _tensor(seen))
        return encode_missing(torch.from_numpy(values), self._plan, beside, name="a part of the gradient")

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        """A part in the shape and dtype of `like`; ProtocolViolation for anything else."""
        dtype = torch.from_numpy(like[:0]).dtype
        values: Vector = decode(frame, like.shape, dtype, name="a part of a gradient", finite=True).numpy()
        return values

    def decode_into(self, frame: TensorFrame, target: Vector, onto: Vector | None = None) -> None:
        """As `decode`, into `target`, whose shape and dtype the part must have; with `onto` added, if given."""
        decode_onto(frame, torch.from_numpy(target), _tensor(onto), name="a part of a gradient")

    def settle(self, new: Missed | None = None, *further: Missed) -> None:
        """The round that began with `new`, or the last one, counts: what it missed is added to the next one.

        `further`: what the rounds after it missed (`go_on`).
        """
        new = new or self._new
        self._spare, self._new = self._residual, None
        self._residual = new.folded(further) if new is not None else None

    def forget(self) -> None:
        """Begin anew: the parameters are no longer those that the residual was meant for."""
        self._spare, self._residual, self._new = self._residual, None, None

    def _missed(self, like: Vector) -> Missed:
        """An uncleared residual for a vector like this one."""
        spare, self._spare = self._spare, None
        if (pages := self._pages(like.nbytes)) is not None:
            return Missed(np.frombuffer(pages.row, like.dtype), pages)
        values = None if spare is None or spare.in_pages else spare.values
        if values is None or (values.shape, values.dtype) != (like.shape, like.dtype):
            values = np.empty_like(like)
        return Missed(values)


def _tensor(vector: Vector | None) -> torch.Tensor | None:
    return None if vector is None else torch.from_numpy(vector)


def feedback_of(
    averaging: AveragingSection, pages: Callable[[int], Pages | None] = lambda size: None
) -> ErrorFeedback | None:
    """Error feedback for the parts of a run's sums, with its vectors in `pages`; None: they travel as they are."""
    plain = averaging.code in ("none", "powersgd")  # factors are coded gradients already
    return None if plain else ErrorFeedback(CodingPlan(averaging.code, averaging.block), pages)
