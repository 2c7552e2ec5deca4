"""Outline of an optimizer's state: what it keeps for each parameter after a step.

It is learnt from a step with copies, so that a newcomer knows it before its own first step. ConfigError rejects
optimizers that cannot be used: those that need a closure, accept no dense gradients, or keep state that newcomers
cannot fetch.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import outcome
import torch
from torch import Tensor

from peerd.codec.tensors import TORCH_DTYPES, dtype_name
from peerd.core.errors import ConfigError

DIMS: Final = 8  # maximum dimensions of a tensor that is sent
_NUMBERS: Final = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True, slots=True)
class OptimizerStateOutline:
    """One item of state that the optimizer keeps for one parameter."""

    parameter: Tensor
    key: str
    kind: type  # Tensor, or the type of a number
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def tensor(self, value: object) -> Tensor:
        """A copy of the value on the CPU; zeros if the optimizer has no value yet."""
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        return torch.full(self.shape, value or 0, dtype=self.dtype)  # type: ignore[call-overload, no-any-return]

    def value(self, tensor: Tensor) -> object:
        """The inverse of `tensor`: a new value of the optimizer's own type."""
        if self.kind is Tensor:
            return tensor.detach().to(self.device, copy=True)
        return self.kind(tensor.item())


def outline_of(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, OptimizerStateOutline]:
    """Outline of the state that the optimizer keeps after a step, learnt with copies; the originals are only read."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{kind.__name__} needs a closure, so it cannot step with an average")
    copies = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    memo: dict[int, Any] = {id(p): copies[name] for name, p in named.items()}
    rehearsal = object.__new__(kind)
    for attribute, value in vars(
        optimizer
    ).items():  # not `step`, which schedulers replace by one bound to the original
        if attribute.endswith("hooks"):
            vars(rehearsal)[attribute] = OrderedDict()
        elif attribute != "step":
            vars(rehearsal)[attribute] = copy.deepcopy(value, memo)
    before = _counters(rehearsal)
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    rehearsed = outcome.capture(kind.step, rehearsal)
    if isinstance(rehearsed, outcome.Error):
        if not isinstance(rehearsed.error, Exception):
            raise rehearsed.error
        raise ConfigError(f"{kind.__name__} cannot step with an average, which is dense: {rehearsed.error}")
    changed = sorted(key for key, value in _counters(rehearsal).items() if before.get(key) != value)
    if changed:
        raise ConfigError(
            f"{kind.__name__} keeps {changed[0]} outside of its parameters' state, where newcomers cannot fetch it"
        )
    outline: dict[str, OptimizerStateOutline] = {}
    for name, parameter in copies.items():
        for key, value in sorted(rehearsal.state.get(parameter, {}).items()):
            if value is not None:
                outline[f"opt/{name}/{key}"] = _kept(kind.__name__, named[name], key, value)
    return outline


def _kept(optimizer: str, parameter: Tensor, key: str, value: object) -> OptimizerStateOutline:
    if isinstance(value, Tensor) and dtype_name(value.dtype) in TORCH_DTYPES and value.ndim <= DIMS:
        return OptimizerStateOutline(parameter, key, Tensor, value.dtype, value.shape, value.device)
    if type(value) in _NUMBERS:
        return OptimizerStateOutline(
            parameter, key, type(value), _NUMBERS[type(value)], torch.Size(), torch.device("cpu")
        )
    raise ConfigError(f"{optimizer} keeps {key} as {type(value).__name__}: only tensors and numbers can be sent")


def _counters(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Numbers that an optimizer keeps for itself rather than for a parameter."""
    own = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
    for index, group in enumerate(optimizer.param_groups):
        own |= {f"group {index}'s {k}": plain(v) for k, v in group.items() if k != "params"}
    return own


def plain(value: object) -> str:
    return repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
