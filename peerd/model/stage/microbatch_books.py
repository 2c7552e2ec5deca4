"""Microbatches in a model's gradient sums: which ones the sums contain, and what is kept of each until the step ends.

There is one book for the sum of the current step and, in a delayed run, one for the sum of the next step (`early`). A
microbatch counts once. It cannot be subtracted from a sum: if a sum contains one that must not count, the sum is
cleared, and the others are recomputed here from their kept frames, in their order of arrival. This gives the sum as if
the unwanted one had never arrived. Microbatches that were added without frames are dropped from the cleared sum and
reported as missing, so that the caller computes them again.

Methods that belong to a step take its number and raise `Stale` at any other step. Not thread-safe: call them one at a
time, on the device's worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import PeerdError
from peerd.messages.swarm import Mb
from peerd.model.stage.kept_graph import KeptGraph


class Stale(PeerdError):
    """Raised by a call that belongs to a step other than the model's."""


@dataclass(slots=True)
class StageOutcome:
    """Result of computing a microbatch. `answer` is a tensor until it is encoded; the frame then replaces it."""

    answer: Tensor | TensorFrame | None  # the output, or the input's gradient (None in the first stage)
    loss_sum: float  # over the samples, in the last stage
    seconds: float  # of computation
    graph: KeptGraph | None = None  # of a forward, if it is kept


@dataclass(slots=True)
class KeptMicrobatch:
    """The record of one microbatch whose gradient is in a sum: its frames, from which the gradient can be recomputed,
    and the answer to its call.
    """

    at: int  # the step of the parameters that it was computed with
    frames: Sequence[TensorFrame] = ()  # inputs; the output's gradient, or the targets in the last stage
    outcome: StageOutcome | None = None  # the answer to a repeated call
    bytes: int = 0  # of received frames and of the answer

    def __post_init__(self) -> None:
        answer = self.outcome.answer if self.outcome is not None else None
        given = answer.nbytes if isinstance(answer, Tensor) else 0
        self.bytes = given + sum(len(frame.payload) for frame in self.frames)


class MicrobatchBook(dict[Mb, KeptMicrobatch]):
    """The microbatches in one sum, in their order of arrival. `bytes`: size of what is kept of them.

    `tainted`: the sum also contains microbatches that are no longer in the book.
    """

    tainted = False
    bytes = 0

    def __setitem__(self, mb: Mb, kept: KeptMicrobatch) -> None:
        assert mb not in self
        super().__setitem__(mb, kept)
        self.bytes += kept.bytes

    def remove(self, mb: Mb) -> None:
        """Drop a microbatch whose gradient stays in the sum."""
        self.bytes -= self.pop(mb).bytes
        self.tainted = True

    def clear(self) -> None:
        super().clear()
        self.bytes = 0


class MicrobatchBooks(ABC):
    """Base class of models that sum the gradients of microbatches."""

    def __init__(self) -> None:
        self._held, self._early = MicrobatchBook(), MicrobatchBook()
        self._unusable: list[Mb] = []  # found while the sum was recomputed

    # --- the sum ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _steps(self) -> tuple[int, int]:
        """The current step, and the number of steps after it that accept gradients."""

    @abstractmethod
    def _empty_sum(self) -> None:
        """Set the sum of the current step to zero."""

    @abstractmethod
    def _sum_is_finite(self) -> bool:
        """True if the sum of the current step has not overflowed."""

    def _add_again(self, at: int, group: Iterable[tuple[Mb, KeptMicrobatch]]) -> list[Mb]:
        """Recompute microbatches with the parameters of step `at` and add them to the sum; returns those that fail.

        Called only for microbatches with frames.
        """
        return [mb for mb, _ in group]

    # --- the books ----------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[Mb]:
        """The microbatches in the sum of the current step."""
        return list(self._held)

    @property
    def early(self) -> list[Mb]:
        """The microbatches in the sum of the next step."""
        return list(self._early)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors kept for the microbatches in both sums, received and answered."""
        return self._held.bytes + self._early.bytes

    def keep_only(self, step: int, wanted: Iterable[Mb]) -> list[Mb]:
        """Ensure that the sum of `step` contains only `wanted`; returns the wanted microbatches that are missing.

        If the sum lacks some of them from the start, nothing changes.
        """
        self._at_current(step)
        book, wanted = self._held, set(wanted)
        missing = sorted(wanted - book.keys())
        if missing:
            return missing
        for mb in book.keys() - wanted:
            book.remove(mb)
        return self._sum_anew() if book.tainted else []

    def unusable(self, step: int) -> list[Mb]:
        """Remove the microbatches that make the sum of `step` overflow, and return them.

        Each was finite and within the limit when it arrived, so in a stage's own model only a hardware fault
        can cause an overflow.
        """
        self._at_current(step)
        if not self._sum_is_finite():
            self._unusable += self._sum_anew()
            if not self._sum_is_finite():
                self._unusable += self._held
                self._held.clear()
                self._empty_sum()
        found, self._unusable = sorted(self._unusable), []
        return found

    def _sum_anew(self) -> list[Mb]:
        """Clear the current step's sum and recompute it. Returns the microbatches that are dropped for lack of frames.

        Those whose recomputation fails are removed as unusable.
        """
        book = self._held
        book.tainted = True  # until all are added again: a computation that fails leaves a part of the sum
        self._empty_sum()
        if not all(kept.frames for kept in book.values()):
            lost = sorted(book)
            book.clear()
            book.tainted = False
            return lost
        for at, group in groupby(list(book.items()), key=lambda item: item[1].at):
            for mb in self._add_again(at, group):
                self._unusable.append(mb)
                book.bytes -= book.pop(mb).bytes
        book.tainted = False
        return []

    def _book(self, step: int) -> MicrobatchBook:
        """The list of the microbatches in the gradient sum of `step`."""
        return self._early if self._ahead(step) else self._held

    def _ahead(self, step: int | None) -> int:
        """Number of steps that the call is ahead of the parameters; 0 for a call of no step."""
        current, most = self._steps()
        ahead = 0 if step is None else step - current
        if not 0 <= ahead <= most:
            raise Stale(f"the stage is at step {current}, but the call is for step {step}")
        return ahead

    def _at_current(self, step: int) -> None:
        if self._ahead(step):
            raise Stale(f"step {step} has not begun: the stage is at step {self._steps()[0]}")

    def _next_books(self) -> None:
        """Begin the next step: drop the current book; the early one becomes the current one."""
        self._held, self._early = self._early, MicrobatchBook()

    def _clear_books(self) -> None:
        self._held, self._early = MicrobatchBook(), MicrobatchBook()
