"""Mixed precision: a stage computes in 16 bits where torch's autocast does; stored and sent values keep their dtype.

Parameters, gradient sums, boundary tensors and the loss keep the run's dtype, so that peers sum and average as usual.
`fp16` has a small exponent range in which small gradients vanish and large ones overflow, so gradients are multiplied
by a power of two inside the stage and divided by it before they are added up. The factor is chosen anew for each
microbatch, from the size of the incoming gradient, and reduced while anything overflows. It depends on parameters and
inputs alone, so peers cannot differ in it, and recomputing a microbatch, to subtract it from a sum, gives the bits that
were added.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from peerd.codec.tensors import all_finite

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST: Final = 64.0  # scaled size of the largest incoming value; fp16 ends at 65504
STEP: Final = 16.0  # divides the factor after an overflow
ATTEMPTS: Final = 8


class Precision:
    """Numeric precision of one stage; `full` is plain torch in the run's dtype."""

    def __init__(self, name: Literal["full", "bf16", "fp16"], device: torch.device) -> None:
        self._dtype = _DTYPES.get(name)
        self._scaled = name == "fp16"
        self._device = device.type

    @property
    def is_scaled(self) -> bool:
        """True if gradients are scaled, so that a backward may take several attempts."""
        return self._scaled

    def casting(self) -> contextlib.AbstractContextManager[object]:
        """A context in which torch's autocast chooses 16 bits where they are safe."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)

    def backward(
        self, compute: Callable[[], Tensor], inputs: Sequence[Tensor], seed: Tensor | None, largest: float = 1.0
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the output of `compute` and its gradients for `inputs`, which are not finite if no factor prevents
        overflow.

        `seed`: gradient of the output; None if the output is one number. `largest`: size of the largest gradient inside
        the computation, used only if `seed` is None; otherwise it is measured from `seed`.
        """
        if not self._scaled:
            output = compute()
            return output, torch.autograd.grad(output, inputs, seed, materialize_grads=True)
        if seed is not None:
            largest = float(seed.abs().max())
        factor = 2.0 ** math.floor(math.log2(LARGEST / largest)) if largest > 0 else 1.0
        for attempt in range(ATTEMPTS):
            found: list[Tensor] = []  # frees the previous attempt's gradients first
            output = compute()
            start = torch.ones_like(output) if seed is None else seed
            found = list(torch.autograd.grad(output, inputs, start * factor, materialize_grads=True))
            if attempt == ATTEMPTS - 1 or not all_finite(output.detach()) or all(map(all_finite, found)):
                break
            factor /= STEP
        for index, gradient in enumerate(found):  # one by one: two copies of all would set a step's peak memory
            found[index] = gradient / factor  # not in place: two inputs may share a gradient tensor
        return output, found
