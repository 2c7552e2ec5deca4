"""A line chart in braille dots: two columns and four rows of dots per character. Knows numbers, nothing of training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of each dot: column, then row from the top

Point = tuple[float, float]


def chart(points: Sequence[Point], *, width: int, height: int, x_end: float) -> list[str]:
    """`height` lines of `width` characters with a scale on the left; x runs from 0 to `x_end`."""
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not known:
        return ["waiting for the first step".center(width)] + [" " * width] * (height - 1)
    low, high = min(y for _, y in known), max(y for _, y in known)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    room = width - 7  # five characters of scale, a space, and the axis
    grid = [[0] * room for _ in range(height)]
    columns, rows = room * 2, height * 4
    for column, row in _line(known, x_end, (low, high), (columns, rows)):
        grid[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    lines = []
    for index, cells in enumerate(grid):
        value = high - (high - low) * index / max(height - 1, 1)
        lines.append(f"{value:5.2f} ┤" + "".join(chr(0x2800 + bits) for bits in cells))
    return lines


def _line(points: Sequence[Point], x_end: float, y_range: Point, size: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of the points and of the straight lines between them."""
    columns, rows = size
    low, high = y_range

    def place(x: float, y: float) -> tuple[float, float]:
        across = min(max(x / max(x_end, 1e-9), 0.0), 1.0) * (columns - 1)
        return across, (high - y) / (high - low) * (rows - 1)

    placed = [place(x, y) for x, y in points]
    dots = [(round(x), round(y)) for x, y in placed]
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        count = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        dots += [(round(x0 + (x1 - x0) * k / count), round(y0 + (y1 - y0) * k / count)) for k in range(count)]
    return dots
