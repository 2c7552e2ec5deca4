"""One stage of the model: forward, backward with recomputation, gradient accumulation, optimizer step, state.

All methods are synchronous; callers run them on a Worker, one at a time. Sums are over samples: the gradient of the sum
over samples of each sample's mean loss, so the sums of several peers can be added and divided by the number of samples
once. A sum is rebuilt by recomputing its microbatches with the parameters with which they were added (`as_of`). A
delayed run adds to the next step's sum before the current step's update, so it keeps a copy of the parameters before
the update.

Invariants: inputs are checked before anything changes. A gradient is added to a sum only if the whole backward pass is
finite and no value exceeds `largest`, so a bad microbatch leaves the stage unchanged. ValueError explains what is wrong
(the caller turns it into a refusal). On the CPU, equal inputs give equal bits: inputs that do not start at a cache line
are copied, since a matrix product may sum in another order there.

Torch's batch norms use the statistics of the microbatch in training, in `forward` as in `backward`, and the running
statistics otherwise (`loss`, and `forward` outside of training). Only the first addition of a microbatch to a sum
updates buffers, of any layer; `shared_buffers` describes how each step treats them.

With `limits.offload`, parameters, sums and moments are in host memory and updates are computed there; the device holds
copies of at most two layers (`offload`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from peerd.codec.flat import FlatLayout, FlatSums
from peerd.codec.gpu import settle
from peerd.codec.powersgd import low_rank_of
from peerd.codec.tensors import all_finite, all_finite_in, dtype_name, largest_in, state_digest
from peerd.data.tokenizer import load_vocabulary
from peerd.model.allocator import give_back
from peerd.model.changes import Changes
from peerd.model.frozen_state import FrozenState, MakeRoom
from peerd.model.optimizer import Optimizer
from peerd.model.precision import Precision
from peerd.model.shapes.stage_memory import moment_names
from peerd.model.stage.kept_graph import GraphBytes, KeptGraph, has_room
from peerd.model.stage.offload import ParameterOffload, offloads
from peerd.model.stage.partition import DTYPES, build
from peerd.model.stage.shared_buffers import GradientNotFinite, SharedBuffers, buffers_of
from peerd.run.runfile import RunFile

_CACHE_LINE_BYTES: Final = 64
_LARGE_BYTES: Final = 16 << 20  # of parameters; releasing memory takes milliseconds, so smaller stages skip it


class ResultNotFinite(ValueError):
    """A stage's own result for a microbatch is not finite, or too large for the next stage or the sum."""


