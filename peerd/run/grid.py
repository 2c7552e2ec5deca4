"""The grid of experts: names of experts and prefixes, and bitmaps of the live coordinates below a prefix.

A run has layers of experts, all with the same grid of one to three dimensions (Learning@home, section 3.2). An expert's
name is its layer and all its coordinates, as text `0.5.12`; a prefix is the layer and only the first coordinates,
`0.5`. A prefix's bitmap has one bit for each value of the next coordinate, lowest first: 1 if an expert lives below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from peerd.core.ids import Key
from peerd.run.runfile import ExpertsSection, RunFile


class Uid(NamedTuple):
    """Name of an expert or a prefix: `at` has all coordinates of an expert, or only the first ones."""

    layer: int
    at: tuple[int, ...]

    def __str__(self) -> str:
        return ".".join(map(str, (self.layer, *self.at)))

    @property
    def prefix(self) -> Uid:
        """The prefix that is one coordinate shorter."""
        return Uid(self.layer, self.at[:-1])

    def below(self, coordinate: int) -> Uid:
        """This prefix, extended by `coordinate`."""
        return Uid(self.layer, (*self.at, coordinate))


class Grid(NamedTuple):
    """Size of the grid: the number of layers, and of coordinates in each dimension."""

    layers: int
    sides: tuple[int, ...]

    @property
    def places(self) -> int:
        """The most experts that one layer can have."""
        return math.prod(self.sides)

    def holds(self, uid: Uid) -> bool:
        """True for an expert or prefix inside the grid."""
        inside = all(0 <= c < side for c, side in zip(uid.at, self.sides, strict=False))
        return 0 <= uid.layer < self.layers and len(uid.at) <= len(self.sides) and inside

    def is_expert(self, uid: Uid) -> bool:
        """True for the name of an expert inside the grid."""
        return len(uid.at) == len(self.sides) and self.holds(uid)

    def side_below(self, prefix: Uid) -> int:
        """Number of values of the coordinate that follows `prefix`."""
        return self.sides[len(prefix.at)]

    def uid(self, number: int) -> Uid:
        """The expert with this number, 0 to `layers * places - 1`, in row-major order."""
        layer, rest = divmod(number, self.places)
        at: list[int] = []
        for side in reversed(self.sides):
            rest, coordinate = divmod(rest, side)
            at.append(coordinate)
        return Uid(layer, tuple(reversed(at)))

    def number(self, uid: Uid) -> int:
        """The number of an expert; the inverse of `uid`."""
        found = uid.layer
        for coordinate, side in zip(uid.at, self.sides, strict=True):
            found = found * side + coordinate
        return found

    def prefixes(self, uid: Uid) -> Iterator[Uid]:
        """The prefixes under which an expert is announced: the layer alone in a grid of one dimension, else all
        prefixes with at least one coordinate.
        """
        for length in range(min(1, len(self.sides) - 1), len(self.sides)):
            yield Uid(uid.layer, uid.at[:length])


def grid_of(run: RunFile) -> Grid:
    """The grid of a run that has experts."""
    section = run.experts or ExpertsSection()
    return Grid(section.layers or run.model.layers, tuple(section.grid))


def parse_uid(text: str) -> Uid:
    """Parse the name of an expert or a prefix. Raises ValueError."""
    parts = [int(part) for part in text.split(".") if part.isascii() and part.isdigit() and len(part) <= 9]
    if not 1 <= len(parts) <= 4 or text != ".".join(map(str, parts)):
        raise ValueError(f"{text[:40]!r} is not the name of an expert: a layer and coordinates, such as 0.5.12")
    return Uid(parts[0], tuple(parts[1:]))


def bitmap(coordinates: Iterable[int], side: int) -> bytes:
    """Bitmap with these coordinates' bits set, lowest bit first, in the fewest bytes for `side` bits."""
    bits = 0
    for coordinate in coordinates:
        bits |= 1 << coordinate
    return bits.to_bytes(-(-side // 8), "little")


def coordinates_in(bits: bytes) -> list[int]:
    """The coordinates whose bits are set, in ascending order."""
    return [8 * i + bit for i, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def prefix_key(run: str, prefix: Uid) -> Key:
    """DHT key under which hosts announce their experts below a prefix."""
    return Key.of(f"{run}/experts/{prefix}")


def kept_experts_key(run: str, prefix: Uid) -> Key:
    """DHT key under which peers announce the checkpoints that they hold of experts below a prefix."""
    return Key.of(f"{run}/experts/kept/{prefix}")


def holders_key(run: str) -> Key:
    """DHT key under which peers announce that they have disk space for checkpoints of experts."""
    return Key.of(f"{run}/experts/holders")


def sample_shapes(run: RunFile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one sample at an expert's input and output; defaults follow from the block type and the model."""
    section = run.experts or ExpertsSection()
    usual = [run.model.context, run.model.d_model] if section.block == "transformer" else [run.model.d_model]
    given = section.input or usual
    return tuple(given), tuple(section.output or given)
