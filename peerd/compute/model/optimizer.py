"""SGD, AdamW, LAMB and LARS on one flat tensor, and the learning rate by global step.

All parameters of a stage lie in one flat tensor, and so do its gradient and each moment. An update takes one piece of
them after another, so it needs memory for a piece only. `FlatLayout` says which slice is which parameter. Weight decay
applies to every parameter, as torch's own optimizers do; so AdamW and SGD here give what torch.optim gives, and a test
holds them to it. LAMB and LARS follow their papers as printed, not the code that came with them: each tensor is a layer
of its own, gains and other vectors adapt and decay like matrices, and LAMB corrects both moments' bias. Only where a
norm is zero, so that a formula divides by it or never leaves it, the trust ratio is 1 instead. Making an optimizer
changes nothing: state starts at zero and no step is run for it.

`peerd.Lamb` and `peerd.Lars` compute with the same functions: here, too, LAMB and LARS take one tensor at a time.

With `offload` the moments live on the CPU and the update is computed there, whatever device the parameters are on:
the device keeps two copies of the parameters less, and every peer gets the bits that a CPU gives. On the CPU it
changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from peerd.compute.flat import FlatLayout
from peerd.core.model.stage_memory import moment_names
from peerd.core.run.runfile import OptimizerSection

_PIECE_VALUES: Final = 1 << 20  # of an update: what it needs beside its arguments is twice as large


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
    """Turns a flat gradient sum into a new flat parameter tensor; `moments` is its whole state besides the step."""

    def __init__(self, section: OptimizerSection, layout: FlatLayout, like: Tensor) -> None:
        """`like`: the flat parameters, for dtype and device."""
        self._section = section
        self._pieces = _pieces(section, layout)
        self.device = torch.device("cpu") if section.offload else like.device  # where updates are computed
        self.moments = {name: torch.zeros_like(like, device=self.device) for name in moment_names(section)}

    def room(self, gradient: Tensor) -> UpdateRoom:
        """The memory that an update by such a gradient needs."""
        return UpdateRoom.made(gradient, self.device, max(map(_length, self._pieces), default=0))

    @torch.no_grad()
    def update(
        self, parameters: Tensor, gradient: Tensor, step: int, samples: int = 1, room: UpdateRoom | None = None
    ) -> None:
        """One step in place on `parameters` by `gradient / samples`; `step` counts from 0. `gradient` stays as it is.

        Works through one piece after another. All memory that it needs is taken before anything is changed.
        """
        room = room or self.room(gradient)
        most, scale = self._section.clip_norm, 1.0
        if most > 0:
            norms = [_norm(room.mean_of(gradient[piece], samples, 1.0)) for piece in self._pieces]
            norm = math.hypot(*norms)
            scale = most / norm if norm > most else 1.0
        lr = learning_rate(self._section, step)
        for piece in self._pieces:
            part = parameters[piece]
            here = part.to(self.device)
            mean = room.mean_of(gradient[piece], samples, scale)
            moments = [moment[piece] for moment in self.moments.values()]
            self._update(here, mean, moments, room.spare[: len(mean)], lr, step + 1)
            if here is not part:
                part.copy_(here)

    def _update(
        self, parameters: Tensor, gradient: Tensor, moments: list[Tensor], spare: Tensor, lr: float, count: int
    ) -> None:
        """The step of one piece. `gradient` and `spare` are overwritten."""
        name = self._section.name
        if name == "sgd":
            self._sgd(parameters, gradient, moments, lr)
        elif name == "lars":
            self._lars(parameters, gradient, moments, lr)
        elif name == "lamb":
            self._lamb(parameters, gradient, moments, spare, lr, count)
        else:
            self._adamw(parameters, gradient, moments, spare, lr, count)

    def _sgd(self, parameters: Tensor, gradient: Tensor, moments: list[Tensor], lr: float) -> None:
        section = self._section
        if section.weight_decay:
            gradient.add_(parameters, alpha=section.weight_decay)
        if section.momentum:
            gradient = moments[0].mul_(section.momentum).add_(gradient)
        parameters.add_(gradient, alpha=-lr)

    def _adamw(
        self, parameters: Tensor, gradient: Tensor, moments: list[Tensor], spare: Tensor, lr: float, count: int
    ) -> None:
        """Loshchilov & Hutter 2019, in torch's order of operations."""
        section = self._section
        mean, root = adaptive_moments(moments, gradient, (section.beta1, section.beta2), section.eps, count, spare)
        parameters.mul_(1.0 - lr * section.weight_decay)
        parameters.addcdiv_(mean, root, value=-lr / (1.0 - section.beta1**count))

    def _lamb(
        self, weight: Tensor, gradient: Tensor, moments: list[Tensor], spare: Tensor, lr: float, count: int
    ) -> None:
        section = self._section
        betas, decay = (section.beta1, section.beta2), section.weight_decay
        lamb_move(weight, lamb_update(weight, gradient, moments, betas, section.eps, decay, count, spare), lr)

    def _lars(self, weight: Tensor, slope: Tensor, moments: list[Tensor], lr: float) -> None:
        section = self._section
        lars_scale(weight, slope, lr, section.weight_decay, section.trust)
        if section.momentum:
            slope = moments[0].mul_(section.momentum).add_(slope)
        weight.sub_(slope)


