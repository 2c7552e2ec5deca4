"""`Lamb` and `Lars` as torch optimizers, with the functions used by runs with `optimizer.name: lamb` and `lars`.

Each parameter is one layer in the sense of the papers, with a trust ratio of its own. A parameter without a gradient is
not changed, as in torch's own optimizers. Any torch scheduler may change the learning rate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch import Tensor

from peerd.model.optimizer import lamb_move, lamb_update, lars_scale


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of `Lamb` and `Lars`: steps each parameter that has a gradient."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step. `closure`, if given, recomputes the gradients first; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided:
                    raise ValueError(f"{type(self).__name__} does not support sparse gradients")
                self._move(parameter, parameter.grad, group, self.state[parameter])
        return loss

    @abstractmethod
    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Step one parameter; `state` belongs to it, and is empty before its first step."""


class Lamb(LayerwiseOptimizer):
    """LAMB as in You et al. 2020, algorithm 2: each tensor moves by `lr` times its own norm.

    `betas`, `eps` and `weight_decay` are as in AdamW. Both moments are bias-corrected. Every tensor adapts and decays,
    including gains and biases; use a separate parameter group for these to change that.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1.0e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1.0e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Raises ValueError for settings out of range."""
        _need(lr >= 0, "lr", lr)
        _need(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "betas", betas)
        _need(eps > 0, "eps", eps)
        _need(weight_decay >= 0, "weight_decay", weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(cast("Any", params), defaults)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        moments = state["exp_avg"], state["exp_avg_sq"]
        decay, count = group["weight_decay"], state["step"]
        update = lamb_update(parameter, gradient, moments, group["betas"], group["eps"], decay, count)
        lamb_move(parameter, update, float(group["lr"]))


class Lars(LayerwiseOptimizer):
    """LARS as in You et al. 2017, algorithm 1: momentum SGD with a learning rate of its own for each tensor.

    `trust`: how far a tensor moves, as a share of its norm, at a learning rate of 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1.0e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1.0e-3,
    ) -> None:
        """Raises ValueError for settings out of range."""
        _need(lr >= 0, "lr", lr)
        _need(0 <= momentum < 1, "momentum", momentum)
        _need(weight_decay >= 0, "weight_decay", weight_decay)
        _need(trust > 0, "trust", trust)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(cast("Any", params), defaults)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        change = gradient.clone()
        lars_scale(parameter, change, float(group["lr"]), group["weight_decay"], group["trust"])
        if group["momentum"]:
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            change = state["momentum"].mul_(group["momentum"]).add_(change)
        parameter.sub_(change)


def _need(ok: bool, name: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}, which is out of range")
