"""SGD, AdamW, LAMB and LARS on one flat tensor, and the learning rate by global step.

All parameters of a stage are in one flat tensor, as are its gradient and each moment. An update processes them piece by
piece, so it needs extra memory for one piece only. `FlatLayout` maps slices to parameters. Weight decay applies to
every parameter, as in torch's optimizers, so AdamW and SGD give the results of torch.optim (tested). LAMB and LARS
follow their papers, not the code published with them: each tensor is one layer, gains and other vectors adapt and decay
like matrices, and LAMB corrects the bias of both moments. Where a norm is zero, so that the formula would divide by
zero or stay at zero forever, the trust ratio is 1. Moments start at zero; creating an optimizer runs no step.

`peerd.Lamb` and `peerd.Lars` use the same functions; LAMB and LARS process one tensor at a time here as well.

With `offload` the moments are on the CPU and the update is computed there, wherever the parameters are. This saves
the device the memory of two copies of the parameters, and every peer gets the bits that a CPU computes. If the
parameters are on the CPU, it changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from peerd.codec.flat import FlatLayout
from peerd.model.shapes.stage_memory import moment_names
from peerd.run.runfile import OptimizerSection

_PIECE_VALUES: Final = 1 << 20  # of an update, which needs twice as many values of extra memory


def learning_rate(section: OptimizerSection, step: int) -> float:
    """Learning rate of global step `step`, from 0: linear warm-up, then decay to `final_lr_share` at `total_steps`."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "none":
        return section.lr
    gone = min(1.0, (step - section.warmup_steps) / (section.total_steps - section.warmup_steps))
    left = 1.0 - gone if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return section.lr * (section.final_lr_share + (1.0 - section.final_lr_share) * left)


class Optimizer:
    """Updates flat parameters in place from a flat gradient sum. `moments` is its whole state besides the step."""

    def __init__(self, section: OptimizerSection, layout: FlatLayout, like: Tensor) -> None:
        """`like`: the flat parameters, for dtype and device."""
        self._section = section
        self._pieces = _pieces(section, layout)
        self.device = torch.device("cpu") if section.offload else like.device  # where updates are computed
        self.moments = {name: torch.zeros_like(like, device=self.device) for name in moment_names(section)}

    def room(self, gradient: Tensor) -> UpdateScratch:
        """Allocate the scratch memory for an update with a gradient like this one."""
        return UpdateScratch.made(gradient, self.device, max(map(_length, self._pieces), default=0))

    @torch.no_grad()
    def update(
        self, parameters: Tensor, gradient: Tensor, step: int, samples: int = 1, room: UpdateScratch | None = None
    ) -> None:
        """One step in place on `parameters` with `gradient / samples`; `step` counts from 0. `gradient` is not changed.

        Processes one piece after another. Allocates all memory before it changes anything.
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
        """Update one piece. `gradient` and `spare` are overwritten."""
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
        """AdamW (Loshchilov & Hutter 2019), in torch's order of operations."""
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
    """Update both moments; returns the first one, and the square root of the unbiased second one plus eps.

    `spare`: memory for the square root, with any contents.
    """
    (mean, square), (beta1, beta2) = moments, betas
    root = spare if spare is not None else torch.empty_like(square)  # first, since allocation may fail
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
    """Direction of a LAMB step (You et al. 2020, algorithm 2), with weight decay. `count`: number of this step, from 1.

    `spare`: memory for the result, with any contents.
    """
    mean, root = adaptive_moments(moments, gradient, betas, eps, count, spare)
    update = torch.div(mean, root, out=root).div_(1.0 - betas[0] ** count)
    return update.add_(parameters, alpha=weight_decay)


def lamb_move(weight: Tensor, update: Tensor, lr: float) -> None:
    """Move one tensor along its update by `lr` times the tensor's own norm; phi is the identity."""
    weight.add_(update, alpha=-lr * _trust(1.0, _norm(weight), _norm(update)))


def lars_scale(weight: Tensor, gradient: Tensor, lr: float, weight_decay: float, trust: float) -> None:
    """Turn one tensor's gradient into its contribution to the LARS momentum (You et al. 2017, algorithm 1), in place.

    The contribution includes the tensor's own learning rate, so a later change of the learning rate does not affect the
    momentum accumulated so far, unlike in torch's SGD.
    """
    size = _norm(weight)
    gradient_size = _norm(gradient) + weight_decay * size
    gradient.add_(weight, alpha=weight_decay)
    gradient.mul_(lr * _trust(trust, size, gradient_size))


def _pieces(section: OptimizerSection, layout: FlatLayout) -> list[slice]:
    """The pieces of an update, in order; single tensors if the optimizer adapts to each tensor."""
    if section.name in ("lamb", "lars"):
        ends = list(itertools.accumulate(shape.numel() for shape in layout.shapes))
    else:
        ends = [*range(_PIECE_VALUES, layout.count, _PIECE_VALUES), layout.count]
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]


def _length(piece: slice) -> int:
    length: int = piece.stop - piece.start
    return length


@dataclass(frozen=True, slots=True)
class UpdateScratch:
    """Scratch memory of an update, for one piece."""

    quotient: Tensor  # on the gradient's device
    mean: Tensor  # on the update's device; `quotient` itself if that is the same
    spare: Tensor

    @classmethod
    def made(cls, gradient: Tensor, device: torch.device, length: int) -> UpdateScratch:
        quotient = torch.empty_like(gradient[:length])
        mean = quotient if gradient.device == device else torch.empty_like(quotient, device=device)
        return cls(quotient, mean, torch.empty_like(mean))

    def mean_of(self, gradient: Tensor, samples: int, scale: float) -> Tensor:
        """`gradient / samples`, times `scale`, on the device that computes updates."""
        mean, quotient = self.mean[: len(gradient)], self.quotient[: len(gradient)]
        torch.div(gradient, samples, out=quotient)
        if self.mean is not self.quotient:
            mean.copy_(quotient)
        return mean.mul_(scale) if scale != 1.0 else mean


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _trust(share: float, weight_norm: float, change_norm: float) -> float:
    """Trust ratio: `share` times the weight's norm over the change's norm, or 1 if either norm is zero."""
    return share * weight_norm / change_norm if weight_norm > 0 and change_norm > 0 else 1.0
