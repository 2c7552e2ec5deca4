"""Trunk of a model with experts: all layers but the experts, cut into segments at the calls to them.

A segment ends where samples are sent to a layer of experts, at a junction, and the next one begins with their answers;
the last one ends with the loss. Each call computes one segment, so other microbatches can be computed between two
calls, and no call waits for experts. As in `stage_module`, the forward is recomputed for the backward. A microbatch
uses the parameters of one step from start to end (`era`); at its end these may be one step old in a delayed run, and
`optimizer.most_stale` steps old with an asynchronous trunk. Gradients are those of the sum over samples of each
sample's mean loss, including the balancing loss of the gates; the reported loss excludes it.

Shapes: B samples of text, L tokens, D d_model, V vocabulary; N samples of the experts (tokens, or whole texts) of shape
S, K experts for each, G places in all dimensions of their grid together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peerd.codec.gpu import free_bytes, is_gpu
from peerd.codec.tensors import all_finite, largest_in
from peerd.core.errors import ConfigError
from peerd.experts.model.earlier_parameters import EarlierParameters, Era, Snapshot, TooOld, new_load
from peerd.experts.model.expert_mixture import imbalance, mixed
from peerd.model.layers import ExpertBlock
from peerd.model.shapes.model_shapes import first_with_experts
from peerd.model.stage.footprint import spare_bytes
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.stage_module import ResultNotFinite, StageModule
from peerd.run.grid import grid_of, sample_shapes
from peerd.run.runfile import ExpertsSection, RunFile


@dataclass(frozen=True, slots=True)
class Junction:
    """End of a segment, where samples are sent to experts; also used for the gradients of its three tensors."""

    residual: Tensor  # [B, L, D]; the experts' mean is added to it
    samples: Tensor  # [N, *S]
    scores: Tensor  # [N, G]


@dataclass(frozen=True, slots=True)
class Answers:
    """The experts' outputs for a junction's samples; also used for the gradients of these outputs."""

    outputs: Tensor  # [N, K, *S], zeros where no answer arrived
    columns: Tensor  # int64 [N, K, d]: each expert's coordinates, as columns of the scores
    came: Tensor  # bool [N, K]


class TrunkModule(StageModule):
    """The only stage of a run with experts, in segments 0 to `layers`; segment i ends at layer i of experts."""

    def __init__(self, run: RunFile, device: str = "cpu") -> None:
        check_trunk(run)
        super().__init__(run, 0, device)
        self.section = run.experts or ExpertsSection()
        self.sides = grid_of(run).sides
        self.layers = grid_of(run).layers
        self.loads = new_load()  # number of the loaded state
        self.asynchronous = run.optimizer.asynchronous
        self.most_stale = run.optimizer.most_stale if self.asynchronous else self.ahead  # steps
        self._snapshot: weakref.ref[Snapshot] | None = None  # of the current parameters
        self._earlier = EarlierParameters()
        self.sample_shape, _ = sample_shapes(run)
        self._segments = _segments(run, [name for name, _ in self._piece.steps])
        self._places = [
            [i for i, name in enumerate(self.layout.names) if name.partition(".")[0] in names]
            for names in self._segments
        ]

    @property
    def era(self) -> Era:
        """The era of a microbatch that begins now: the current parameters."""
        if not self.asynchronous:
            return Era(self.step, self.loads)
        snapshot = self._snapshot() if self._snapshot is not None else None
        if snapshot is None:
            snapshot = Snapshot()
            self._snapshot = weakref.ref(snapshot)
        return Era(self.step, self.loads, snapshot)

    def apply(self, gradient: Tensor, samples: int = 1) -> None:
        """Like a stage's; microbatches in progress keep the parameters that they began with, unless these get too old
        or memory is short.
        """
        snapshot = self._snapshot() if self._snapshot is not None else None
        before = self._copied() if snapshot is not None else None
        super().apply(gradient, samples)
        self._snapshot = None
        if snapshot is not None:
            snapshot.flat, snapshot.is_gone = before, before is None
            self._earlier.add(self.step - 1, snapshot)
        self._earlier.let_go_before(self.step - self.most_stale)

    def _copied(self) -> Tensor | None:
        """A copy of the parameters, or None if memory is short even after the oldest copies were freed."""
        while not self._has_room():
            if not self._earlier.let_go_oldest():
                return None
        return self._flat.clone()

    def _has_room(self) -> bool:
        """True if there is memory for a copy in addition to what a step needs."""
        nbytes = self._flat.nbytes
        if is_gpu(self._flat.device):
            return free_bytes(self._flat.device)[0] >= 2 * nbytes
        return spare_bytes(self.run, nbytes) >= nbytes

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Like a stage's; microbatches in progress belong to an earlier era afterwards."""
        super().load_state(state)
        self.loads = new_load()
        self._snapshot = None
        self._earlier.clear()

    def checked(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A checked microbatch, both tensors int64 [B, L], on the device; raises ValueError if it is invalid."""
        x = self._input(tokens)
        return x, self._targets(targets, x)

    # --- one segment --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def depart(self, tokens: Tensor, era: Era) -> Junction:
        """Forward of segment 0."""
        with self._as_of(era):
            return self._junction(0, tokens, None)

    @torch.no_grad()
    def go_on(self, index: int, before: Junction, answers: Answers, era: Era) -> Junction:
        """Forward of a segment between two layers of experts."""
        with self._as_of(era):
            return self._junction(index, before, answers)

    @torch.no_grad()
    def final_loss(self, before: Junction, answers: Answers, targets: Tensor, era: Era) -> float:
        """Forward of the last segment: the loss, summed over samples."""
        with self._as_of(era):
            return float(self._final(before, answers, targets))

    def turn(
        self, before: Junction, answers: Answers, targets: Tensor, era: Era
    ) -> tuple[dict[int, Tensor], Junction, Tensor, float]:
        """Forward and backward of the last segment.

        Returns the gradients of its parameters by number, those of residual and scores at `before` (with zeros for the
        samples, whose gradients the experts have yet to return), those of the answers' outputs, and the loss sum.
        """
        given, outputs = _leaves(before, answers)
        with self._as_of(era):
            loss, found, back = self._backward(
                self.layers,
                (*given, outputs.outputs),
                lambda: self._final(Junction(given[0], before.samples, given[1]), outputs, targets),
                1.0 / targets.shape[1],
            )
        return found, Junction(back[0], torch.zeros_like(before.samples), back[1]), back[2], float(loss.detach())

    def go_back(
        self, index: int, before: Junction, answers: Answers, after: Junction, era: Era
    ) -> tuple[dict[int, Tensor], Junction, Tensor]:
        """Backward of a segment between two layers, from the gradients `after` of its end; returns the same as `turn`,
        without the loss.
        """
        given, outputs = _leaves(before, answers)
        with self._as_of(era):
            _, found, back = self._backward(
                index,
                (*given, outputs.outputs),
                lambda: self._against(
                    self._junction(index, Junction(given[0], before.samples, given[1]), outputs), after
                ),
                _largest(after),
            )
        return found, Junction(back[0], torch.zeros_like(before.samples), back[1]), back[2]

    def arrive(self, tokens: Tensor, after: Junction, era: Era) -> dict[int, Tensor]:
        """Backward of segment 0: gradients of its parameters by number."""
        with self._as_of(era):
            _, found, _ = self._backward(
                0, (), lambda: self._against(self._junction(0, tokens, None), after), _largest(after)
            )
        return found

    def add(self, gradients: Mapping[int, Tensor], ahead: int, share: float = 1.0) -> None:
        """Add `share` times a microbatch's gradients to the sum of the current step, or of the next one if `ahead` is
        1.

        Raises ValueError, without a change, if they cannot be summed.
        """
        whole = [gradients[i] for i in range(len(self._parameters))]
        if share * largest_in(whole) > self.largest:
            raise ValueError(f"the gradient of this microbatch has values above {self.largest:.1e}")
        self._sums.add(whole, share, ahead)

    # --- inside -------------------------------------------------------------------------------------------------

    def _as_of(self, era: Era) -> AbstractContextManager[None]:
        age, reason = self.step - era.at, f"the trunk is at step {self.step}, the microbatch at {era.at}"
        if era.loads != self.loads or age < 0:
            raise Stale(reason)
        if age > self.most_stale:
            raise TooOld(f"{reason}; allowed: {self.most_stale} behind") if self.asynchronous else Stale(reason)
        if era.snapshot is not None and era.snapshot.is_gone:
            raise TooOld(f"{reason}, and there was no memory to keep its parameters")
        return self.as_of(era.at) if era.snapshot is None else self._with(era.snapshot)

    @contextmanager
    def _with(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside this context, compute with the parameters of a snapshot."""
        if snapshot.flat is None:
            yield
            return
        now = [parameter.data for parameter in self._parameters]
        for parameter, view in zip(self._parameters, self.layout.views(snapshot.flat), strict=True):
            parameter.data = view
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, now, strict=True):
                parameter.data = data

    def _junction(self, index: int, source: Tensor | Junction, answers: Answers | None) -> Junction:
        """The end of a segment, in the run's dtype."""
        with self._precision.casting():
            *first, last = self._segments[index]
            x = self._enter(source, answers)
            for name in first:
                x = self._piece.get_submodule(name)(x)
            block = self._piece.get_submodule(last)
            assert isinstance(block, ExpertBlock)
            residual, normed = block(x)
            samples = normed.reshape(-1, *self.sample_shape)
            scores = block.gate(samples if samples.ndim == 2 else samples.mean(1))
        return Junction(residual.to(self.dtype), samples.to(self.dtype), scores.to(self.dtype))

    def _final(self, before: Junction, answers: Answers, targets_BL: Tensor) -> Tensor:
        """Sum over samples of the mean over tokens of the cross-entropy."""
        with self._precision.casting():
            x = self._enter(before, answers)
            for name in self._segments[-1]:
                x = self._piece.get_submodule(name)(x)
        logits_BLV = x.to(self.dtype)
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum") / targets_BL.shape[1]

    def _enter(self, source: Tensor | Junction, answers: Answers | None) -> Tensor:
        """A segment's input: tokens, or the residual plus the experts' mean."""
        if isinstance(source, Tensor):
            return source
        assert answers is not None
        return source.residual + mixed(source.scores, answers.columns, answers.came, answers.outputs).view_as(
            source.residual
        )

    def _against(self, end: Junction, after: Junction) -> Tensor:
        """A scalar with the gradient of the loss: the segment's end times its gradients, plus the balancing loss."""
        total = (end.residual * after.residual).sum() + (end.samples * after.samples).sum()
        total = total + (end.scores * after.scores).sum()
        weight = self.section.balance * end.residual.shape[0]  # the loss of each sample contains it once
        return total + weight * imbalance(end.scores, self.sides) if weight else total

    def _backward(
        self, index: int, inputs: Sequence[Tensor], compute: Callable[[], Tensor], largest: float
    ) -> tuple[Tensor, dict[int, Tensor], Sequence[Tensor]]:
        """The value of `compute`, and its gradients for the segment's parameters (by number) and for `inputs`."""
        parameters = [self._parameters[i] for i in self._places[index]]
        value, gradients = self._precision.backward(compute, [*parameters, *inputs], None, largest)
        if not all(map(all_finite, gradients)) or not all_finite(value.detach()):
            raise ResultNotFinite("the gradient of this microbatch has values that are not finite")
        return value, dict(zip(self._places[index], gradients, strict=False)), gradients[len(parameters) :]


