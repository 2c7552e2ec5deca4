"""A stage as it is served: microbatches that count once, and one step at a time.

Wraps a StageModule. For each microbatch of the step under way it keeps the inputs and the output gradient as they
came, coded, and the answer: a repeat gets the kept answer, and when a microbatch in the sum must not count, the sum is
made anew of those that do, in the order in which they came: it is the sum that had been if the other never had. What is
kept is bounded, also for each trainer. All methods are synchronous and run on the device's worker, one at
a time; every method that belongs to a step says so and is refused at any other (`Stale`). In a delayed run microbatches
of the step after it are taken as well, `early` ones: they are computed with the parameters of now, which are one step
old when they count, and kept apart until then. Hostile input: tensors of wrong shape, dtype or value raise ValueError
before anything changes. A result that is not finite, or too large, raises ResultNotFinite where the input was usable:
then it is this stage's own, and nothing has changed either.
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
from peerd.compute.frozen_state import FrozenState
from peerd.compute.model.kept_graph import KeptGraph
from peerd.compute.model.stage_module import ResultNotFinite, StageModule
from peerd.compute.tensors import TORCH_DTYPES, dtype_name, largest_in, raw_bytes, values_of
from peerd.compute.worker import Timed
from peerd.core.errors import PeerdError
from peerd.core.frame import TensorFrame
from peerd.core.limits import HELD_BATCHES, HELD_BATCHES_PER_TRAINER, HELD_PADDING_BYTES
from peerd.core.messages.state import TensorSpec
from peerd.core.messages.swarm import MAX_MICROBATCHES, Mb
from peerd.core.run.runfile import RunFile

Vector = np.ndarray[Any, np.dtype[Any]]

_CODED: Final = 2.0  # times that a code may enlarge a value of a neighbouring stage


class Unusable(PeerdError):
    """These microbatches bring the sum out of the range of numbers."""

    def __init__(self, mbs: list[Mb]) -> None:
        super().__init__(f"{len(mbs)} microbatches cannot be summed")
        self.mbs = mbs


class Stale(PeerdError):
    """The call belongs to another step than the stage's."""


@dataclass(slots=True)
class StageOutcome(Timed):
    """Result of a call. The answer is a tensor until somebody has coded it and put the frame in its place."""

    answer: Tensor | TensorFrame | None  # the output, or the input's gradient (none in the first stage)
    loss_sum: float  # over the samples, in the last stage
    seconds: float  # of computing
    graph: KeptGraph | None = None  # of a forward, where it is kept


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
    """The microbatches of one step, in the order in which they came. `tainted`: the sum has others in it, too.

    `bytes`: of their tensors.
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
    """The model that a member of a run holds, its own stage or a user's: gradients go in, averages step it, newcomers
    copy it.
    """

    @property
    def held(self) -> list[Mb]:
        """The microbatches in the sum of the step under way."""
        ...

    @property
    def early(self) -> list[Mb]:
        """Those in the sum of the step after it; only a delayed run has any."""
        ...

    @property
    def low_rank(self) -> PowerSgd | None:
        """The low-rank code of the sum, if it travels in factors; what that keeps from round to round is part of the
        state.
        """
        ...

    def keep_only(self, step: int, wanted: Iterable[Mb]) -> list[Mb]:
        """See to it that nothing but `wanted` is in the sum of `step`; returns what of it is missing."""
        ...

    def unusable(self, step: int) -> list[Mb]:
        """The microbatches that bring the sum of `step` out of the range of numbers; they are in it no longer."""
        ...

    def is_finite(self) -> bool:
        """True when all parameters, buffers and optimizer state are finite."""
        ...

    def vector(self, leads: bool = True) -> Vector:
        """The sum of the step under way, flat, as it is now; it must not be written to. `leads`: this peer has the
        lowest id of those that average.
        """
        ...

    def vector_outline(self) -> TensorSpec:
        """Dtype and shape of what `vector` gives, without copying anything."""
        ...

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`, which stays as it is; what was held is counted and forgotten.

        What was early is held from then on.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of all that is needed to go on from a step's end, bit for bit."""
        ...

    def freeze(self) -> FrozenState:
        """The same state, to be read piece by piece while the model goes on."""
        ...

    def describe(self) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
        """What `state` gives as (name, dtype, shape, bytes), sorted by name."""
        ...

    def outline(self) -> list[TensorSpec]:
        """Name, dtype and shape of what `describe` gives, in its order, without copying anything."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a whole state and forget all sums; ValueError, before any change, when it does not fit."""
        ...


