"""Network coordinates (Vivaldi, Dabek et al., 2004): estimate the time between any two peers from a few measured pairs.

Each peer is a point in space, with a height for the delay that its own connection adds to every path; the time between
two peers is their distance plus both heights. A measured pair moves its two points towards the measurement, the less
certain one farther. A wrong measurement moves two points once, by a fraction of the error, and the next good ones move
them back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

_STEP: Final = 0.25  # fraction of the difference for a peer without measurements, as in the paper
_ERROR_STEP: Final = 0.25
_LEAST_HEIGHT_S: Final = 1e-6
_LEAST_S: Final = 1e-3  # shorter measured times count as this much


@dataclass(slots=True)
class _Point:
    x: float
    y: float
    z: float
    height: float = _LEAST_HEIGHT_S
    error: float = 1.0  # relative error of its predictions


class Coordinates:
    """The coordinates of all measured peers. Times in seconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._points: dict[str, _Point] = {}

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, name: object) -> bool:
        """True if a time to or from this peer was measured."""
        return name in self._points

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all peers not in `names`."""
        self._points = {name: point for name, point in self._points.items() if name in names}

    def measured(self, one: str, other: str, seconds: float) -> None:
        """Record the measured time between two peers."""
        seconds = max(seconds, _LEAST_S)
        a, b = self._point(one, seconds), self._point(other, seconds)
        weight = a.error / (a.error + b.error)
        off = abs(self._between(a, b) - seconds) / seconds
        for point, beyond, share in ((a, b, weight), (b, a, 1.0 - weight)):
            _pull(point, beyond, _STEP * share * (seconds - self._between(a, b)))
            point.error += min(1.0, _ERROR_STEP * share) * (min(off, 1.0) - point.error)

    def between_s(self, one: str, other: str) -> float | None:
        """The time between two peers by their coordinates, or None if one of them is unknown."""
        a, b = self._points.get(one), self._points.get(other)
        return None if a is None or b is None else self._between(a, b)

    def _point(self, name: str, seconds: float) -> _Point:
        if name not in self._points:
            draw = self._rng.uniform
            self._points[name] = _Point(*(draw(-seconds, seconds) / 4 for _ in range(3)))
        return self._points[name]

    @staticmethod
    def _between(a: _Point, b: _Point) -> float:
        return math.dist((a.x, a.y, a.z), (b.x, b.y, b.z)) + a.height + b.height


def _pull(point: _Point, beyond: _Point, by_s: float) -> None:
    """Move a point away from another by `by_s`, or towards it if `by_s` is negative."""
    dx, dy, dz = point.x - beyond.x, point.y - beyond.y, point.z - beyond.z
    far = math.hypot(dx, dy, dz)
    if far > 0.0:
        whole = far + point.height + beyond.height
        scale = by_s / whole
        point.x, point.y, point.z = point.x + dx * scale, point.y + dy * scale, point.z + dz * scale
        point.height = max(_LEAST_HEIGHT_S, point.height + (point.height + beyond.height) * scale)
