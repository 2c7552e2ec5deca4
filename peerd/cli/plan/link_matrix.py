"""Draws a network in the terminal, as the time of a message from each device (row) to each other (column).

Devices are ordered by stage, with gaps between stages: a blue block on the diagonal is a stage whose peers are near
each other. If there are more devices than fit, neighbours of one stage share a cell, which shows their slowest link.
With colours, one line has two rows, as upper and lower half blocks. Without, a cell is two characters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from rich.style import Style
from rich.text import Text

from peerd.placement.problem import Matrix
from peerd.screen.units import took

_RAMP: Final = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43))  # fast to slow
_SHADES: Final = ".:-=+*#%@"  # fast to slow, without colours
_DEAD: Final = (90, 90, 90)
_SELF: Final = (0, 0, 0)
_FASTER: Final = 0.02  # share of links below the scale, so that a few fast links do not flatten it
_LEGEND_CELLS: Final = 16

Cells = list[float | None]  # seconds, inf without a link, nan for a device with itself; None is a gap between stages


class _Scale(NamedTuple):
    """Logarithmic colour scale between two link times in seconds. Times outside are clipped."""

    least_s: float
    most_s: float

    def level(self, seconds: float) -> float:
        """Position on the scale: 0 for the fastest links, 1 for the slowest."""
        if self.most_s <= self.least_s:
            return 0.0
        return math.log(max(seconds, self.least_s) / self.least_s) / math.log(self.most_s / self.least_s)


def link_matrix(seconds: Matrix, stages: Sequence[Sequence[int]], width: int, *, coloured: bool) -> list[Text]:
    """Lines of at most `width` columns, the legend last. `stages` lists each stage's devices; the last may be idle."""
    groups = [list(members) for members in stages if members]
    label = len(str(len(stages))) + 1
    gaps = len(groups) - 1
    room = (width - label - gaps) if coloured else (width - label - gaps) // 2
    per_cell = next(k for k in range(1, len(seconds) + 2) if _cell_count(groups, k) <= max(room, len(groups)))
    cells = [[group[at : at + per_cell] for at in range(0, len(group), per_cell)] for group in groups]
    rows = [_row(seconds, cell, cells) for group in cells for cell in group]
    known = [value for row in rows for value in row if value is not None and math.isfinite(value) and value > 0]
    scale = _Scale(float(np.quantile(known, _FASTER)), max(known)) if known else _Scale(1.0, 1.0)
    sizes = [len(group) for group in cells]
    numbers = [str(number) for number, members in enumerate(stages) if members]
    lines = [_heads(numbers, sizes, label, 1 if coloured else 2)]
    lines += _coloured(rows, sizes, numbers, label, scale) if coloured else _plain(rows, sizes, numbers, label, scale)
    dead = any(value is not None and math.isinf(value) for row in rows for value in row)
    lines.append(_legend(scale, label, coloured=coloured, dead=dead))
    if per_cell > 1:
        lines.append(Text(f"{'':{label}}a cell: {per_cell} x {per_cell} devices, the slowest link", "dim"))
    for line in lines:
        line.truncate(width)
    return lines


def _cell_count(groups: Sequence[Sequence[int]], per_cell: int) -> int:
    return sum(-(-len(group) // per_cell) for group in groups)


def _row(seconds: Matrix, members: Sequence[int], cells: Sequence[Sequence[Sequence[int]]]) -> Cells:
    found: Cells = []
    for group in cells:
        if found:
            found.append(None)
        for others in group:
            block = seconds[np.ix_(members, others)]
            apart = np.asarray(members)[:, None] != np.asarray(others)[None, :]
            found.append(float(block[apart].max()) if apart.any() else math.nan)
    return found


def _heads(numbers: Sequence[str], sizes: Sequence[int], label: int, cell_width: int) -> Text:
    """Head line with the number of each stage above its first column, if it fits."""
    line = " " * label
    for number, size in zip(numbers, sizes, strict=True):
        room = size * cell_width + 1
        line += (number if len(number) < room else "").ljust(room)
    return Text(line.rstrip(), "bold")


def _coloured(
    rows: Sequence[Cells], sizes: Sequence[int], numbers: Sequence[str], label: int, scale: _Scale
) -> list[Text]:
    pixels: list[tuple[str, Cells]] = []
    at = 0
    for number, size in zip(numbers, sizes, strict=True):
        if pixels:
            pixels.append(("", [None] * len(rows[0])))
        pixels += [(number if index == 0 else "", row) for index, row in enumerate(rows[at : at + size])]
        at += size
    if len(pixels) % 2:
        pixels.append(("", [None] * len(rows[0])))
    lines = []
    for (upper_name, upper), (lower_name, lower) in zip(pixels[::2], pixels[1::2], strict=True):
        line = Text(f"{upper_name or lower_name:>{label - 1}} ", "bold")
        for above, below in zip(upper, lower, strict=True):
            line.append(*_half_blocks(above, below, scale))
        lines.append(line)
    return lines


def _half_blocks(above: float | None, below: float | None, scale: _Scale) -> tuple[str, Style]:
    """Character and style that show one cell above another."""
    if above is None and below is None:
        return " ", Style()
    if above is None:
        return "▄", Style(color=_rgb(below, scale))
    if below is None:
        return "▀", Style(color=_rgb(above, scale))
    return "▀", Style(color=_rgb(above, scale), bgcolor=_rgb(below, scale))


def _rgb(seconds: float | None, scale: _Scale) -> str:
    if seconds is None or math.isnan(seconds):
        return "rgb({},{},{})".format(*_SELF)
    if math.isinf(seconds):
        return "rgb({},{},{})".format(*_DEAD)
    at = scale.level(seconds) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    mixed = [round(a + (b - a) * (at - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)]
    return "rgb({},{},{})".format(*mixed)


def _plain(
    rows: Sequence[Cells], sizes: Sequence[int], numbers: Sequence[str], label: int, scale: _Scale
) -> list[Text]:
    lines: list[Text] = []
    at = 0
    for number, size in zip(numbers, sizes, strict=True):
        if lines:
            lines.append(Text(""))
        for index, row in enumerate(rows[at : at + size]):
            cells = "".join(" " if value is None else 2 * _shade(value, scale) for value in row)
            lines.append(Text(f"{number if index == 0 else '':>{label - 1}} {cells}"))
        at += size
    return lines


def _shade(seconds: float, scale: _Scale) -> str:
    if math.isnan(seconds):
        return " "
    return "X" if math.isinf(seconds) else _SHADES[round(scale.level(seconds) * (len(_SHADES) - 1))]


def _legend(scale: _Scale, label: int, *, coloured: bool, dead: bool) -> Text:
    line = Text(" " * label + "up to " + took(scale.least_s) + " ")
    if coloured:
        for at in range(_LEGEND_CELLS):
            seconds = scale.least_s * (scale.most_s / scale.least_s) ** (at / (_LEGEND_CELLS - 1))
            line.append("█", Style(color=_rgb(seconds, scale)))
    else:
        line.append(_SHADES)
    line.append(f" {took(scale.most_s)}")
    if dead:
        line.append("   no link: ")
        line.append(*(("█", Style(color=_rgb(math.inf, scale))) if coloured else ("X",)))
    return line
