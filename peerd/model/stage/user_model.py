"""A user's own model and torch optimizer, as part of a run.

Independent of how the user computes: it accepts gradients, returns their sum, and steps the optimizer and its schedule
with the mean over all peers. Sums are over samples, in float64 if any parameter is, else in float32 (so half precision
loses nothing). Microbatches are not kept: if one in a sum must not count, the whole sum is cleared, and its
microbatches are reported as missing, to be recomputed (`microbatch_books`).

The state for newcomers is the parameters, the optimizer's state for each of them, and the model's buffers
(`shared_buffers`). Its outline is learnt from a step with copies, so a newcomer knows it before its own first step.
Methods are synchronous, one at a time; callers of `commit` and `load` make sure that nothing uses the parameters
meanwhile. Malicious input: a state with other names, shapes or dtypes, or with values that are not finite, raises
ValueError.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import outcome
import torch
from torch import Tensor

from peerd.codec.flat import FlatLayout, FlatSums
from peerd.codec.powersgd import low_rank_of
from peerd.codec.tensors import all_finite, dtype_name, state_digest
from peerd.core.errors import ConfigError
from peerd.messages.state import TensorSpec
from peerd.messages.swarm import Mb, Position
from peerd.model.frozen_state import FrozenState, MakeRoom
from peerd.model.stage.microbatch_books import KeptMicrobatch
from peerd.model.stage.served_stage import Model, Vector
from peerd.model.stage.shared_buffers import GradientNotFinite, Live, SharedBuffers
from peerd.model.user_loop.batch_tail import BatchTail
from peerd.model.user_loop.optimizer_outline import DIMS, outline_of, plain
from peerd.model.user_loop.schedule import Made, Schedule
from peerd.run.runfile import AveragingSection

_NAME_CHARS: Final = 400  # with the optimizer's key it must fit a manifest's 512
_TEXT_CHARS: Final = 1000
_ANY_WAY: Final = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}  # no effect on results


class UserModel(Model):
    """A user's model: the parameters that `optimizer` updates. `step` counts global steps; `failure` is the exception
    that the user's own code raised, if any.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, Tensor]] | None = None,
        lr: Callable[[int], float] | None = None,
        averaging: AveragingSection | None = None,
        delayed: bool = False,
        *,
        scheduler: Made | None = None,
        buffers: tuple[Live, str] = (dict, "average"),
        microbatch: int = 1,
        clip_norm: float = 0.0,
    ) -> None:
        """`named` names every parameter of the optimizer. Raises ConfigError for parameters that cannot be averaged.

        `averaging`: the run's section, whose code may have state of its own. `buffers`: the model's, and how they are
        shared. `microbatch`: samples of a full microbatch. `clip_norm`: maximum norm of the mean gradient; 0: no limit.
        """
        if scheduler is not None and lr is not None:
            raise ConfigError("scheduler and lr are both given; one of them sets the learning rate")
        if not 0 <= clip_norm < math.inf:
            raise ConfigError(f"clip_norm is {clip_norm}; it must be a number above 0, or 0: no clipping")
        super().__init__()
        self.step = 0
        self.failure: BaseException | None = None
        self._optimizer = optimizer
        self._lr = lr
        self._named = _names(optimizer, named)
        self._parameters = list(self._named.values())
        self.layout = FlatLayout(tuple(self._named), tuple(p.shape for p in self._parameters))
        wide = any(p.dtype == torch.float64 for p in self._parameters)
        self.dtype = torch.float64 if wide else torch.float32
        devices = {p.device for p in self._parameters}
        self.delayed = delayed
        device = devices.pop() if len(devices) == 1 else "cpu"
        self._sums = FlatSums(self.layout, 1 + delayed, self.dtype, device)
        self._outline = outline_of(optimizer, self._named)
        averaging = averaging or AveragingSection()
        self.buffers = SharedBuffers(*buffers, averaging, self.dtype, 1 + delayed)
        self._tail = BatchTail(len(self._named), microbatch, averaging, self.dtype, 1 + delayed)
        self._clip_norm = clip_norm
        behind = self.buffers.shapes | self._tail.shapes
        names, shapes = tuple(behind), tuple(behind.values())
        self._total = FlatLayout(self.layout.names + names, self.layout.shapes + shapes)  # of the averaged vector
        self.low_rank = low_rank_of(averaging, self._total, self.dtype, 0)
        self.schedule = Schedule(optimizer, scheduler) if scheduler is not None else None
        self._settings = self._settings_now()

    # --- description --------------------------------------------------------------------------------------------

    def here(self) -> Position:
        """Initial position, derived from the digest of the state: peers with different values never share one."""
        if not (self.step or self._held or self._early):
            self.buffers.begin()  # the user may have loaded weights since the start
        return Position(self.step, state_digest(self.state())[:8])

    def model_text(self) -> str:
        """Names, shapes and dtypes in one line, the same on all peers of a run."""
        parts = [f"{name} {list(p.shape)} {dtype_name(p.dtype)}" for name, p in self._named.items()]
        return _bounded(f"user: {len(parts)} parameters: {', '.join(parts)}{self.buffers.text()}")

    def optimizer_text(self) -> str:
        """The optimizer's class, and all settings that affect its results."""
        kind = type(self._optimizer)
        without = _ANY_WAY | ({"lr"} if self._lr is not None else set())
        names = {id(p): name for name, p in self._named.items()}
        groups = []
        for group in self._optimizer.param_groups:
            settings = [f"{k}={plain(v)}" for k, v in sorted(group.items()) if k not in without and k != "param_names"]
            members = (
                "" if len(self._optimizer.param_groups) == 1 else ":" + "+".join(names[id(p)] for p in group["params"])
            )
            groups.append(f"{', '.join(settings)}{members}")
        follows = f", clip_norm={self._clip_norm}" if self._clip_norm else ""
        follows += f", {self.schedule.text}" if self.schedule is not None else ""
        return _bounded(f"{kind.__module__}.{kind.__qualname__}({'; '.join(groups)}){follows}")

    def digest(self) -> bytes:
        """32-byte hash of the parameters: equal digests mean equal bits."""
        return state_digest({name: p.detach() for name, p in self._named.items()})

    def check_unchanged(self) -> None:
        """Raises ConfigError if the optimizer's parameters, or settings that its schedule does not control, have
        changed.
        """
        now = [id(p) for group in self._optimizer.param_groups for p in group["params"]]
        if now != [id(p) for p in self._parameters]:
            raise ConfigError("the optimizer's parameters have changed; make a new AveragingOptimizer")
        for key, value in self._settings_now().items():
            before = self._settings.get(key, "missing")
            if value != before:
                raise ConfigError(
                    f"{key} was {before} and is {value} now: peers would differ. Pass a torch scheduler, which counts "
                    "global steps, as scheduler=lambda opt: StepLR(opt, 100), and do not call its step()"
                )

    def begin_at(self, step: int) -> None:
        """Continue at `step` of an earlier run; call it before the first microbatch, and after `settings_changed`."""
        self.step = step
        self._follow_schedule()

    def settings_changed(self) -> None:
        """Accept optimizer settings that the user loaded before the start, except those of a schedule."""
        if self.schedule is not None:
            self.schedule.begin_anew()
        self._settings = self._settings_now()

    def _settings_now(self) -> dict[str, str]:
        groups = enumerate(self._optimizer.param_groups)
        return {
            f"{key} of the optimizer's group {index}": plain(value)
            for index, group in groups
            for key, value in group.items()
            if key not in _ANY_WAY and key != "param_names"
        }

    # --- one step -----------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor | None]:
        """The parameters' current gradients, not copied; raises ConfigError if no parameter has one."""
        found = [p.grad for p in self._parameters]
        if all(gradient is None for gradient in found):
            raise ConfigError("no parameter has a gradient: call loss.backward() before step()")
        for name, gradient in zip(self._named, found, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ConfigError(f"the gradient of {name} is sparse: only dense ones can be averaged (sparse=False)")
        return found

    def check_finite(self, gradients: Sequence[Tensor | None]) -> None:
        """Raises GradientNotFinite, with the names, if a gradient or a buffer has a value that is not finite."""
        bad = [n for n, g in zip(self._named, gradients, strict=True) if g is not None and not all_finite(g)]
        if bad:
            gradient = gradients[list(self._named).index(bad[0])]
            assert gradient is not None
            values = int((~torch.isfinite(gradient)).sum())
            more = f", and of {', '.join(bad[1:3])}{f' and {len(bad) - 3} more' * (len(bad) > 3)}" if bad[1:] else ""
            raise GradientNotFinite(
                f"the gradient of {bad[0]} is not finite ({values} of {gradient.numel()} values){more}; "
                "nothing was contributed"
            )
        self.buffers.check()

    def add(self, step: int, mb: Mb, gradients: Sequence[Tensor | None], samples: int) -> bool:
        """Add a microbatch to the sum once: `samples` times its mean gradient. False, and no change, if it is not
        finite.
        """
        ahead, book = self._ahead(step), self._book(step)
        if mb in book:
            return True
        if not all(gradient is None or all_finite(gradient) for gradient in gradients):
            return False
        self._sums.add(gradients, samples, ahead)
        self.buffers.note(ahead, samples)
        self._tail.note(ahead, gradients, samples)
        book[mb] = KeptMicrobatch(self.step)
        return True

    def is_finite(self) -> bool:
        kept = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        tensors = [*(p.detach() for p in self._parameters), *kept, *self.buffers.shared.values()]
        return all(map(all_finite, tensors))

    def _steps(self) -> tuple[int, int]:
        return self.step, int(self.delayed)

    def _sum_is_finite(self) -> bool:
        return all_finite(self._sums.due)

    def _empty_sum(self) -> None:
        self._sums.clear(0)
        self.buffers.clear(0)
        self._tail.clear(0)

    def vector(self, leads: bool = True) -> Vector:
        """Flat copy of the current step's sum, followed by the parts for buffers and the tail (`BatchTail`)."""
        whole = torch.empty(self._total.count, dtype=self.dtype)
        whole[: self.layout.count].copy_(self._sums.due)
        buffers = [self.buffers.part(leads)] if self.buffers.shared else []
        vector: Vector = whole.numpy()
        np.concatenate([*buffers, self._tail.part()], out=vector[self.layout.count :])
        return vector

    def vector_outline(self) -> TensorSpec:
        return TensorSpec("total", dtype_name(self.dtype), (self._total.count,))

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with the mean over `samples`, or fewer if microbatches were short; drops the current sum.

        The next step's sum becomes the current one. Raises ConfigError if the optimizer or the user's learning rate
        raises; the parameters are then unusable.
        """
        self._at_current(step)
        sums = torch.from_numpy(total)
        if sums.dtype != self.dtype or sums.shape != (self._total.count,) or not all_finite(sums):
            raise ValueError("the sum of gradients does not fit, or is not finite")
        views, count = self._total.views(sums), len(self._parameters)
        present, samples = self._tail.read(views, samples)
        means = [view / samples if here or view.any() else None for here, view in zip(present, views, strict=False)]
        self._run_theirs(lambda: self._apply(means))
        self.step += 1
        self._sums.step()
        self.buffers.step(views[count : count + len(self.buffers.shapes)])
        self._tail.step()
        self._next_books()
        self._follow_schedule()

    def _run_theirs(self, job: Callable[[], None]) -> None:
        """Run a job that calls the user's code. An exception of that code is stored in `failure`, and raised as a
        ConfigError, which stops this peer.
        """
        result = outcome.capture(job)
        if isinstance(result, outcome.Error):
            self.failure = result.error
            raise ConfigError(f"the optimizer failed: {type(result.error).__name__}: {result.error}")

    def _follow_schedule(self) -> None:
        """Set the optimizer's settings for the next step."""
        schedule = self.schedule
        if schedule is not None:
            self._run_theirs(lambda: schedule.go_to(self.step))
        self._settings = self._settings_now()

    def _apply(self, means: Sequence[Tensor | None]) -> None:
        if self._lr is not None:
            rate = float(self._lr(self.step))
            for group in self._optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        users = [p.grad for p in self._parameters]
        try:
            for parameter, mean in zip(self._parameters, means, strict=True):
                parameter.grad = mean.to(parameter.device, parameter.dtype) if mean is not None else None
            if self._clip_norm:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
            self._optimizer.step()
            self._wait_for_devices()
        finally:
            for parameter, gradient in zip(self._parameters, users, strict=True):
                parameter.grad = gradient

    def _wait_for_devices(self) -> None:
        """Wait for all GPUs, because the user's own thread may compute on another stream."""
        for device in {p.device for p in self._parameters if p.is_cuda}:
            torch.cuda.synchronize(device)

    def _forget(self) -> None:
        self._sums.clear_all()
        for ahead in range(1 + self.delayed):
            self._tail.clear(ahead)
        self._clear_books()

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of everything needed to continue from a step's end, bit for bit.

        `present` marks the parts of the outline that exist already: optimizers create their state in the first step.
        """
        state = {f"param/{name}": p.detach().to("cpu", copy=True) for name, p in self._named.items()}
        present = torch.zeros(len(self._outline), dtype=torch.uint8)
        for place, (name, kept) in enumerate(self._outline.items()):
            value = self._optimizer.state.get(kept.parameter, {}).get(kept.key)
            present[place] = value is not None
            state[name] = kept.tensor(value)
        if self._outline:
            state["present"] = present
        if self.low_rank is not None:
            state |= {name: tensor.clone() for name, tensor in self.low_rank.state().items()}
        state |= self.buffers.state()
        return state | {"step": torch.tensor(self.step, dtype=torch.int64)}

    def freeze(self, make_room: MakeRoom | None = None) -> FrozenState:
        """A copy of the state in memory, since the user's own code may change the tensors at any time."""
        return FrozenState(self.state())

    def outline(self) -> list[TensorSpec]:
        specs = [(f"param/{name}", p.dtype, p.shape) for name, p in self._named.items()]
        specs += [(name, kept.dtype, kept.shape) for name, kept in self._outline.items()]
        if self._outline:
            specs.append(("present", torch.uint8, torch.Size([len(self._outline)])))
        if self.low_rank is not None:
            specs += self.low_rank.outline()
        specs += self.buffers.outline()
        specs.append(("step", torch.int64, torch.Size()))
        return [TensorSpec(name, dtype_name(dtype), tuple(shape)) for name, dtype, shape in sorted(specs)]

    def load(self, state: Mapping[str, Tensor]) -> None:
        mine = {spec.name: spec for spec in self.outline()}
        if mine.keys() != state.keys():
            raise ValueError(f"the state does not fit: {sorted(mine.keys() ^ state.keys())[0]}")
        for name, spec in mine.items():
            tensor = state[name]
            if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (spec.shape, spec.dtype) or not all_finite(tensor):
                raise ValueError(f"{name} of the state does not fit, or is not finite")
        if int(state["step"]) < 0:
            raise ValueError("the state's step is negative")
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(state[f"param/{name}"])
        for place, (name, kept) in enumerate(self._outline.items()):
            if state["present"][place]:
                self._optimizer.state[kept.parameter][kept.key] = kept.value(state[name])
            else:
                self._optimizer.state[kept.parameter].pop(kept.key, None)
        if self.low_rank is not None:
            self.low_rank.load(state)
        self.buffers.load(state)
        self._wait_for_devices()
        self.step = int(state["step"])
        self._forget()
        self._follow_schedule()


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[str, Tensor]:
    """The optimizer's parameters by name, in its order."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"a torch optimizer is needed, not {type(optimizer).__name__}")
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p): str(index) for index, p in enumerate(parameters)}
    if named is not None:
        known = {id(p): name for name, p in named}
    found: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters):
        name = known.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"parameter {index} of the optimizer, {list(parameter.shape)}, is not in named_parameters"
            )
        if name in found or not 0 < len(name) <= _NAME_CHARS:
            raise ConfigError(
                f"two parameters are named {name!r}" if name in found else f"a name has {len(name)} characters"
            )
        if not parameter.is_floating_point() or parameter.layout != torch.strided or parameter.ndim > DIMS:
            raise ConfigError(
                f"parameter {name} cannot be averaged: {list(parameter.shape)} {dtype_name(parameter.dtype)}"
            )
        found[name] = parameter
    if not sum(p.numel() for p in parameters):
        raise ConfigError("the optimizer has no parameters")
    return found


def _bounded(text: str) -> str:
    """The text, cut to a readable length; if cut, a digest keeps different texts distinct."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]}... #{digest}"
