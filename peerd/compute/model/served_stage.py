"""A stage as served to other peers: counts each microbatch once, and runs one step at a time.

Wraps a StageModule. For each microbatch of the current step it keeps the received frames of inputs and output gradient,
and the answer. A repeated call gets the kept answer. If a microbatch in the sum must not count, the sum is rebuilt from
the others in their order of arrival, which gives the sum as if it had never arrived. The kept data is bounded, also per
trainer. All methods are synchronous and run on the device's worker, one at a time. Every method that belongs to a step
takes its number and raises `Stale` at any other step.

In a delayed run, microbatches of the next step (`early`) are accepted too: they are computed with the current
parameters, which are one step old when they count, and kept apart until then. Malicious input: tensors of wrong shape,
dtype or value raise ValueError before anything changes. A result that is not finite or too large, from usable input, is
this stage's own fault and raises ResultNotFinite, also without any change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from peerd.compute.codec.frames import decode
from peerd.compute.codec.powersgd import PowerSgd
from peerd.compute.frozen_state import FrozenState, MakeRoom
from peerd.compute.model.kept_graph import KeptGraph
from peerd.compute.model.stage_module import ResultNotFinite, StageModule
from peerd.compute.tensors import TORCH_DTYPES, dtype_name, largest_in, raw_bytes, values_of
from peerd.core.errors import PeerdError
from peerd.core.frame import TensorFrame
from peerd.core.limits import HELD_BATCHES, HELD_BATCHES_PER_TRAINER, HELD_PADDING_BYTES
from peerd.core.messages.state import TensorSpec
from peerd.core.messages.swarm import MAX_MICROBATCHES, Mb
from peerd.core.run.runfile import RunFile

Vector = np.ndarray[Any, np.dtype[Any]]

_CODED: Final = 2.0  # factor by which a code may enlarge a value of the neighbouring stage


class Unusable(PeerdError):
    """These microbatches make the sum overflow."""

    def __init__(self, mbs: list[Mb]) -> None:
        super().__init__(f"{len(mbs)} microbatches cannot be summed")
        self.mbs = mbs


class Stale(PeerdError):
    """The call belongs to a step other than the stage's."""


@dataclass(slots=True)
class StageOutcome:
    """Result of a call. `answer` is a tensor until it is encoded; the frame then replaces it."""

    answer: Tensor | TensorFrame | None  # the output, or the input's gradient (None in the first stage)
    loss_sum: float  # over the samples, in the last stage
    seconds: float  # of computation
    graph: KeptGraph | None = None  # of a forward, if it is kept


@dataclass(slots=True)
class _Kept:
    """One microbatch that this peer holds."""

    frames: Sequence[TensorFrame]  # inputs; the output's gradient, or the targets in the last stage
    outcome: StageOutcome
    at: int  # the step of the parameters that it was computed with
    bytes: int = 0

    def __post_init__(self) -> None:
        answer = self.outcome.answer
        given = answer.nbytes if isinstance(answer, Tensor) else 0
        self.bytes = given + sum(len(frame.payload) for frame in self.frames)


class _Book(dict[Mb, _Kept]):
    """The microbatches of one step, in their order of arrival. `tainted`: the sum contains others, too.

    `bytes`: size of their tensors.
    """

    tainted = False
    bytes = 0

    def __setitem__(self, mb: Mb, kept: _Kept) -> None:
        assert mb not in self
        super().__setitem__(mb, kept)
        self.bytes += kept.bytes

    def __delitem__(self, mb: Mb) -> None:
        self.bytes -= self[mb].bytes
        super().__delitem__(mb)

    def clear(self) -> None:
        super().clear()
        self.bytes = 0


