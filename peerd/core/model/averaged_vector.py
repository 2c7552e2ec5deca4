"""Vector of a stage's gradients that averaging sums: its size, and the check that rounds can carry it.

Doctor, a stage that is about to be built, and a model that was built are checked by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from peerd.core.errors import ConfigError
from peerd.core.limits import AVERAGE_PARTS, FRAME_ELEMENTS
from peerd.core.run.runfile import AveragingSection


def vector_sizes(section: AveragingSection, shapes: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Values of the first and of the second vector of a round, for tensors of these shapes. Only powersgd has a second
    one: it sends two factors of a matrix, unless the matrix has fewer values.
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
    """Raise ConfigError if rounds cannot carry a vector of so many values, as the run would only stall."""
    if values > FRAME_ELEMENTS:
        least = "cut the model into more stages (pipeline.stages)"
        raise ConfigError(f"a stage's gradient has {values} values; allowed: up to {FRAME_ELEMENTS}: {least}")
    least_bytes = values * item_bytes // (AVERAGE_PARTS // 2)
    if section.part_bytes < least_bytes:
        told = f"averaging.part_bytes is {section.part_bytes}"
        raise ConfigError(f"{told}; allowed for a gradient of {values} values: {least_bytes} and more")
