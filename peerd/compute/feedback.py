"""Error feedback: what a code takes from a gradient now is added to the next one, so that nothing is lost for good.

Each tensor, by name, has a residual: the sum of what was meant to be sent minus what was. The tensor is coded with the
residual added, and the new residual is what that missed ("1-Bit Stochastic Gradient Descent", Seide et al. 2014, and
"Error Feedback Fixes SignSGD", Karimireddy et al. 2019, which shows convergence). So the sum of all that receivers
decode differs from the true sum by the last residual only, however coarse the code.

New residuals count once the round has succeeded (`settle`); of a round that failed nothing remains (`undo`), and the
same gradient coded again has the same bits. Memory: one copy of the tensors, a second one during a round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peerd.compute.coding import Plan, decode, encode
from peerd.core.errors import LocalError
from peerd.core.frame import TensorFrame


class ErrorFeedback:
    """The residuals of one peer's gradients. Synchronous; one thread at a time."""

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}  # of the round under way

    def encode(self, name: str, tensor: Tensor, plan: Plan) -> TensorFrame:
        """Code `tensor` plus its residual; the new residual waits for `settle`.

        The same name coded again in the same round counts once: the later one. Raises what `coding.encode` does, then
        nothing has changed; LocalError for a tensor of another shape than the residual's.
        """
        tensor = tensor.detach().cpu()
        residual = self._residuals.get(name)
        if residual is not None and residual.shape != tensor.shape:
            shapes = f"{list(tensor.shape)}; its residual has {list(residual.shape)}"
            raise LocalError(f"{name} has shape {shapes}")
        exact = tensor.to(_wide(tensor.dtype))
        if residual is not None:
            exact = exact + residual
        frame = encode(exact.to(tensor.dtype), plan, name=name)
        self._new[name] = exact - decode(frame, name=name).to(exact.dtype)
        return frame

    def settle(self) -> None:
        """The round succeeded: what it missed is added to the next one."""
        self._residuals |= self._new
        self._new = {}

    def undo(self) -> None:
        """The round failed: the same gradients will be sent again, with the same residuals."""
        self._new = {}

    def state(self) -> dict[str, Tensor]:
        """The settled residuals by name, for a checkpoint; not copied, and never changed in place."""
        return dict(self._residuals)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over residuals as `state` gave them; a round under way is forgotten."""
        self._residuals = {name: tensor.detach().cpu() for name, tensor in state.items()}
        self._new = {}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What residuals are kept in, so that they hold what rounding to `dtype` takes too."""
    if not dtype.is_floating_point:
        raise LocalError(f"a gradient of {dtype} has no residual")
    return dtype if dtype.itemsize > 4 else torch.float32