class ServedStage:
    """Stage `stage` of `run`, ready to serve; `module.step` counts the global steps."""

    def __init__(self, run: RunFile, stage: int, device: str, module: StageModule | None = None) -> None:
        """`module`: the stage's own, where it is not one that microbatches pass through in one go."""
        self.run = run
        self.module = module or StageModule(run, stage, device)
        # A batch of such gradients can be summed, and the sum be squared by an optimizer.
        self.module.largest = math.sqrt(torch.finfo(self.module.dtype).max) / MAX_MICROBATCHES
        self._held, self._early = _Book(), _Book()
        self._batch = max(1, run.batch.target_samples // run.pipeline.microbatch)
        self._called: dict[str, None] = {}  # trainers, the latest caller last
        self._unusable: list[Mb] = []  # found while the sum was made anew

    @property
    def held(self) -> list[Mb]:
        """The microbatches in the sum of the step under way."""
        return list(self._held)

    @property
    def early(self) -> list[Mb]:
        """The microbatches in the sum of the step after it."""
        return list(self._early)

    @property
    def low_rank(self) -> PowerSgd | None:
        """The low-rank code of the sum, if it travels in factors."""
        return self.module.low_rank

    def forward(self, step: int | None, x: Tensor, keep_graph: bool = False) -> StageOutcome:
        """Input to output, as in training; `step` None: whatever step it is, and not in training.

        `keep_graph`: for the backward of the same input, if the stage can do without computing forward again.
        """
        began = time.perf_counter()
        self._at(step)
        if keep_graph and step is not None and self.module.keeps_graphs and self.module.has_room_for_graph():
            graph = self.module.forward_for_backward(_whole_numbers_as_int64(x))
            return StageOutcome(self._usable_output(x, graph.y.detach()), 0.0, self._since(began), graph)
        y = self.module.forward(_whole_numbers_as_int64(x), training=step is not None)
        return StageOutcome(self._usable_output(x, y), 0.0, self._since(began))

    def _usable_output(self, x: Tensor, y: Tensor) -> Tensor:
        """The output `y` for the input `x`; ResultNotFinite if the next stage cannot use it."""
        with self._judging(x):
            self.module.need_usable("the output for this microbatch", [y])
        return y

    @contextmanager
    def _judging(self, *given: Tensor) -> Iterator[None]:
        """The scope of a computation: a result that is not finite is the caller's fault if what it gave is too large.

        Every stage keeps what it sends to `largest`, so an honest caller never gives more.
        """
        try:
            yield
        except ResultNotFinite as error:
            largest = largest_in([tensor for tensor in given if tensor.is_floating_point()])
            if largest > _CODED * self.module.largest:
                raise ValueError(f"{error}: the input has values up to {largest:.1e}") from None
            raise

    def loss(self, x: Tensor, targets: Tensor) -> StageOutcome:
        """Inputs and targets; gives the loss sum over the samples (last stage only)."""
        began = time.perf_counter()
        total = self.module.loss(_whole_numbers_as_int64(x), _whole_numbers_as_int64(targets)) * x.shape[0]
        return StageOutcome(None, total, self._since(began))

    def check_targets(self, targets: Tensor) -> None:
        """ValueError where these are no targets of a microbatch, whatever stage needs them."""
        self.module.check_targets(_whole_numbers_as_int64(targets))

    def backward(
        self,
        step: int,
        mb: Mb,
        tensors: tuple[Tensor, Tensor],
        frames: Sequence[TensorFrame],
        graph: KeptGraph | None = None,
    ) -> StageOutcome:
        """Inputs, then output gradients or targets: accumulate `mb` once for `step`, give the input's gradient.

        `frames` are what `tensors` were decoded from; they are kept. `graph`: of the inputs' forward.
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
        """The outcome of a backward of `step` that was made here; None: there was none, or it was let go of."""
        kept = (self._early if self._at(step) else self._held).get(mb)
        return kept.outcome if kept is not None else None

    def output_again(self, step: int, mb: Mb) -> StageOutcome:
        """The output for a microbatch whose backward was made here, by the parameters of then; Stale: it is not kept.

        What is answered is not kept: nothing changes.
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
        """Bytes of what is kept of the microbatches in both sums: their tensors in and out."""
        return self._held.bytes + self._early.bytes

    @property
    def graph_bytes(self) -> int | None:
        """About the bytes of one forward's graph; 0 before the first; None where none is kept."""
        return self.module.graph_bytes if self.module.keeps_graphs else None

    @property
    def activation_bytes(self) -> int:
        """Bytes of the machine's memory that one microbatch takes while it is computed; 0: not known."""
        return self.module.activation_bytes

    def _note(self, book: _Book, mb: Mb, at: int) -> None:
        """Note a microbatch that was added by itself, with nothing of which it could be computed again."""
        book[mb] = _Kept((), StageOutcome(None, 0.0, 0.0), at)

    def make_room(self, step: int, mb: Mb, admitted: Iterable[int]) -> None:
        """Let go of what keeps `mb` out, before it comes: first of its own trainer's, what is `admitted` no longer.

        Then of whoever has not called for longest: what is left behind by trainers that came and went.
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
        """Take out what is not wanted; returns what is wanted but not held (then nothing was changed)."""
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
        """The microbatches that bring the sum out of the range of numbers; they are in it no longer.

        Each alone was within it when it came, and a batch of such cannot leave it: only a machine's fault does.
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
        """Compute the sum anew, of what is held; what cannot be computed any more is unusable."""
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
        """True when all parameters, buffers and optimizer state are finite."""
        return self.module.is_finite()

    def vector(self, leads: bool = True) -> Vector:
        """The gradient sum of the step under way, flat; what is added later does not change it."""
        vector: Vector = self.module.gradient(leads).cpu().numpy()
        return vector

    def vector_outline(self) -> TensorSpec:
        """Dtype and shape of what `vector` gives, without copying anything."""
        return TensorSpec("total", dtype_name(self.module.dtype), (self.module.total.count,))

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`; what was held is counted, what was early is held now."""
        self._under_way(step)
        self.module.apply(torch.from_numpy(total), samples)
        self._held, self._early = self._early, _Book()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all that is needed to go on bit for bit from here, on the CPU."""
        return self.module.state()

    def freeze(self) -> FrozenState:
        """All that is needed to go on from here, to be read piece by piece while the stage goes on."""
        return self.module.freeze()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a whole state; ValueError (and no change) when it does not fit."""
        self.module.load_state(state)
        self._held, self._early = _Book(), _Book()

    def describe(self) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
        """A frozen copy of the state as (name, dtype, shape, bytes), sorted by name."""
        return items_of(self.state())

    def outline(self) -> list[TensorSpec]:
        """Name, dtype and shape of what `describe` gives, in its order, without copying anything."""
        views = self.module.state_views()
        return [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in sorted(views.items())]

    def _since(self, began: float) -> float:
        """Seconds since then, once the device has done its part."""
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
            raise Stale(f"step {step} is not under way yet: the stage is at step {self.module.step}")


def _need_no_padding(frames: Sequence[TensorFrame], *tensors: Tensor) -> None:
    """Refuse frames with padding: no code of a tensor needs much more room than the tensor."""
    held, needed = sum(len(frame.payload) for frame in frames), sum(tensor.nbytes for tensor in tensors)
    if held > needed + HELD_PADDING_BYTES:
        raise ValueError(f"the frames have {held} bytes, for tensors of {needed}")


def _whole_numbers_as_int64(values: Tensor) -> Tensor:
    """Tokens travel as narrow as they can; models take int64."""
    return values if values.is_floating_point() else values.long()


def items_of(state: dict[str, Tensor]) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    """A state as (name, dtype, shape, bytes), sorted by name; shares memory with contiguous tensors on the CPU."""
    return [(n, dtype_name(t.dtype), tuple(t.shape), raw_bytes(t)) for n, t in sorted(state.items())]


def state_of(items: Iterable[tuple[str, str, tuple[int, ...], memoryview]]) -> dict[str, torch.Tensor]:
    """The inverse of `items_of`: tensors that share memory with the items' bytes where these are writable and aligned.

    ValueError when bytes and shape do not belong together, or the dtype is unknown.
    """
    return {name: _tensor_of(name, dtype, shape, data) for name, dtype, shape, data in items}


def _tensor_of(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    found = TORCH_DTYPES.get(dtype)
    if found is None or data.nbytes != found.itemsize * math.prod(shape):
        raise ValueError(f"{name} of {data.nbytes} bytes is no {dtype} tensor of shape {list(shape)}")
    return values_of(data, found).reshape(shape)
