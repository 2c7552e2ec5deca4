"""A stage as served to other peers: counts each microbatch once, and runs one step at a time.

Wraps a StageModule. For each microbatch of the current step it keeps the received frames of inputs and output gradient,
and the answer (`microbatch_books`). A repeated call gets the kept answer. The kept data is bounded, also per trainer.
All methods are synchronous and run on the device's worker, one at a time.

In a delayed run, microbatches of the next step (`early`) are accepted too: they are computed with the current
parameters, which are one step old when they count, and kept apart until then. Malicious input: tensors of wrong shape,
dtype or value raise ValueError before anything changes. A result that is not finite or too large, from usable input, is
this stage's own fault and raises ResultNotFinite, also without any change.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import decode
from peerd.codec.powersgd import PowerSgd
from peerd.codec.tensors import TORCH_DTYPES, dtype_name, largest_in, raw_bytes, values_of
from peerd.core.errors import PeerdError
from peerd.core.limits import HELD_BATCHES, HELD_BATCHES_PER_TRAINER, HELD_PADDING_BYTES
from peerd.messages.state import TensorSpec
from peerd.messages.swarm import MAX_MICROBATCHES, Mb
from peerd.model.frozen_state import FrozenState, MakeRoom
from peerd.model.stage.kept_graph import KeptGraph
from peerd.model.stage.microbatch_books import KeptMicrobatch, MicrobatchBook, MicrobatchBooks, StageOutcome, Stale
from peerd.model.stage.stage_module import ResultNotFinite, StageModule
from peerd.run.runfile import RunFile

Vector = np.ndarray[Any, np.dtype[Any]]

_CODED: Final = 2.0  # factor by which a code may enlarge a value of the neighbouring stage


class Unusable(PeerdError):
    """Raised if the gradient sum overflows; `mbs` are the microbatches that make it overflow."""

    def __init__(self, mbs: list[Mb]) -> None:
        super().__init__(f"{len(mbs)} microbatches cannot be summed")
        self.mbs = mbs


class Model(MicrobatchBooks):
    """The model of a member of a run, either a stage of the run or a user's own model: accepts gradients, steps with
    averages, serves its state.
    """

    low_rank: PowerSgd | None  # the PowerSGD coding of the sum, or None if another code is used; its Q is in the state

    @abstractmethod
    def is_finite(self) -> bool:
        """True if all parameters, buffers and optimizer state are finite."""

    @abstractmethod
    def vector(self, leads: bool = True) -> Vector:
        """The current step's sum, flat; it must not be written to. `leads`: this peer has the lowest id of those that
        average.
        """

    @abstractmethod
    def vector_outline(self) -> TensorSpec:
        """Dtype and shape of `vector`, without copying anything."""

    @abstractmethod
    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`, which is not changed, and drop the current sum.

        The next step's sum becomes the current one.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of everything needed to continue from a step's end, bit for bit."""

    @abstractmethod
    def freeze(self, make_room: MakeRoom | None = None) -> FrozenState:
        """The same state, to be read piece by piece while training goes on. `make_room` allocates memory for
        copies.
        """

    @abstractmethod
    def outline(self) -> list[TensorSpec]:
        """Name, dtype and shape of each item of the state, sorted by name, without copying anything."""

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None:
        """Load a whole state and clear all sums; raises ValueError, before any change, if it does not fit."""