class StageModule:
    """Stage number `stage` of the run on `device`. Shapes: B samples, L tokens, D d_model, V vocabulary."""

    def __init__(self, run: RunFile, stage: int, device: str = "cpu") -> None:
        """The initial parameters depend on (run.seed, names) alone. Raises ConfigError if the run has no such stage."""
        self.run = run
        self.stage = stage
        self.device = torch.device(device)
        self.dtype = DTYPES[run.model.dtype]
        self.largest = math.inf  # limit for values of a microbatch that are sent to other stages or summed
        self._precision = Precision(run.precision, self.device)
        self.first = stage == 0
        self.last = stage == run.pipeline.stages - 1
        self.step = 0  # global steps applied
        self._vocab = load_vocabulary(run.model.vocab).size
        offloaded = offloads(run, self.device)
        self._home = torch.device("cpu") if offloaded else self.device  # where parameters, sums and moments are
        self._piece = build(run, [stage]).to(self._home)
        named = dict(self._piece.named_parameters())
        self.layout = FlatLayout(tuple(named), tuple(parameter.shape for parameter in named.values()))
        self._parameters = list(named.values())
        self._flat = torch.cat([p.detach().reshape(-1) for p in self._parameters]) if named else self._zeros(0)
        for parameter, view in zip(self._parameters, self.layout.views(self._flat), strict=True):
            parameter.data = view
        self._offload = ParameterOffload(self._piece, self._flat, self.device, self.last) if offloaded else None
        self._piece.offload = self._offload
        self.ahead = int(run.optimizer.delayed)  # steps after the current one that accept gradients
        self._sums = FlatSums(self.layout, 1 + self.ahead, self.dtype, self._home)
        self.changes = Changes()
        self._saved, self._passed = GraphBytes(lambda: self._flat), GraphBytes(lambda: self._flat)
        self._before: Tensor | None = None  # the parameters before the last step, on the CPU; only in a delayed run
        self._optimizer = Optimizer(run.optimizer, self.layout, self._flat)
        self._norms = [m for m in self._piece.modules() if isinstance(m, _NormBase)]
        kept = buffers_of(self._piece)
        self.buffers = SharedBuffers(kept, run.model.buffers, run.averaging, self.dtype, 1 + self.ahead)
        names, shapes = tuple(self.buffers.shapes), tuple(self.buffers.shapes.values())
        self.total = FlatLayout(self.layout.names + names, self.layout.shapes + shapes)  # of the averaged vector
        self.low_rank = low_rank_of(run.averaging, self.total, self.dtype, run.seed)

    def recompute(self) -> bool:
        """Keep less of a forward pass for its backward from now on (see `ModelPiece`).

        Returns False, without a change, if the stage has buffers, which a second forward would update again.
        """
        self._piece.recomputes = not self.buffers.shared
        return self._piece.recomputes

    @torch.no_grad()
    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        """Forward pass. Input: int64 [B, L] in the first stage, else [B, L, D]. Output: logits [B, L, V] in the last
        stage, else [B, L, D]. `training`: compute as `backward` will recompute it.
        """
        x = self._input(x)
        with self._computing(training) as begin_anew:
            y = self._compute(x)
            begin_anew()
        return y

    @property
    def keeps_graphs(self) -> bool:
        """False if a backward must recompute its forward: with fp16, which takes several attempts; with buffers, which
        a forward updates; and in the last stage, which computes both at once.
        """
        return not (self.last or self._precision.is_scaled or self.buffers.shared)

    def settle(self) -> None:
        """Wait until the device has finished all its work, so that it can be timed."""
        settle(self.device)

    def has_room_for_graph(self) -> bool:
        """False while the device is nearly full. Queries its driver, so it must run on the device's worker."""
        return has_room(self.device, self._saved.bytes)

    @property
    def graph_bytes(self) -> int:
        """Approximate bytes of one graph; 0 before the first one."""
        return self._saved.bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of host memory that one microbatch takes while it is computed, including parameter gradients kept
        there.

        0 before the first measurement. Also 0 if everything is in the device's own memory: the device reports a
        shortage itself.
        """
        most = max(self._saved.most_bytes, self._passed.most_bytes)
        if not most or self._home.type != "cpu":
            return 0
        return self._flat.nbytes + (most if self.device.type == "cpu" else 0)

    def forward_for_backward(self, x: Tensor) -> KeptGraph:
        """Forward pass in training that keeps the graph for a `backward` of the same input; only if `keeps_graphs`."""
        x = self._input(x)
        if not self.first:
            x.requires_grad_()
        with torch.enable_grad(), self._computing(training=True), self._saved.of(x):
            y = self._compute(x)
        return KeptGraph(x, y, self.changes.begun, self._saved.bytes)

    @torch.no_grad()
    def loss(self, x: Tensor, targets: Tensor) -> float:
        """Loss of the last stage in nats: cross-entropy, averaged over tokens and then over samples."""
        x = self._input(x)
        with self._computing(training=False) as begin_anew:
            total = self._loss_sum(x, self._targets(targets, x))
            begin_anew()
        return float(total) / x.shape[0]

    def backward(
        self,
        x: Tensor,
        grad_or_targets: Tensor,
        sign: float = 1.0,
        ahead: int = 0,
        again: bool = False,
        graph: KeptGraph | None = None,
    ) -> tuple[Tensor | None, float]:
        """Recompute forward, then add `sign` times the gradient of the loss sum to the sum of the current step.

        With `ahead` 1 it is added to the next step's sum instead; the current parameters are used in any case. `again`:
        it was added before, to a sum that is being rebuilt. `graph`: graph of the forward of the same input, used
        instead of recomputing unless the parameters have changed. `grad_or_targets`: d(loss sum)/d(output) [B, L, D],
        or int64 targets [B, L] in the last stage. Returns d(loss sum)/dx (without the sign; None in the first stage)
        and the loss sum over samples (0 except in the last stage).
        """
        self.changes.need_whole()
        if graph is not None and (graph.used or graph.era != self.changes.begun):
            graph = None
        x = self._input(x) if graph is None else graph.x
        inputs = [] if self.first else [x.requires_grad_()]
        if self.last:
            targets, seed = self._targets(grad_or_targets, x), None
        else:
            targets, seed = None, self._gradient_of_output(grad_or_targets, x)
        with self._computing(training=True) as begin_anew:

            def compute() -> Tensor:
                begin_anew()  # fp16 may take several attempts
                if graph is not None:
                    graph.used = True
                    return graph.y
                with self._passed.of(x):
                    return self._compute(x) if targets is None else self._loss_sum(x, targets)

            largest = 1.0 / x.shape[1]  # largest gradient of the loss with respect to a logit
            output, gradients = self._precision.backward(compute, [*self._parameters, *inputs], seed, largest)
            self.need_usable("the gradient of this microbatch", gradients)
            if again or sign < 0:
                begin_anew()
            self.buffers.note(ahead, round(sign * x.shape[0]))
        self._sums.add(gradients, sign, ahead)
        return (None if self.first else gradients[-1]), (float(output.detach()) if self.last else 0.0)

    def need_usable(self, what: str, results: Iterable[Tensor]) -> None:
        """Raises ResultNotFinite unless all values are finite and at most `largest`. Waits for a GPU once."""
        found = largest_in(results)
        if not math.isfinite(found):
            raise ResultNotFinite(f"{what} has values that are not finite")
        if found > self.largest:
            reason = f"values larger than {self.largest:.1e} cannot be summed"
            raise ResultNotFinite(f"{what} has values up to {found:.1e}; {reason}")

    def is_finite(self) -> bool:
        """True if all parameters, moments and shared buffers are finite. Waits for a GPU once."""
        return all_finite_in([self._flat, *self._optimizer.moments.values(), *self.buffers.shared.values()])

    @contextmanager
    def _computing(self, training: bool) -> Iterator[Callable[[], None]]:
        """Context manager of a computation. An error in it, or calling the yielded function, restores the buffers."""
        try:
            with self._with_buffers(training) as begin_anew:
                yield begin_anew
        finally:
            if self._offload is not None:
                self._offload.forget()

    @contextmanager
    def _with_buffers(self, training: bool) -> Iterator[Callable[[], None]]:
        if not self.buffers.shared:
            yield lambda: None
            return
        before = self.buffers.copies()
        for norm in self._norms:
            norm.training = training
        done = False
        try:
            yield lambda: self.buffers.put_back(before)
            self._check_buffers()
            done = True
        finally:
            for norm in self._norms:
                norm.training = False
            if not done:
                self.buffers.put_back(before)

    def _check_buffers(self) -> None:
        try:
            self.buffers.check()
        except GradientNotFinite as error:
            raise ResultNotFinite(str(error)) from None

    @contextmanager
    def as_of(self, at: int) -> Iterator[None]:
        """Inside this context, compute with the parameters after `at` global steps: the current or previous ones."""
        if at == self.step:
            yield
            return
        assert at == self.step - 1, "parameters are kept for one previous step only"
        assert self._before is not None
        self.changes.announce()
        now = self._flat.clone()
        self._flat.copy_(self._before)
        try:
            yield
        finally:
            self._flat.copy_(now)

    def empty_sum(self) -> None:
        """Clear the sum of the current step."""
        self._sums.clear(0)
        self.buffers.clear(0)

    def sum_is_finite(self) -> bool:
        """True if all values in the current step's sum are finite."""
        return all_finite(self._sums.due)

    def gradient(self, leads: bool = True) -> Tensor:
        """The current step's sum, followed by the part for buffers, flat [total.count].

        If possible this is the sum itself, not a copy. It will not change any more, and must not be written to.
        """
        self._give_back()
        if not self.buffers.shared:
            return self._sums.lend()
        return torch.cat([self._sums.due, torch.from_numpy(self.buffers.part(leads)).to(self._home)])

    def _give_back(self) -> None:
        """Return freed memory to the system before a round of averaging and after a step, if the stage is large."""
        if self._flat.nbytes >= _LARGE_BYTES:
            give_back()

    def apply(self, gradient: Tensor, samples: int = 1) -> None:
        """One optimizer step with `gradient / samples`, flat [total.count], which is not changed. Increments `step` and
        drops the current sum.
        """
        _need("the mean gradient", gradient, torch.Size([self.total.count]), self.dtype)
        _need_finite("the mean gradient", gradient)
        self.changes.need_whole()
        before = self._flat.to("cpu", copy=True) if self.ahead else None
        own = gradient[: self.layout.count]
        room = self._optimizer.room(own)
        with self.changes.one():
            self._before = before
            self._optimizer.update(self._flat, own, self.step, samples, room)
            self.step += 1
            self._sums.step()
            if self.buffers.shared:
                self.buffers.step([v.cpu() for v in self.total.views(gradient)[len(self._parameters) :]])
        self._give_back()

    def clear(self) -> None:
        """Clear the sums of all steps."""
        self._sums.clear_all()
        self.buffers.clear_all()
        self._before = None

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of everything needed to continue from a step's end, bit for bit (without gradient sums)."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.state_views().items()}

    def freeze(self, make_room: MakeRoom | None = None) -> FrozenState:
        """The current state, of which only those parts are copied that are not read before the next change."""
        return FrozenState(self.state_views(), self.changes, make_room)

    def state_views(self) -> dict[str, Tensor]:
        """The tensors of `state` by name, uncopied, except that `step` is a copy."""
        self.changes.need_whole()
        return self._views()

    def _views(self) -> dict[str, Tensor]:
        views = {f"param/{name}": v for name, v in zip(self.layout.names, self.layout.views(self._flat), strict=True)}
        for moment in moment_names(self.run.optimizer):
            parts = self.layout.views(self._optimizer.moments[moment])
            views |= {f"opt/{name}/{moment}": v for name, v in zip(self.layout.names, parts, strict=True)}
        if self.low_rank is not None:
            views |= self.low_rank.state()
        views |= {f"buffer/{name}": tensor for name, tensor in self.buffers.shared.items()}
        return views | {"step": torch.tensor(self.step, dtype=torch.int64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state and clear the sums; raises ValueError, before any change, if it does not fit."""
        mine = self._views()
        _need_same_names(mine.keys(), state.keys())
        for name, tensor in mine.items():
            _need(name, state[name], tensor.shape, tensor.dtype)
            _need_finite(name, state[name])
        if int(state["step"]) < 0:
            raise ValueError(f"step is {int(state['step'])}; it must not be negative")
        with self.changes.one(), torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])
            self.buffers.load(state)
            self.step = int(state["step"])
            if self.low_rank is not None:
                self.low_rank.forget()
            self.clear()

    def digest(self) -> bytes:
        """32-byte hash of `state()`: equal digests mean equal bits."""
        return state_digest(self.state_views())

    def _compute(self, x: Tensor) -> Tensor:
        """The layers' output, in the run's dtype."""
        with self._precision.casting():
            y: Tensor = self._piece(x)
        return y.to(self.dtype)

    def _loss_sum(self, x: Tensor, targets_BL: Tensor) -> Tensor:
        """Sum over samples of the mean over tokens of the cross-entropy."""
        logits_BLV = self._compute(x)
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum") / targets_BL.shape[1]

    def _input(self, x: Tensor) -> Tensor:
        """`x` after checks, on the device, and detached."""
        self.changes.need_whole()
        context, width = self.run.model.context, self.run.model.d_model
        if x.ndim != (2 if self.first else 3) or x.shape[0] < 1 or not 1 <= x.shape[1] <= context:
            form = "[samples, tokens]" if self.first else f"[samples, tokens, {width}]"
            raise ValueError(f"stage {self.stage} takes {form} with up to {context} tokens, not {list(x.shape)}")
        if self.first:
            return self._tokens("the input", x, x.shape)
        return self._floats("the input", x, torch.Size([*x.shape[:2], width]))

    def check_targets(self, targets: Tensor) -> None:
        """Raises ValueError unless `targets` are valid targets of a microbatch."""
        context = self.run.model.context
        if targets.ndim != 2 or not 1 <= targets.shape[1] <= context:
            raise ValueError(f"targets are [samples, tokens] with up to {context} tokens, not {list(targets.shape)}")
        self._need_tokens("the targets", targets, targets.shape)

    def _targets(self, targets: Tensor, x: Tensor) -> Tensor:
        if not self.last:
            raise ValueError(f"stage {self.stage} is not the last stage and accepts no targets")
        return self._tokens("the targets", targets, x.shape[:2])

    def _gradient_of_output(self, gradient: Tensor, x: Tensor) -> Tensor:
        return self._floats("the output's gradient", gradient, torch.Size([*x.shape[:2], self.run.model.d_model]))

    def _tokens(self, what: str, tokens: Tensor, shape: torch.Size) -> Tensor:
        self._need_tokens(what, tokens, shape)
        return tokens.detach().to(self.device)

    def _need_tokens(self, what: str, tokens: Tensor, shape: torch.Size) -> None:
        _need(what, tokens, shape, torch.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab:
            raise ValueError(f"{what} has token {low if low < 0 else high}; the vocabulary is 0 to {self._vocab - 1}")

    def _floats(self, what: str, values: Tensor, shape: torch.Size) -> Tensor:
        _need(what, values, shape, self.dtype)
        _need_finite(what, values)
        values = values.detach().to(self.device).contiguous()
        return values.clone() if values.data_ptr() % _CACHE_LINE_BYTES else values

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self._home)


def _need(what: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        found, expected = f"{list(tensor.shape)} {dtype_name(tensor.dtype)}", f"{list(shape)} {dtype_name(dtype)}"
        raise ValueError(f"{what} is {found}; expected {expected}")


def _need_finite(what: str, *tensors: Tensor) -> None:
    if not all_finite_in([tensor.detach() for tensor in tensors]):
        raise ValueError(f"{what} has values that are not finite")


def _need_same_names(mine: Iterable[str], theirs: Iterable[str]) -> None:
    missing, unknown = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    if missing:
        raise ValueError(f"the state lacks {missing[0]} ({len(missing)} names are missing, {len(unknown)} unknown)")
    if unknown:
        raise ValueError(f"the state has the unknown {unknown[0]} ({len(unknown)} names are unknown)")
