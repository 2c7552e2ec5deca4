"""SGD, AdamW, LAMB and LARS on one flat tensor, and the learning rate by global step.

All parameters of a stage lie in one flat tensor, and so do its gradient and each moment: an update is a few passes
over memory. `Layout` says which slice is which parameter. Weight decay applies to every parameter, as torch's own
optimizers do; so AdamW and SGD here give what torch.optim gives, and a test holds them to it. LAMB and LARS follow
their papers as printed, not the code that came with them: each tensor is a layer of its own, gains and other
vectors adapt and decay like matrices, and LAMB corrects both moments' bias. Only where a norm is zero, so that a
formula divides by it or never leaves it, the trust ratio is 1 instead. Making an optimizer changes nothing: state
starts at zero and no step is run for it.

`peerd.Lamb` and `peerd.Lars` compute with the same functions, one tensor at a time.

With `offload` the moments live on the CPU and the update is computed there, whatever device the parameters are on:
the device keeps two copies of the parameters less, and every peer gets the bits that a CPU gives. On the CPU it
changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peerd.compute.flat import Layout
from peerd.core.model.stage_memory import moment_names
from peerd.core.run.runfile import OptimizerSection


def learning_rate(section: OptimizerSection, step: int) -> float:
    """Learning rate of global step `step`, from 0: linear warm-up, then decay to `final_lr_share` at total_steps."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "none":
        return section.lr
    gone = min(1.0, (step - section.warmup_steps) / (section.total_steps - section.warmup_steps))
    left = 1.0 - gone if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return section.lr * (section.final_lr_share + (1.0 - section.final_lr_share) * left)


class Optimizer:
    """Turns a flat mean gradient into a new flat parameter tensor; `moments` is its whole state besides the step."""

    def __init__(self, section: OptimizerSection, layout: Layout, like: Tensor) -> None:
        """`like`: the flat parameters, for dtype and device."""
        self._section = section
        self._layout = layout
        self.device = torch.device("cpu") if section.offload else like.device  # where updates are computed
        self.moments = {name: torch.zeros_like(like, device=self.device) for name in moment_names(section)}

    @torch.no_grad()
    def update(self, parameters: Tensor, gradient: Tensor, step: int) -> None:
        """One step in place on `parameters`; `step` counts from 0. `gradient`, on `device`, may be overwritten."""
        here = parameters.to(self.device)
        self._update(here, gradient, step)
        if here is not parameters:
            parameters.copy_(here)

    def _update(self, parameters: Tensor, gradient: Tensor, step: int) -> None:
        section = self._section
        if section.clip_norm > 0:
            norm = _norm(gradient)
            if norm > section.clip_norm:
                gradient.mul_(section.clip_norm / norm)
        lr = learning_rate(section, step)
        if section.name == "sgd":
            self._sgd(parameters, gradient, lr)
        elif section.name == "adamw":
            self._adamw(parameters, gradient, lr, step + 1)
        elif section.name == "lamb":
            self._lamb(parameters, gradient, lr, step + 1)
        else:
            self._lars(parameters, gradient, lr)

    def _sgd(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        section = self._section
        if section.weight_decay:
            gradient.add_(parameters, alpha=section.weight_decay)
        if section.momentum:
            gradient = self.moments["momentum"].mul_(section.momentum).add_(gradient)
        parameters.add_(gradient, alpha=-lr)

    def _adamw(self, parameters: Tensor, gradient: Tensor, lr: float, count: int) -> None:
        """Loshchilov & Hutter 2019, in torch's order of operations."""
        section = self._section
        mean, root = adaptive_moments(self._moment_pair, gradient, (section.beta1, section.beta2), section.eps, count)
        parameters.mul_(1.0 - lr * section.weight_decay)
        parameters.addcdiv_(mean, root, value=-lr / (1.0 - section.beta1**count))

    def _lamb(self, parameters: Tensor, gradient: Tensor, lr: float, count: int) -> None:
        section, moments = self._section, self._moment_pair
        betas, decay = (section.beta1, section.beta2), section.weight_decay
        update = lamb_update(parameters, gradient, moments, betas, section.eps, decay, count)
        for weight, change in zip(self._layout.views(parameters), self._layout.views(update), strict=True):
            lamb_move(weight, change, lr)

    def _lars(self, parameters: Tensor, gradient: Tensor, lr: float) -> None:
        section = self._section
        for weight, slope in zip(self._layout.views(parameters), self._layout.views(gradient), strict=True):
            lars_scale(weight, slope, lr, section.weight_decay, section.trust)
        if section.momentum:
            gradient = self.moments["momentum"].mul_(section.momentum).add_(gradient)
        parameters.sub_(gradient)

    @property
    def _moment_pair(self) -> tuple[Tensor, Tensor]:
        return self.moments["exp_avg"], self.moments["exp_avg_sq"]


def adaptive_moments(
    moments: tuple[Tensor, Tensor], gradient: Tensor, betas: tuple[float, float], eps: float, count: int
) -> tuple[Tensor, Tensor]:
    """Update both moments; returns the first one, and the root of the unbiased second one plus eps."""
    (mean, square), (beta1, beta2) = moments, betas
    root = torch.empty_like(square)  # now: where memory lacks, nothing has been changed yet
    mean.lerp_(gradient, 1.0 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    torch.sqrt(square, out=root).div_(math.sqrt(1.0 - beta2**count)).add_(eps)
    return mean, root


def lamb_update(
    parameters: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    count: int,
) -> Tensor:
    """Direction of a step of LAMB (You et al. 2020, algorithm 2), with decay; `count`: of this step, from 1."""
    mean, root = adaptive_moments(moments, gradient, betas, eps, count)
    update = torch.div(mean, root, out=root).div_(1.0 - betas[0] ** count)
    return update.add_(parameters, alpha=weight_decay)


def lamb_move(weight: Tensor, update: Tensor, lr: float) -> None:
    """Move one tensor along its update, by `lr` of the tensor's own norm; phi is the identity."""
    weight.add_(update, alpha=-lr * _trust(1.0, _norm(weight), _norm(update)))


def lars_scale(weight: Tensor, gradient: Tensor, lr: float, weight_decay: float, trust: float) -> None:
    """Turn one tensor's gradient into what enters its momentum in LARS (You et al. 2017, algorithm 1), in place.

    The tensor's own rate enters with it. A later change of the learning rate does not change what the momentum holds
    already, as torch's SGD would.
    """
    size = _norm(weight)
    gradient_size = _norm(gradient) + weight_decay * size
    gradient.add_(weight, alpha=weight_decay)
    gradient.mul_(lr * _trust(trust, size, gradient_size))


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _trust(share: float, weight_norm: float, change_norm: float) -> float:
    """`share` of the weight's norm for a change of norm 1; 1 where there is nothing to compare."""
    return share * weight_norm / change_norm if weight_norm > 0 and change_norm > 0 else 1.0