class ServedStage(Model):
    """Stage `stage` of `run`, ready to serve; `module.step` counts the global steps."""

    def __init__(self, run: RunFile, stage: int, device: str, module: StageModule | None = None) -> None:
        """`module`: used instead of a plain StageModule, such as a trunk, which computes microbatches in segments."""
        self.run = run
        self.module = module or StageModule(run, stage, device)
        # With this limit a whole batch can be summed, and an optimizer can square the sum, without overflow.
        self.module.largest = math.sqrt(torch.finfo(self.module.dtype).max) / MAX_MICROBATCHES
        super().__init__()
        self.low_rank = self.module.low_rank
        self._batch = max(1, run.batch.target_samples // run.pipeline.microbatch)
        self._called: dict[str, None] = {}  # trainers, the latest caller last

    def forward(self, step: int | None, x: Tensor, keep_graph: bool = False) -> StageOutcome:
        """Compute the output of `x` as in training or, if `step` is None, at any step and as in evaluation.

        `keep_graph`: also keep the graph for the backward of the same input, if this stage keeps graphs and has the
        memory.
        """
        began = time.perf_counter()
        self._ahead(step)
        if keep_graph and step is not None and self.module.keeps_graphs and self.module.has_room_for_graph():
            graph = self.module.forward_for_backward(_whole_numbers_as_int64(x))
            return StageOutcome(self._usable_output(x, graph.y.detach()), 0.0, self._since(began), graph)
        y = self.module.forward(_whole_numbers_as_int64(x), training=step is not None)
        return StageOutcome(self._usable_output(x, y), 0.0, self._since(began))

    def _usable_output(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the output `y` of the input `x`; raises ResultNotFinite if the next stage cannot use it."""
        with self._judging(x):
            self.module.need_usable("the output for this microbatch", [y])
        return y

    @contextmanager
    def _judging(self, *given: Tensor) -> Iterator[None]:
        """Context manager for computing with a caller's tensors `given`: decides who caused a ResultNotFinite.

        If these tensors are too large, the caller did, and ValueError is raised instead. Every stage keeps the values
        that it sends below `largest`, so an honest caller never exceeds it.
        """
        try:
            yield
        except ResultNotFinite as error:
            largest = largest_in([tensor for tensor in given if tensor.is_floating_point()])
            if largest > _CODED * self.module.largest:
                raise ValueError(f"{error}: the input has values up to {largest:.1e}") from None
            raise

    def loss(self, x: Tensor, targets: Tensor) -> StageOutcome:
        """The loss sum over the samples (last stage only)."""
        began = time.perf_counter()
        total = self.module.loss(_whole_numbers_as_int64(x), _whole_numbers_as_int64(targets)) * x.shape[0]
        return StageOutcome(None, total, self._since(began))

    def check_targets(self, targets: Tensor) -> None:
        """Raises ValueError unless `targets` are valid targets of a microbatch, for any stage."""
        self.module.check_targets(_whole_numbers_as_int64(targets))

    def backward(
        self,
        step: int,
        mb: Mb,
        tensors: tuple[Tensor, Tensor],
        frames: Sequence[TensorFrame],
        graph: KeptGraph | None = None,
    ) -> StageOutcome:
        """Add the gradient of `mb` to the sum of `step` once; returns the input's gradient.

        `tensors`: inputs, and output gradients or targets. `frames`: the frames that these were decoded from, which are
        kept. `graph`: graph of the inputs' forward.
        """
        began = time.perf_counter()
        ahead, book = self._ahead(step), self._book(step)
        if (before := self.found(step, mb)) is not None:
            return before
        x, target = map(_whole_numbers_as_int64, tensors)
        _need_no_padding(frames, x, target)
        with self._judging(x, target):
            gradient, loss_sum = self.module.backward(x, target, ahead=ahead, graph=graph)
        outcome = StageOutcome(gradient, loss_sum, self._since(began))
        book[mb] = KeptMicrobatch(self.module.step, frames, outcome)
        return outcome

    def found(self, step: int, mb: Mb) -> StageOutcome | None:
        """The outcome of an earlier backward of `mb` in `step`, or None if there was none or it was dropped."""
        kept = self._book(step).get(mb)
        return kept.outcome if kept is not None else None

    def output_again(self, step: int, mb: Mb) -> StageOutcome:
        """Recompute the output of a microbatch whose backward ran here, with the same parameters; Stale if it is not
        kept.

        The output is not kept, and nothing changes.
        """
        began = time.perf_counter()
        kept = self._book(step).get(mb)
        if kept is None or not kept.frames:
            raise Stale("the microbatch is not kept here")
        with self.module.as_of(kept.at):
            x = _whole_numbers_as_int64(decode(kept.frames[0], name="a kept input"))
            y = self._usable_output(x, self.module.forward(x, training=True))
        return StageOutcome(y, 0.0, self._since(began))

    @property
    def graph_bytes(self) -> int | None:
        """Approximate bytes of one forward's graph; 0 before the first one; None if this stage keeps no graphs."""
        return self.module.graph_bytes if self.module.keeps_graphs else None

    @property
    def activation_bytes(self) -> int:
        """Bytes of host memory that one microbatch takes while it is computed; 0 if unknown."""
        return self.module.activation_bytes

    def make_room(self, step: int, mb: Mb, admitted: Iterable[int]) -> None:
        """Drop kept microbatches if a limit leaves no room for `mb`, which is about to arrive.

        At its trainer's own limit, first drops one whose number is not in `admitted`. At the common limit, drops one of
        the trainer that has not called for longest.
        """
        book = self._book(step)
        self._called.pop(mb.trainer, None)
        self._called[mb.trainer] = None
        if mb in book:
            return
        own = [other for other in book if other.trainer == mb.trainer]
        if len(own) >= HELD_BATCHES_PER_TRAINER * self._batch:
            numbers = set(admitted)
            left = [other for other in own if other.seq not in numbers] or own
            self._let_go(book, left[0], mb.trainer)
        if len(book) >= HELD_BATCHES * self._batch:
            silent = list(self._called)
            self._let_go(book, min(book, key=lambda other: silent.index(other.trainer)), mb.trainer)

    def _let_go(self, book: MicrobatchBook, mb: Mb, caller: str) -> None:
        """Drop `mb`. Forget trainers of which no microbatch is kept any more, except `caller`, who sends one now."""
        book.remove(mb)
        held = {caller, *(other.trainer for other in (*self._held, *self._early))}
        self._called = {trainer: None for trainer in self._called if trainer in held}

    def _steps(self) -> tuple[int, int]:
        return self.module.step, self.module.ahead

    def _empty_sum(self) -> None:
        self.module.empty_sum()

    def _sum_is_finite(self) -> bool:
        return self.module.sum_is_finite()

    def _add_again(self, at: int, group: Iterable[tuple[Mb, KeptMicrobatch]]) -> list[Mb]:
        failed = list[Mb]()
        with self.module.as_of(at):
            for mb, kept in group:
                x, target = (_whole_numbers_as_int64(decode(frame, name="a kept tensor")) for frame in kept.frames)
                try:
                    self.module.backward(x, target, again=True)
                except ValueError:
                    failed.append(mb)
        return failed

    def is_finite(self) -> bool:
        return self.module.is_finite()

    def vector(self, leads: bool = True) -> Vector:
        """The current step's gradient sum, flat; later additions do not change it."""
        vector: Vector = self.module.gradient(leads).cpu().numpy()
        return vector

    def vector_outline(self) -> TensorSpec:
        return TensorSpec("total", dtype_name(self.module.dtype), (self.module.total.count,))

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`; drops the held microbatches, and the early ones become held."""
        self._at_current(step)
        self.module.apply(torch.from_numpy(total), samples)
        self._next_books()

    def state(self) -> dict[str, torch.Tensor]:
        return self.module.state()

    def freeze(self, make_room: MakeRoom | None = None) -> FrozenState:
        return self.module.freeze(make_room)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.module.load_state(state)
        self._clear_books()

    def outline(self) -> list[TensorSpec]:
        views = self.module.state_views()
        return [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in sorted(views.items())]

    def _since(self, began: float) -> float:
        """Seconds since `began`, after the device has finished its work."""
        self.module.settle()
        return time.perf_counter() - began


def _need_no_padding(frames: Sequence[TensorFrame], *tensors: Tensor) -> None:
    """Reject frames with padding, since no code needs much more memory than the tensor itself."""
    held, needed = sum(len(frame.payload) for frame in frames), sum(tensor.nbytes for tensor in tensors)
    if held > needed + HELD_PADDING_BYTES:
        raise ValueError(f"the frames have {held} bytes, for tensors of {needed}")


def _whole_numbers_as_int64(values: Tensor) -> Tensor:
    """Convert integers to int64, which models take; tokens are sent in narrower dtypes."""
    return values if values.is_floating_point() else values.long()


def items_of(state: dict[str, Tensor]) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    """A state as (name, dtype, shape, bytes), sorted by name; shares memory with contiguous tensors on the CPU."""
    return [(n, dtype_name(t.dtype), tuple(t.shape), raw_bytes(t)) for n, t in sorted(state.items())]


def state_of(items: Iterable[tuple[str, str, tuple[int, ...], memoryview]]) -> dict[str, torch.Tensor]:
    """The inverse of `items_of`: tensors that share memory with the items' bytes if these are writable and aligned.

    Raises ValueError if bytes and shape do not match, or the dtype is unknown.
    """
    return {name: _tensor_of(name, dtype, shape, data) for name, dtype, shape, data in items}


def _tensor_of(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    found = TORCH_DTYPES.get(dtype)
    if found is None or data.nbytes != found.itemsize * math.prod(shape):
        raise ValueError(f"{name} of {data.nbytes} bytes is no {dtype} tensor of shape {list(shape)}")
    return values_of(data, found).reshape(shape)
