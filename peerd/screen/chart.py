"""Line charts of braille dots, with two columns and four rows of dots per character."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of each dot: column, then row from the top
_SCALE: Final = 7  # columns of the scale: five characters, a space, and the axis
_AXIS_FROM: Final = 6  # height in lines from which a chart shows its first and last x
_LARGEST: Final = 1e30  # larger values are left out

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: its points, and its style as named in rich."""

    points: Sequence[Point]
    style: str = ""


def chart(curves: Sequence[Curve], *, width: int, height: int, x_range: Point, empty: str) -> list[Text]:
    """Draw a chart in `height` lines of `width` characters, with a scale on the left and later curves on top.

    If the curves have no points, or the size is too small, the lines show the text `empty`.
    """
    shown = [Curve([p for p in curve.points if _plain(p)], curve.style) for curve in curves]
    values = [y for curve in shown for _, y in curve.points]
    if not values or width <= _SCALE or height < 1:
        return [Text(empty[:width].center(width), "dim") if row == height // 2 else Text("") for row in range(height)]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    rows = height - 1 if height >= _AXIS_FROM else height
    lines = _scaled(_drawn(shown, (width - _SCALE, rows), x_range, (low, high)), low, high)
    if rows < height:
        first, last = (f"{x:,.0f}" for x in x_range)
        gap = max(1, width - _SCALE - len(first) - len(last))
        lines.append(Text((" " * _SCALE + first + " " * gap + last)[:width], "dim"))
    return lines


def _plain(point: Point) -> bool:
    return all(math.isfinite(value) and abs(value) < _LARGEST for value in point)


def _scaled(grid: list[list[tuple[int, str]]], low: float, high: float) -> list[Text]:
    lines = []
    for index, cells in enumerate(grid):
        value = high - (high - low) * index / max(len(grid) - 1, 1)
        label = f"{value:5.2f}" if -10 < value < 100 else f"{value:5.0f}" if -1e4 < value < 1e5 else f"{value:5.0e}"
        line = Text(no_wrap=True)
        line.append(f"{label[:5]} ┤", "dim")
        for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
            line.append("".join(chr(0x2800 + bits) for bits, _ in run), style)
        lines.append(line)
    return lines


def _drawn(
    curves: Sequence[Curve], size: tuple[int, int], x_range: Point, y_range: Point
) -> list[list[tuple[int, str]]]:
    """Rows of cells. Each cell has its dots as bits, and the style of the last curve in it."""
    room, rows = size
    grid = [[(0, "")] * room for _ in range(rows)]
    for curve in curves:
        for column, row in _line(curve.points, x_range, y_range, (room * 2, rows * 4)):
            bits, _ = grid[row // 4][column // 2]
            grid[row // 4][column // 2] = bits | _DOTS[column % 2][row % 4], curve.style
    return grid


def _line(points: Sequence[Point], x_range: Point, y_range: Point, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Positions (column, row) of the dots of the points and of the straight lines between them."""
    columns, rows = size
    (first, last), (low, high) = x_range, y_range

    def place(x: float, y: float) -> tuple[float, float]:
        across = min(max((x - first) / max(last - first, 1e-9), 0.0), 1.0) * (columns - 1)
        return across, (high - y) / (high - low) * (rows - 1)

    placed = [place(x, y) for x, y in points]
    dots = [(round(x), round(y)) for x, y in placed]
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        dots += [(round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)) for k in range(steps)]
    return dots
