"""Buffers of somebody's own model, such as the running statistics of batch norm, as the members of a run keep them.

No gradient moves them: each forward pass does, on each peer with other data. All peers have a `shared` copy alike,
which is part of the state that newcomers take. With each microbatch goes a look at the live ones; in the average
travels, beside the gradients, how far they have moved from the shared ones, weighted by the samples since, and the
weight. `average`: the live ones become the shared ones after each step. `first`: likewise, and only the peer of the
lowest id in the round brings any. `local`: the live ones stay as they are; the shared ones, an average, are what a
newcomer begins with. So a peer alone has what plain torch has, and whole numbers are rounded. `live` is asked each
time: modules may put a new tensor in a buffer's place. Hostile input: a state or total is checked by whoever passes it
on; numbers beyond a buffer's range are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from peerd.compute.tensors import TORCH_DTYPES, all_finite, dtype_name
from peerd.core.errors import ConfigError, PeerdError
from peerd.core.run.runfile import AveragingSection

How = Literal["average", "first", "local"]
Live = Callable[[], Mapping[str, Tensor]]

_NAME_CHARS: Final = 400  # as of a parameter
_DIMS: Final = 8
_EXACT_ENOUGH: Final = ("none", "bf16", "powersgd")  # codes that keep small values small; blocks have a scale for many


class GradientNotFinite(PeerdError, FloatingPointError):
    """A gradient or a buffer of a user's model has become infinite, or no number; its name is in the message."""


class SharedBuffers:
    """See the module's header. `ahead` counts steps from the one under way, as in `grad_sums`."""

    def __init__(self, live: Live, how: str, averaging: AveragingSection, dtype: torch.dtype, steps: int) -> None:
        """ConfigError says what cannot be kept alike. `dtype`: of the sums; `steps`: that gradients are taken for."""
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
        self._seen: list[dict[str, Tensor]] = [{} for _ in range(steps)]  # the live ones, at the last microbatch
        self._weights = [0.0] * steps
        self._used = False  # something was computed with the live ones: they are not a newcomer's any more

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Names and flat shapes of what travels: the weight, then each buffer's change times it; none, if no buffer."""
        if not self.shared:
            return {}
        changes = {f"buffer/{name}": torch.Size([tensor.numel()]) for name, tensor in self.shared.items()}
        return {"buffers/weight": torch.Size([1]), **changes}

    def text(self) -> str:
        """Names and shapes that must agree between peers, in one line; empty if there is no buffer."""
        parts = [f"{name} {list(t.shape)} {dtype_name(t.dtype)}" for name, t in self.shared.items()]
        return f"; buffers {self.how}: {', '.join(parts)}" if parts else ""

    # --- the live ones ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing has happened yet: what is live is what is shared."""
        for name, tensor in self._checked().items():
            self.shared[name].copy_(tensor)

    def check(self) -> None:
        """ConfigError when the live ones are others than at the start; GradientNotFinite when one is not finite."""
        for name, tensor in self._checked().items():
            if not all_finite(tensor):
                raise GradientNotFinite(f"buffer {name} of the model is not finite; nothing was handed in")

    def note(self, ahead: int, samples: int) -> None:
        """A microbatch of so many samples counts: what is live now is what it led to."""
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
        """Our part of the sum of the step under way; `leads`: this peer has the lowest id of the round."""
        flat = torch.zeros(sum(shape.numel() for shape in self.shapes.values()), dtype=self._dtype)
        weight = self._weights[0] if leads or self.how != "first" else 0.0
        if weight:
            flat[0] = weight
            changes = [self._seen[0][n].to(self._dtype) - t.to(self._dtype) for n, t in self.shared.items()]
            flat[1:] = torch.cat([change.reshape(-1) for change in changes]) * weight
        part: np.ndarray[Any, np.dtype[Any]] = flat.numpy()
        return part

    def step(self, totals: list[Tensor]) -> None:
        """All have made the step, and the next begins. `totals`: the sums of what `shapes` names, over any number."""
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
        """Forget what was seen for one step."""
        self._seen[ahead], self._weights[ahead] = {}, 0.0

    def clear_all(self) -> None:
        """Forget what was seen, for all steps."""
        for ahead in range(len(self._seen)):
            self.clear(ahead)

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of the shared ones, by the names that they have in a state."""
        return {f"buffer/{name}": tensor.clone() for name, tensor in self.shared.items()}

    def outline(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and shape of what `state` gives."""
        return [(f"buffer/{name}", tensor.dtype, tensor.shape) for name, tensor in self.shared.items()]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state that was checked; `local` ones that something was computed with stay."""
        for name, tensor in self.shared.items():
            tensor.copy_(state[f"buffer/{name}"])
        if self.how != "local" or not self._used:
            self._hand_out()
        self.clear_all()

    def copies(self) -> dict[str, Tensor]:
        """The live ones, copied where they are."""
        return {name: tensor.detach().clone() for name, tensor in self._live().items()}

    @torch.no_grad()
    def put_back(self, copies: Mapping[str, Tensor]) -> None:
        """Give the live ones the values of `copies`."""
        for name, tensor in self._live().items():
            tensor.copy_(copies[name])

    def _hand_out(self) -> None:
        self._checked()
        self.put_back(self.shared)


def buffers_of(model: torch.nn.Module) -> Live:
    """The buffers of a module that belong to its state: what it makes anew by itself is left out."""

    def live() -> dict[str, Tensor]:
        kept = model.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in model.named_buffers() if name in kept}

    return live


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the range of `dtype`, rounded where it has whole numbers."""
    if dtype == torch.bool:
        return values.round() != 0
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    rounded = values if dtype.is_floating_point else values.round()
    return rounded.clamp(limits.min, limits.max).to(dtype)
