"""Curves as an SVG picture, without packages: lines with a band of one standard deviation, axes, a legend."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 62, 36, 16, 46


@dataclass(frozen=True, slots=True)
class Line:
    """One line: the values of each run at the same places."""

    name: str
    at: list[float]
    runs: list[list[float]]  # each as long as `at`
    dashed: bool = False
    color: int = 0

    def means(self) -> list[float]:
        return [statistics.mean(column) for column in zip(*self.runs, strict=True)]

    def deviations(self) -> list[float]:
        if len(self.runs) < 2:
            return [0.0] * len(self.at)
        return [statistics.stdev(column) for column in zip(*self.runs, strict=True)]


class _Frame:
    def __init__(self, lines: Sequence[Line], bottom: float | None, top: float | None) -> None:
        every = [
            m + s * d for one in lines for m, d in zip(one.means(), one.deviations(), strict=True) for s in (-1, 1)
        ]
        self.low = min(every) if bottom is None else bottom
        self.high = max(every) if top is None else top
        self.last = max(one.at[-1] for one in lines)

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / self.last

    def y(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def svg(
    title: str, axes: tuple[str, str], lines: Sequence[Line], bottom: float | None = None, top: float | None = None
) -> str:
    """The picture; `axes` are the names of x and y, `bottom` and `top` the least and the most y that are shown."""
    frame = _Frame(lines, bottom, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
        *_axes(frame, axes),
    ]
    falls = sum(one.means()[-1] - one.means()[0] for one in lines) < 0
    first = TOP + 10 if falls else HEIGHT - BOTTOM - 14 * len(lines) - 4  # where the curves are not, at the end
    for number, one in enumerate(lines):
        parts += _line(frame, one)
        y = first + 14 * number
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        color = COLORS[one.color % len(COLORS)]
        parts.append(f'<line x1="{WIDTH - 220}" x2="{WIDTH - 190}" y1="{y}" y2="{y}" stroke="{color}"{dash}/>')
        parts.append(f'<text x="{WIDTH - 184}" y="{y + 4}">{escape(one.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axes(frame: _Frame, axes: tuple[str, str]) -> list[str]:
    x0, x1, y0, y1 = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
    parts = [f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="black"/>']
    for i in range(6):
        value = frame.low + (frame.high - frame.low) * i / 5
        y = frame.y(value)
        parts.append(f'<path d="M{x0} {y:.1f}H{x1}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        at = frame.last * i / 5
        parts.append(f'<text x="{frame.x(at):.1f}" y="{y0 + 16}" text-anchor="middle">{at:.4g}</text>')
    parts.append(f'<text x="{(x0 + x1) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(axes[0])}</text>')
    middle = (y0 + y1) / 2
    turned = f'transform="rotate(-90 16 {middle})"'
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" {turned}>{escape(axes[1])}</text>')
    return parts


def _line(frame: _Frame, one: Line) -> list[str]:
    means, deviations = one.means(), one.deviations()
    color = COLORS[one.color % len(COLORS)]
    above = [f"{frame.x(a):.1f},{frame.y(m + d):.1f}" for a, m, d in zip(one.at, means, deviations, strict=True)]
    below = [f"{frame.x(a):.1f},{frame.y(m - d):.1f}" for a, m, d in zip(one.at, means, deviations, strict=True)]
    line = " ".join(f"{frame.x(a):.1f},{frame.y(m):.1f}" for a, m in zip(one.at, means, strict=True))
    dash = ' stroke-dasharray="5 4"' if one.dashed else ""
    band = " ".join([*above, *reversed(below)])
    return [
        f'<polygon points="{band}" fill="{color}" opacity="0.12"/>',
        f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>',
    ]
