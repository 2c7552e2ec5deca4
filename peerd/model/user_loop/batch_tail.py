"""Tail of a gradient sum: which parameters had a gradient, and by how many samples the microbatches were short.

It is sent behind the gradients, so that the mean of a batch matches plain torch: a parameter on which no loss of the
batch depends gets no gradient, and microbatches with fewer samples weigh less. Both are counts: of peers for each
parameter, and of samples. For codes with one scale per block, gaps of zeros, as wide as a block, separate them, so that
no gradient shares a block with a count, and the samples have a block of their own: the largest value of a block is
encoded without loss. Malicious input: the caller checks that totals are finite; a count beyond its range is clamped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from peerd.codec.format.blockwise import BLOCKS, CODES
from peerd.run.runfile import AveragingSection

_PRESENT: Final = 0.25  # threshold: peer counts are 0 or at least 1, with small coding errors


class BatchTail:
    """Tails of a model's sums. `ahead` is 0 for the current step and 1 for the next, as in `flat`."""

    def __init__(
        self, parameters: int, microbatch: int, averaging: AveragingSection, dtype: torch.dtype, steps: int
    ) -> None:
        """`microbatch`: samples of a full microbatch. `steps`: number of sums."""
        self._microbatch, self._dtype = microbatch, dtype
        gap = (averaging.block or BLOCKS[-1]) if averaging.code in CODES else 0
        sizes = {"tail/gap": gap, "tail/present": parameters, "tail/second gap": gap, "tail/short": 1}
        self.shapes = {name: torch.Size([size]) for name, size in sizes.items() if size or name == "tail/present"}
        self._gap = [0.0] * gap
        self._present = [[False] * parameters for _ in range(steps)]
        self._short = [0] * steps

    def note(self, ahead: int, gradients: Iterable[Tensor | None], samples: int) -> None:
        """Record a microbatch of `samples` samples."""
        there = [gradient is not None for gradient in gradients]
        self._present[ahead] = [had or has for had, has in zip(self._present[ahead], there, strict=True)]
        self._short[ahead] += max(0, self._microbatch - samples)

    def part(self) -> np.ndarray[Any, np.dtype[Any]]:
        """This peer's part of the current step's sum; samples are in units of a microbatch."""
        short = self._short[0] / self._microbatch
        values = [*self._gap, *map(float, self._present[0]), *self._gap, short]
        part: np.ndarray[Any, np.dtype[Any]] = torch.tensor(values, dtype=self._dtype).numpy()
        return part

    def read(self, totals: Sequence[Tensor], samples: int) -> tuple[list[bool], int]:
        """Which parameters had a gradient on any peer, and the true number of samples, between 1 and `samples`."""
        present, short = totals[-3 if self._gap else -2], totals[-1]
        lacking = round(float(short) * self._microbatch)
        return [count > _PRESENT for count in present.tolist()], min(samples, max(1, samples - lacking))

    def step(self) -> None:
        """Drop the records of the current step; those of the next step become the current ones."""
        self.clear(0)
        self._present.append(self._present.pop(0))
        self._short.append(self._short.pop(0))

    def clear(self, ahead: int) -> None:
        """Drop the records of one step."""
        self._present[ahead], self._short[ahead] = [False] * len(self._present[ahead]), 0