def check_trunk(run: RunFile) -> None:
    """Raise ConfigError for a run without experts, or with a model that the role `trainer` cannot compute."""
    inside, outside = sample_shapes(run)
    m = run.model
    if run.experts is None:
        raise ConfigError("the run file has no experts")
    if m.kind != "gpt":
        raise ConfigError(f"model.kind is {m.kind}; role trainer supports experts only in gpt; use peerd.DMoE instead")
    if grid_of(run).layers > m.layers:
        raise ConfigError(f"experts.layers is {grid_of(run).layers}; allowed for role trainer: up to {m.layers} layers")
    for key, shape in (("input", inside), ("output", outside)):
        if shape not in ((m.d_model,), (m.context, m.d_model)) or shape != inside:
            allowed = f"[{m.d_model}] or [{m.context}, {m.d_model}], the same for input and output"
            raise ConfigError(f"experts.{key} is {list(shape)}; allowed for role trainer: {allowed}")


def _segments(run: RunFile, names: Sequence[str]) -> list[list[str]]:
    """Names of the layers in each segment."""
    found: list[list[str]] = [[]]
    with_experts = {f"block{i}" for i in range(first_with_experts(run), run.model.layers)}
    for name in names:
        found[-1].append(name)
        if name in with_experts:
            found.append([])
    return found


def _leaves(before: Junction, answers: Answers) -> tuple[tuple[Tensor, Tensor], Answers]:
    """Inputs of a segment as leaves of a new graph, so that their gradients are computed."""
    residual, scores, outputs = (t.detach().requires_grad_() for t in (before.residual, before.scores, answers.outputs))
    return (residual, scores), Answers(outputs, answers.columns, answers.came)


def _largest(after: Junction) -> float:
    return max(float(part.abs().max()) for part in (after.residual, after.samples, after.scores))