class Model(Protocol):
    """The model of a run's member, either its own stage or a user's: accepts gradients, steps with averages, serves its
    state.
    """

    @property
    def held(self) -> list[Mb]:
        """The microbatches in the sum of the current step."""
        ...

    @property
    def early(self) -> list[Mb]:
        """The microbatches in the sum of the next step; empty except in a delayed run."""
        ...

    @property
    def low_rank(self) -> PowerSgd | None:
        """The PowerSGD coding of the sum, or None if another code is used. Its Q is part of the state."""
        ...

    def keep_only(self, step: int, wanted: Iterable[Mb]) -> list[Mb]:
        """Ensure that the sum of `step` contains only `wanted`; returns the wanted microbatches that are missing."""
        ...

    def unusable(self, step: int) -> list[Mb]:
        """Remove the microbatches that make the sum of `step` overflow, and return them."""
        ...

    def is_finite(self) -> bool:
        """True if all parameters, buffers and optimizer state are finite."""
        ...

    def vector(self, leads: bool = True) -> Vector:
        """The current step's sum, flat; it must not be written to. `leads`: this peer has the lowest id of those that
        average.
        """
        ...

    def vector_outline(self) -> TensorSpec:
        """Dtype and shape of `vector`, without copying anything."""
        ...

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`, which is not changed, and drop the current sum.

        The next step's sum becomes the current one.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of everything needed to continue from a step's end, bit for bit."""
        ...

    def freeze(self, make_room: MakeRoom | None = None) -> FrozenState:
        """The same state, to be read piece by piece while the model goes on. `make_room` allocates room for copies."""
        ...

    def outline(self) -> list[TensorSpec]:
        """Name, dtype and shape of each item of the state, sorted by name, without copying anything."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a whole state and clear all sums; raises ValueError, before any change, if it does not fit."""
        ...


class ServedStage:
    """Stage `stage` of `run`, ready to serve; `module.step` counts the global steps."""

    def __init__(self, run: RunFile, stage: int, device: str, module: StageModule | None = None) -> None:
        """`module`: used instead of a plain StageModule, such as a trunk that microbatches do not cross in one pass."""
        self.run = run
        self.module = module or StageModule(run, stage, device)
        # With this limit a whole batch can be summed, and an optimizer can square the sum, without overflow.
        self.module.largest = math.sqrt(torch.finfo(self.module.dtype).max) / MAX_MICROBATCHES
        self._held, self._early = _Book(), _Book()
        self._batch = max(1, run.batch.target_samples // run.pipeline.microbatch)
        self._called: dict[str, None] = {}  # trainers, the latest caller last
        self._unusable: list[Mb] = []  # found while the sum was rebuilt

    @property
    def held(self) -> list[Mb]:
        """The microbatches in the sum of the current step."""
        return list(self._held)

    @property
    def early(self) -> list[Mb]:
        """The microbatches in the sum of the next step."""
        return list(self._early)

    @property
    def low_rank(self) -> PowerSgd | None:
        """The PowerSGD coding of the sum, or None if another code is used."""
        return self.module.low_rank

    def forward(self, step: int | None, x: Tensor, keep_graph: bool = False) -> StageOutcome:
        """Compute the output of `x` as in training or, if `step` is None, at any step and as in evaluation.

        `keep_graph`: also keep the graph for the backward of the same input, if this stage keeps graphs and has room.
        """
        began = time.perf_counter()
        self._at(step)
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
        """Scope of a computation: blames a result that is not finite on the caller if its tensors are too large.

        Then it raises ValueError. Every stage keeps what it sends below `largest`, so an honest caller never exceeds
        it.
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
        ahead = self._at(step)
        book = self._early if ahead else self._held
        kept = book.get(mb)
        if kept is not None:
            return kept.outcome
        x, target = map(_whole_numbers_as_int64, tensors)
        _need_no_padding(frames, x, target)
        with self._judging(x, target):
            gradient, loss_sum = self.module.backward(x, target, ahead=ahead, graph=graph)
        outcome = StageOutcome(gradient, loss_sum, self._since(began))
        book[mb] = _Kept(frames, outcome, self.module.step)
        return outcome

    def found(self, step: int, mb: Mb) -> StageOutcome | None:
        """The outcome of an earlier backward of `mb` in `step`, or None if there was none or it was dropped."""
        kept = (self._early if self._at(step) else self._held).get(mb)
        return kept.outcome if kept is not None else None

    def output_again(self, step: int, mb: Mb) -> StageOutcome:
        """Recompute the output of a microbatch whose backward ran here, with the same parameters; Stale if it is not
        kept.

        The output is not kept, and nothing changes.
        """
        began = time.perf_counter()
        kept = (self._early if self._at(step) else self._held).get(mb)
        if kept is None or not kept.frames:
            raise Stale("the microbatch is not kept here")
        with self.module.as_of(kept.at):
            x = _whole_numbers_as_int64(decode(kept.frames[0], name="a kept input"))
            y = self._usable_output(x, self.module.forward(x, training=True))
        return StageOutcome(y, 0.0, self._since(began))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors kept for the microbatches in both sums, received and answered."""
        return self._held.bytes + self._early.bytes

    @property
    def graph_bytes(self) -> int | None:
        """Approximate bytes of one forward's graph; 0 before the first one; None if this stage keeps no graphs."""
        return self.module.graph_bytes if self.module.keeps_graphs else None

    @property
    def activation_bytes(self) -> int:
        """Bytes of host memory that one microbatch takes while it is computed; 0 if unknown."""
        return self.module.activation_bytes

    def _note(self, book: _Book, mb: Mb, at: int) -> None:
        """Record a microbatch that the caller added to the sum, without the frames to recompute it."""
        book[mb] = _Kept((), StageOutcome(None, 0.0, 0.0), at)

    def make_room(self, step: int, mb: Mb, admitted: Iterable[int]) -> None:
        """Drop kept microbatches if a limit leaves no room for `mb`, which is about to arrive.

        At its trainer's own limit, first drops one whose number is not in `admitted`. At the common limit, drops one of
        the trainer that has not called for longest.
        """
        book = self._early if self._at(step) else self._held
        self._called.pop(mb.trainer, None)
        self._called[mb.trainer] = None
        if mb in book:
            return
        own = [other for other in book if other.trainer == mb.trainer]
        if len(own) >= HELD_BATCHES_PER_TRAINER * self._batch:
            numbers = set(admitted)
            left = [other for other in own if other.seq not in numbers] or own
            self._let_go(book, left[0])
        if len(book) >= HELD_BATCHES * self._batch:
            silent = list(self._called)
            self._let_go(book, min(book, key=lambda other: silent.index(other.trainer)))

    def _let_go(self, book: _Book, mb: Mb) -> None:
        del book[mb]
        book.tainted = True
        held = {other.trainer for other in (*self._held, *self._early)}
        self._called = {trainer: None for trainer in self._called if trainer in held}

    def keep_only(self, step: int, wanted: Iterable[Mb]) -> list[Mb]:
        """Remove unwanted microbatches; returns those that are wanted but missing, in which case nothing changes."""
        self._under_way(step)
        wanted = set(wanted)
        missing = sorted(wanted - self._held.keys())
        if missing:
            return missing
        for mb in self._held.keys() - wanted:
            del self._held[mb]
            self._held.tainted = True
        if self._held.tainted:
            self._sum_anew()
        return []

    def unusable(self, step: int) -> list[Mb]:
        """Remove the microbatches that make the sum overflow, and return them.

        Each was within the limit when it arrived, and a batch of such gradients cannot overflow, so only a hardware
        fault does.
        """
        self._under_way(step)
        if not self.module.sum_is_finite():
            self._sum_anew()
        if not self.module.sum_is_finite():
            self._unusable += self._held
            self._held.clear()
            self.module.empty_sum()
        found, self._unusable = sorted(self._unusable), []
        return found

    def _sum_anew(self) -> None:
        """Recompute the sum from the held microbatches; those that fail are removed as unusable."""
        self.module.empty_sum()
        self._held.tainted = False
        for at, group in groupby(list(self._held.items()), key=lambda item: item[1].at):
            with self.module.as_of(at):
                for mb, kept in group:
                    x, target = (_whole_numbers_as_int64(decode(frame, name="a kept tensor")) for frame in kept.frames)
                    try:
                        self.module.backward(x, target, again=True)
                    except ValueError:
                        self._unusable.append(mb)
                        del self._held[mb]

    def is_finite(self) -> bool:
        """True if all parameters, buffers and optimizer state are finite."""
        return self.module.is_finite()

    def vector(self, leads: bool = True) -> Vector:
        """The current step's gradient sum, flat; later additions do not change it."""
        vector: Vector = self.module.gradient(leads).cpu().numpy()
        return vector

    def vector_outline(self) -> TensorSpec:
        """Dtype and shape of `vector`, without copying anything."""
        return TensorSpec("total", dtype_name(self.module.dtype), (self.module.total.count,))

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`; drops the held microbatches, and the early ones become held."""
        self._under_way(step)
        self.module.apply(torch.from_numpy(total), samples)
        self._held, self._early = self._early, _Book()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of everything needed to continue from here, bit for bit."""
        return self.module.state()

    def freeze(self, make_room: MakeRoom | None = None) -> FrozenState:
        """The same state, to be read piece by piece while the stage goes on."""
        return self.module.freeze(make_room)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load a whole state; raises ValueError, without a change, if it does not fit."""
        self.module.load_state(state)
        self._held, self._early = _Book(), _Book()

    def outline(self) -> list[TensorSpec]:
        """Name, dtype and shape of each item of the state, sorted by name, without copying anything."""
        views = self.module.state_views()
        return [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in sorted(views.items())]

    def _since(self, began: float) -> float:
        """Seconds since `began`, after the device has finished its work."""
        self.module.settle()
        return time.perf_counter() - began

    def _at(self, step: int | None) -> int:
        """Number of steps that the call is ahead of the parameters."""
        ahead = 0 if step is None else step - self.module.step
        if not 0 <= ahead <= self.module.ahead:
            raise Stale(f"the stage is at step {self.module.step}, the call at {step}")
        return ahead

    def _under_way(self, step: int) -> None:
        if self._at(step):
            raise Stale(f"step {step} has not begun: the stage is at step {self.module.step}")


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
