"""Vector of a stage's gradients that averaging sums: its size, and the check that averaging rounds can carry it.

`peerd doctor`, a stage before it builds its model, and a stage with its model make the same check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from peerd.core.errors import ConfigError
from peerd.core.limits import AVERAGE_PARTS, FRAME_ELEMENTS
from peerd.run.runfile import AveragingSection


def vector_sizes(section: AveragingSection, shapes: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Number of values in the first and second vector of an averaging round, for tensors of these shapes.

    Only powersgd has a second vector: it sends two factors of each matrix, unless the matrix itself is no larger.
    """
    first = second = 0
    for shape in shapes:
        values = math.prod(shape)
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, values)
        rank = min(section.rank, rows, columns)
        if section.code == "powersgd" and len(shape) > 1 and rank * (rows + columns) < values:
            first, second = first + rows * rank, second + columns * rank
        else:
            first += values
    return first, second


def check_vector(section: AveragingSection, values: int, item_bytes: int) -> None:
    """Raise ConfigError if averaging rounds cannot carry a vector of `values` values, since the run would stall."""
    if values > FRAME_ELEMENTS:
        least = "cut the model into more stages (pipeline.stages)"
        raise ConfigError(f"a stage's gradient has {values} values; allowed: up to {FRAME_ELEMENTS}: {least}")
    least_bytes = values * item_bytes // (AVERAGE_PARTS // 2)
    if section.part_bytes < least_bytes:
        told = f"averaging.part_bytes is {section.part_bytes}"
        raise ConfigError(f"{told}; allowed for a gradient of {values} values: {least_bytes} and more")
