"""Tail of a sum of gradients: which parameters had a gradient, and how many samples the microbatches were short of.

It travels behind the gradients, so the mean of a batch says what a plain torch process would know: a parameter that no
loss of the batch depends on keeps no gradient, and microbatches of fewer samples weigh less. Both are counts: of peers
for each parameter, and of samples. Codes with a scale for each block of values have zeros in between, as wide as a
block, so no gradient shares a block with a count, and the samples share one with nothing: the largest value of a block
is coded without a loss. Knows tensors, no microbatches. Hostile input: totals are checked to be finite by the caller; a
count beyond its range is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from peerd.core.blockwise import BLOCKS, CODES
from peerd.core.run.runfile import AveragingSection

_PRESENT: Final = 0.25  # a count of peers is 0, or 1 and more; lossy codes move it a little


class BatchTail:
    """The tail of each sum that a model has; `ahead` counts steps from the one under way, as in `grad_sums`."""

    def __init__(
        self, parameters: int, microbatch: int, averaging: AveragingSection, dtype: torch.dtype, steps: int
    ) -> None:
        """`microbatch`: samples of a whole one. `steps`: number of sums."""
        self._microbatch, self._dtype = microbatch, dtype
        gap = (averaging.block or BLOCKS[-1]) if averaging.code in CODES else 0
        sizes = {"tail/gap": gap, "tail/present": parameters, "tail/second gap": gap, "tail/short": 1}
        self.shapes = {name: torch.Size([size]) for name, size in sizes.items() if size or name == "tail/present"}
        self._gap = [0.0] * gap
        self._present = [[False] * parameters for _ in range(steps)]
        self._short = [0] * steps

    def note(self, ahead: int, gradients: Iterable[Tensor | None], samples: int) -> None:
        """Count a microbatch of `samples` samples."""
        there = [gradient is not None for gradient in gradients]
        self._present[ahead] = [had or has for had, has in zip(self._present[ahead], there, strict=True)]
        self._short[ahead] += max(0, self._microbatch - samples)

    def part(self) -> np.ndarray[Any, np.dtype[Any]]:
        """This peer's part of the sum of the step under way; samples are in units of a microbatch."""
        short = self._short[0] / self._microbatch
        values = [*self._gap, *map(float, self._present[0]), *self._gap, short]
        part: np.ndarray[Any, np.dtype[Any]] = torch.tensor(values, dtype=self._dtype).numpy()
        return part

    def read(self, totals: Sequence[Tensor], samples: int) -> tuple[list[bool], int]:
        """Which parameters had a gradient on any peer, and the number of samples, of `samples` at most, 1 at least."""
        present, short = totals[-3 if self._gap else -2], totals[-1]
        lacking = round(float(short) * self._microbatch)
        return [count > _PRESENT for count in present.tolist()], min(samples, max(1, samples - lacking))

    def step(self) -> None:
        """The step under way is made: what was noted for the next one takes its place."""
        self.clear(0)
        self._present.append(self._present.pop(0))
        self._short.append(self._short.pop(0))

    def clear(self, ahead: int) -> None:
        """Forget what was noted for one step."""
        self._present[ahead], self._short[ahead] = [False] * len(self._present[ahead]), 0
