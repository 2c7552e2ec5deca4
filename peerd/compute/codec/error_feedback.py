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
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from peerd.compute.codec.frames import decode, decode_onto, encode_missing
from peerd.compute.codec.policy import CodingPlan
from peerd.compute.kernels.reference import CodingOutputs
from peerd.core.frame import TensorFrame
from peerd.core.run.runfile import AveragingSection

Vector = np.ndarray[Any, np.dtype[Any]]


class Missed:
    """Residual of a round, while it is made. It begins uncleared: that would cost as much as filling it."""

    __slots__ = ("_begun", "values")

    def __init__(self, values: Vector) -> None:
        self.values = values
        self._begun: list[tuple[int, int]] = []  # where something was added: sorted and apart

    def room(self, begin: int, length: int) -> tuple[Vector, bool]:
        """The place for the residual of the `length` elements from `begin` on.

        True: something stands there that it must be added to, as a part may be coded in several rounds.
        """
        return self.values[begin : begin + length], self._begin(begin, begin + length)

    def whole(self) -> Vector:
        """All of the residual; nothing was missed where nothing was added."""
        if not self._begin(0, len(self.values)):
            self.values.fill(0)
        return self.values

    def folded(self, others: Iterable[Missed]) -> Vector:
        """All of the residual, with those of other rounds added for good."""
        values = self.whole()
        for other in others:
            np.add(values, other.whole(), out=values)
        return values

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

    Synchronous; one thread at a time. Memory: two vectors, kept from round to round: new pages cost more than coding.
    """

    def __init__(self, plan: CodingPlan) -> None:
        self.residual: Vector | None = None  # None: all zeros
        self._plan = plan
        self._new: Missed | None = None  # of the round under way
        self._spare: Vector | None = None

    def begin(self, gradient: Vector) -> Missed:
        """A round begins: the residual is added to `gradient`, in place. Gives the new one to be, for `settle`."""
        if self.residual is not None:
            np.add(gradient, self.residual, out=gradient)
        buffer = self._spare
        if buffer is None or (buffer.shape, buffer.dtype) != (gradient.shape, gradient.dtype):
            buffer = np.empty_like(gradient)
        self._new, self._spare = Missed(buffer), None
        return self._new

    def go_on(self, vector: Vector) -> Missed:
        """A sum of such vectors is summed further, in a round of its own: gives what this one misses, for `settle`."""
        self._new = Missed(np.empty_like(vector))
        return self._new

    def settle_further(self, missed: Sequence[Missed]) -> None:
        """Rounds count to which we brought no gradient, and so no residual: what they missed is added to it."""
        for one in missed:
            self.residual = one.whole() if self.residual is None else np.add(self.residual, one.whole())
        self._new = None

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        """Code the part that begins at element `begin`; `seen`, perhaps `values`, gets it as decoded. NotFinite."""
        missed, more = self._new.room(begin, len(values)) if self._new is not None else (None, False)
        beside = CodingOutputs(_tensor(missed), more, _tensor(seen))
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
        residual = new.folded(further) if new is not None else None
        self._spare, self.residual, self._new = self.residual, residual, None

    def forget(self) -> None:
        """Begin anew: the parameters are no longer those that the residual was meant for."""
        self._spare, self.residual, self._new = self.residual, None, None


def _tensor(vector: Vector | None) -> torch.Tensor | None:
    return None if vector is None else torch.from_numpy(vector)


def feedback_of(averaging: AveragingSection) -> ErrorFeedback | None:
    """Error feedback for the parts of a run's sums; None: they travel as they are."""
    plain = averaging.code in ("none", "powersgd")  # factors are coded gradients already
    return None if plain else ErrorFeedback(CodingPlan(averaging.code, averaging.block))