def adaptive_moments(
    moments: Sequence[Tensor],
    gradient: Tensor,
    betas: tuple[float, float],
    eps: float,
    count: int,
    spare: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Update both moments; returns the first one, and the root of the unbiased second one plus eps.

    `spare`: the memory for the root, with any content.
    """
    (mean, square), (beta1, beta2) = moments, betas
    root = spare if spare is not None else torch.empty_like(square)  # before anything changes: memory may lack
    mean.lerp_(gradient, 1.0 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    torch.sqrt(square, out=root).div_(math.sqrt(1.0 - beta2**count)).add_(eps)
    return mean, root


def lamb_update(
    parameters: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    count: int,
    spare: Tensor | None = None,
) -> Tensor:
    """Direction of a step of LAMB (You et al. 2020, algorithm 2), with decay; `count`: of this step, from 1.

    `spare`: the memory for it, with any content.
    """
    mean, root = adaptive_moments(moments, gradient, betas, eps, count, spare)
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


def _pieces(section: OptimizerSection, layout: FlatLayout) -> list[slice]:
    """The pieces of an update, one after the other; single tensors, where the optimizer adapts to each."""
    if section.name in ("lamb", "lars"):
        ends = list(itertools.accumulate(shape.numel() for shape in layout.shapes))
    else:
        ends = [*range(_PIECE_VALUES, layout.count, _PIECE_VALUES), layout.count]
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]


def _length(piece: slice) -> int:
    length: int = piece.stop - piece.start
    return length


@dataclass(frozen=True, slots=True)
class UpdateRoom:
    """The memory of an update, for one piece."""

    quotient: Tensor  # where the gradient is
    mean: Tensor  # where updates are computed; `quotient` itself if that is there
    spare: Tensor

    @classmethod
    def made(cls, gradient: Tensor, device: torch.device, length: int) -> UpdateRoom:
        quotient = torch.empty_like(gradient[:length])
        mean = quotient if gradient.device == device else torch.empty_like(quotient, device=device)
        return cls(quotient, mean, torch.empty_like(mean))

    def mean_of(self, gradient: Tensor, samples: int, scale: float) -> Tensor:
        """`gradient / samples`, times `scale`, where updates are computed."""
        mean, quotient = self.mean[: len(gradient)], self.quotient[: len(gradient)]
        torch.div(gradient, samples, out=quotient)
        if self.mean is not self.quotient:
            mean.copy_(quotient)
        return mean.mul_(scale) if scale != 1.0 else mean


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _trust(share: float, weight_norm: float, change_norm: float) -> float:
    """`share` of the weight's norm for a change of norm 1; 1 where there is nothing to compare."""
    return share * weight_norm / change_norm if weight_norm > 0 and change_norm > 0 else 1.0
