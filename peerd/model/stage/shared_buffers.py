"""Buffers of a user's own model, such as the running statistics of batch norm, kept in agreement between peers.

Buffers get no gradients: each forward pass updates them, on each peer from other data. All peers keep identical
`shared` copies, which are part of the state that newcomers fetch. Each microbatch records the live buffers. A round of
averaging sums, beside the gradients, the difference between live and shared buffers, weighted by the number of samples,
and that weight.

* `average`: after each step the shared buffers, now the average, are copied into the live ones.
* `first`: the same, but only the peer with the lowest id in the round contributes.
* `local`: the live buffers are not changed; newcomers start with the shared ones, which are averages.

A peer alone therefore gets the results of plain torch. Integer buffers are rounded. `live` is called each time, because
modules may replace a buffer's tensor. Malicious input: the caller checks states and totals; values beyond a buffer's
range are clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from peerd.codec.tensors import TORCH_DTYPES, all_finite, dtype_name
from peerd.core.errors import ConfigError, PeerdError
from peerd.run.runfile import AveragingSection

How = Literal["average", "first", "local"]
Live = Callable[[], Mapping[str, Tensor]]

_NAME_CHARS: Final = 400  # same limit as for parameters
_DIMS: Final = 8
_EXACT_ENOUGH: Final = ("none", "bf16", "powersgd")  # codes that keep small values: blockwise ones share a scale


class GradientNotFinite(PeerdError, FloatingPointError):
    """A gradient or buffer of a user's model is infinite or NaN; the message has its name."""


