"""Mixed precision: a stage computes in 16 bits where torch's autocast does; all that is kept and sent stays as it is.

Parameters, sums of gradients, boundary tensors and the loss keep the run's dtype, so peers add up and average as
ever. `fp16` has so few exponents that small gradients vanish and large ones overflow; they are multiplied on their way
through the stage by a power of two and divided by it at the end, before anything is added up. The factor is found
anew for each microbatch, from the size of what comes in, and made smaller as long as something overflows: it is a
function of parameters and inputs alone. So it is no state that peers could differ in, and a microbatch that is
computed again, to be taken out, gives the bits that were added.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from peerd.compute.tensors import all_finite

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST: Final = 64.0  # what the largest value that comes in is brought to; fp16 ends at 65504
STEP: Final = 16.0  # by which the factor is made smaller
ATTEMPTS: Final = 8


class Precision:
    """Numeric precision of one stage's computing; `full` is plain torch in the dtype of the run."""

    def __init__(self, name: Literal["full", "bf16", "fp16"], device: torch.device) -> None:
        self._dtype = _DTYPES.get(name)
        self._scaled = name == "fp16"
        self._device = device.type

    @property
    def is_scaled(self) -> bool:
        """True where a backward may take several attempts."""
        return self._scaled

    def casting(self) -> contextlib.AbstractContextManager[object]:
        """A context in which torch chooses 16 bits where they do no harm."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)

    def backward(
        self, compute: Callable[[], Tensor], inputs: Sequence[Tensor], seed: Tensor | None, largest: float = 1.0
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The output of `compute` and its gradients for `inputs`; these are not finite where no factor helps.

        `seed`: the gradient of what it gives; None where that is one number. `largest`: the size of the largest
        gradient inside, of that number alone; of a seed it is found.
        """
        if not self._scaled:
            output = compute()
            return output, torch.autograd.grad(output, inputs, seed, materialize_grads=True)
        if seed is not None:
            largest = float(seed.abs().max())
        factor = 2.0 ** math.floor(math.log2(LARGEST / largest)) if largest > 0 else 1.0
        for attempt in range(ATTEMPTS):
            found: list[Tensor] = []  # those of the attempt before go first
            output = compute()
            start = torch.ones_like(output) if seed is None else seed
            found = list(torch.autograd.grad(output, inputs, start * factor, materialize_grads=True))
            if attempt == ATTEMPTS - 1 or not all_finite(output.detach()) or all(map(all_finite, found)):
                break
            factor /= STEP
        for index, gradient in enumerate(found):  # one by one: all of them twice would be the most that a step takes
            found[index] = gradient / factor  # not in place: two inputs may have the same gradient
        return output, found