class SharedBuffers:
    """The shared and live buffers of one model. `ahead`: 0 for the current step, 1 for the next (as in `flat`)."""

    def __init__(self, live: Live, how: str, averaging: AveragingSection, dtype: torch.dtype, steps: int) -> None:
        """Raises ConfigError for buffers that cannot be shared. `dtype`: of the sums; `steps`: how many may accumulate
        at once.
        """
        if how not in get_args(How):
            raise ConfigError(f"buffers is {how!r}; allowed: {', '.join(get_args(How))}")
        self._live, self.how, self._dtype = live, how, dtype
        self.shared = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live().items()}
        for name, tensor in self.shared.items():
            if dtype_name(tensor.dtype) not in TORCH_DTYPES or tensor.ndim > _DIMS or not 0 < len(name) <= _NAME_CHARS:
                raise ConfigError(f"buffer {name} cannot be shared: {list(tensor.shape)} {dtype_name(tensor.dtype)}")
        if self.shared and averaging.code not in _EXACT_ENOUGH:
            raise ConfigError(
                f"code {averaging.code!r} is too coarse for buffers ({next(iter(self.shared))}, ...); "
                f"allowed with buffers: {', '.join(_EXACT_ENOUGH)}"
            )
        self._seen: list[dict[str, Tensor]] = [{} for _ in range(steps)]  # live buffers after the last microbatch
        self._weights = [0.0] * steps
        self._used = False  # true once a microbatch was computed with the live buffers

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Names and flat shapes of the summed values: the weight, then each buffer's weighted change. Empty without
        buffers.
        """
        if not self.shared:
            return {}
        changes = {f"buffer/{name}": torch.Size([tensor.numel()]) for name, tensor in self.shared.items()}
        return {"buffers/weight": torch.Size([1]), **changes}

    def text(self) -> str:
        """Names and shapes that must agree between peers, in one line; empty if there are no buffers."""
        parts = [f"{name} {list(t.shape)} {dtype_name(t.dtype)}" for name, t in self.shared.items()]
        return f"; buffers {self.how}: {', '.join(parts)}" if parts else ""

    # --- live buffers -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Copy the live buffers into the shared ones, before anything was computed."""
        for name, tensor in self._checked().items():
            self.shared[name].copy_(tensor)

    def check(self) -> None:
        """Raises ConfigError if the set of live buffers has changed, GradientNotFinite if a value is not finite."""
        for name, tensor in self._checked().items():
            if not all_finite(tensor):
                raise GradientNotFinite(f"buffer {name} of the model is not finite; nothing was contributed")

    def note(self, ahead: int, samples: int) -> None:
        """Record the live buffers after a microbatch of `samples` samples."""
        self._seen[ahead] = {name: t.detach().to("cpu", copy=True) for name, t in self._checked().items()}
        self._weights[ahead] += samples
        self._used = True

    def _checked(self) -> Mapping[str, Tensor]:
        live = self._live()
        for name in sorted(live.keys() ^ self.shared.keys()):
            raise ConfigError(f"buffer {name} was {'removed' if name in self.shared else 'added'} after the start")
        for name, tensor in live.items():
            kept = self.shared[name]
            if (tensor.shape, tensor.dtype) != (kept.shape, kept.dtype):
                raise ConfigError(f"buffer {name} has another shape or dtype than at the start")
        return live

    # --- the average --------------------------------------------------------------------------------------------

    def part(self, leads: bool) -> np.ndarray[Any, np.dtype[Any]]:
        """This peer's part of the current step's sum. `leads`: this peer has the lowest id in the round."""
        flat = torch.zeros(sum(shape.numel() for shape in self.shapes.values()), dtype=self._dtype)
        weight = self._weights[0] if leads or self.how != "first" else 0.0
        if weight:
            flat[0] = weight
            changes = [self._seen[0][n].to(self._dtype) - t.to(self._dtype) for n, t in self.shared.items()]
            flat[1:] = torch.cat([change.reshape(-1) for change in changes]) * weight
        part: np.ndarray[Any, np.dtype[Any]] = flat.numpy()
        return part

    def step(self, totals: list[Tensor]) -> None:
        """Update the shared buffers after a step. `totals`: the summed values that `shapes` names, scaled by any
        factor.
        """
        self.clear(0)
        self._seen.append(self._seen.pop(0))
        self._weights.append(self._weights.pop(0))
        weight = float(totals[0]) if totals else 0.0
        if weight > 0:
            for kept, total in zip(self.shared.values(), totals[1:], strict=True):
                moved = kept.to(self._dtype) + (total / weight).view(kept.shape)
                kept.copy_(_within(moved, kept.dtype))
        if self.how != "local":
            self._hand_out()

    def clear(self, ahead: int) -> None:
        """Drop the records of one step."""
        self._seen[ahead], self._weights[ahead] = {}, 0.0

    def clear_all(self) -> None:
        """Drop the records of all steps."""
        for ahead in range(len(self._seen)):
            self.clear(ahead)

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of the shared buffers, by their names in a state."""
        return {f"buffer/{name}": tensor.clone() for name, tensor in self.shared.items()}

    def outline(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and shape of each tensor in `state`."""
        return [(f"buffer/{name}", tensor.dtype, tensor.shape) for name, tensor in self.shared.items()]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy the shared buffers from a checked state, and into the live ones unless those are `local` and already in
        use.
        """
        for name, tensor in self.shared.items():
            tensor.copy_(state[f"buffer/{name}"])
        if self.how != "local" or not self._used:
            self._hand_out()
        self.clear_all()

    def copies(self) -> dict[str, Tensor]:
        """Copies of the live buffers, on their devices."""
        return {name: tensor.detach().clone() for name, tensor in self._live().items()}

    @torch.no_grad()
    def put_back(self, copies: Mapping[str, Tensor]) -> None:
        """Copy the values of `copies` into the live buffers."""
        for name, tensor in self._live().items():
            tensor.copy_(copies[name])

    def _hand_out(self) -> None:
        self._checked()
        self.put_back(self.shared)


def buffers_of(model: torch.nn.Module) -> Live:
    """A function that returns the module's persistent buffers, those in its state dict."""

    def live() -> dict[str, Tensor]:
        kept = model.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in model.named_buffers() if name in kept}

    return live


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded if `dtype` is an integer type, and clamped to its range."""
    if dtype == torch.bool:
        return values.round() != 0
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    rounded = values if dtype.is_floating_point else values.round()
    return rounded.clamp(limits.min, limits.max).to(dtype)
