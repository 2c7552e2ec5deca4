"""The grid of the simulated Moshpit averaging, where groups that fail go on, and the theory of what failures leave.

A model: it shows what Moshpit averaging does under churn (`python scripts/swarm.py averaging`). A run uses
`machine/moshpit`, whose rounds give the sum of all or fail. Every peer has a cell of a grid with d axes. Round t
averages inside each line along axis t mod d, so that after d rounds all hold the mean of all. A cell carries the pair
(w x, w); a line replaces each pair by the sum of its living cells' pairs over their number, in the order of their
coordinates, and a peer reads its value as (w x) / w.

What that gives, all of it tested:
* Full grid, nobody fails: after d rounds every cell holds the same bits, the exact weighted mean of all.
* Two cells share at most one line: two peers that met do not meet in the next d - 1 rounds (in their own cells).
* A cell that nobody fills is a hole. The sums of w x and of w over all cells never change, so the mean of all stays
  what it was; but after d rounds a cell holds a mean of means, in which members of a short line count more than
  others: exact only where the lines of an axis are equally long. Therefore holes are filled: a peer stands in with a
  pair of zeros, in a second cell that shares no line with its own. So d rounds are exact for any number of peers.
* Failures: `grid_spread` and `random_spread` say what is left of the variance.

Decides only; draws nothing: seeds are hashed. Peers may choose their ids, thus their cells; the seed must come later.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from peerd.machine.moshpit import smallest_side

Cell = tuple[int, ...]


def shape_of(peers: int, axes: int) -> Cell:
    """Sides of the smallest grid that has a cell for each of `peers`, with `axes` axes that differ by one at most.

    Fewer axes when that many would not have two cells each. Less than half of the cells are spare.
    """
    if peers < 1 or axes < 1:
        raise ValueError(f"no grid of {axes} axes for {peers} peers")
    sides = [smallest_side(peers, axes)] * axes
    for axis in reversed(range(axes)):
        if math.prod(sides) // sides[axis] * (sides[axis] - 1) >= peers:
            sides[axis] -= 1
    return tuple(side for side in sides if side > 1) or (peers,)


@dataclass(frozen=True, slots=True)
class Line:
    """A group: cells by coordinate, and who plays each; nobody twice. Sums are made in this order."""

    cells: tuple[Cell, ...]
    peers: tuple[str, ...]


class Grid:
    """Peers on the cells of a grid. Pure: the same seed, peers and shape give the same grid everywhere."""

    def __init__(self, seed: bytes, peers: Iterable[str], shape: Cell, *, stand_ins: bool = True) -> None:
        self.shape = shape
        cells = math.prod(shape)
        order = _shuffled(seed, set(peers))
        if len(order) > cells:
            raise ValueError(f"{len(order)} peers do not fit into {cells} cells")
        # Evenly over the grid, so that no line has all the holes.
        self.home = {peer: self._cell(i * cells // len(order)) for i, peer in enumerate(order)}
        self.player = {cell: peer for peer, cell in self.home.items()}
        self.standing: dict[str, list[Cell]] = {}  # more cells that a peer plays
        if stand_ins:
            self._fill(order)

    def lines(self, axis: int, living: Collection[str]) -> list[Line]:
        """The groups that average along `axis`, without the cells of peers that are not among `living`."""
        found = []
        rest = [range(side) for k, side in enumerate(self.shape) if k != axis]
        for others in itertools.product(*rest):
            along = [(*others[:axis], at, *others[axis:]) for at in range(self.shape[axis])]
            cells = tuple(cell for cell in along if self.player.get(cell) in living)
            if cells:
                found.append(Line(cells, tuple(self.player[cell] for cell in cells)))
        return found

    def cells_of(self, peer: str) -> list[Cell]:
        """Its own cell first, then those where it stands in."""
        return [self.home[peer], *self.standing.get(peer, ())]

    def _cell(self, number: int) -> Cell:
        cell = []
        for side in reversed(self.shape):
            number, at = divmod(number, side)
            cell.append(at)
        return tuple(reversed(cell))

    def _fill(self, order: list[str]) -> None:
        """Give every hole to a peer that is on no line through it, if possible one that stands in nowhere yet."""
        idle = list(order)  # there are fewer holes than peers
        for number in range(math.prod(self.shape)):
            hole = self._cell(number)
            if hole in self.player:
                continue
            able = (peer for peer in (*idle, *order) if all(_apart(hole, cell) for cell in self.cells_of(peer)))
            peer = next(able, None)
            if peer is not None:
                self.player[hole] = peer
                self.standing.setdefault(peer, []).append(hole)
                if peer in idle:
                    idle.remove(peer)


def _apart(one: Cell, other: Cell) -> bool:
    """On no line together?"""
    return sum(a != b for a, b in zip(one, other, strict=True)) > 1


def _shuffled(seed: bytes, names: Iterable[str]) -> list[str]:
    """An order that depends on nothing but the seed and the names."""
    key = hashlib.blake2b(seed).digest()
    return sorted(names, key=lambda name: (hashlib.blake2b(name.encode(), key=key, digest_size=16).digest(), name))


@dataclass(frozen=True, slots=True)
class Meeting:
    """One round. `fresh`: a cycle begins, so each peer's pairs go, added up, to its own cell, and stand-ins hold 0."""

    grid: Grid
    axis: int
    fresh: bool
    lines: tuple[Line, ...]


class Moshpit:
    """Round after round over changing members. A grid lives for whole cycles of as many rounds as it has axes.

    Who comes meanwhile waits for the next cycle, who goes leaves a hole; members who are the same keep their grid, and
    so their connections. `seed` should be what no member could know when it chose its id.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._grids = 0
        self._grid: Grid | None = None
        self._at: tuple[frozenset[str], int] | None = None
        self._axis = 0

    def advance(self, members: Collection[str], axes: int) -> Meeting:
        """The next round, among the living `members`; `axes` counts when a cycle begins."""
        at = (frozenset(members), axes)
        fresh = self._grid is None or self._axis == 0
        if self._grid is None or (fresh and at != self._at):
            self._grids += 1
            seed = self._seed + self._grids.to_bytes(8, "big")
            self._grid, self._at = Grid(seed, members, shape_of(len(at[0]), axes)), at
        axis = self._axis
        self._axis = (axis + 1) % len(self._grid.shape)
        return Meeting(self._grid, axis, fresh, tuple(self._grid.lines(axis, at[0])))

    def begin_anew(self) -> None:
        """Call the rest of the cycle off: the next round begins one."""
        self._axis = 0


# --- theory --------------------------------------------------------------------------------------------------------


def random_spread(sizes: Sequence[int], failure: float) -> float:
    """The expected variance after one round of random groups, over the one before.

    `sizes` of the groups; each peer misses the round with probability `failure` and keeps its value. Averaging in
    random blocks of any sizes leaves (blocks - 1) / (peers - 1), and a peer that misses it is a block of its own.
    """
    peers = sum(sizes)
    blocks = sum(1 - failure**size for size in sizes) + failure * peers
    return (blocks - 1) / (peers - 1)


def grid_spread(shape: Cell, failure: float, rounds: int) -> float:
    """The same after `rounds` rounds along the axes of a full grid in turn, for values without pattern.

    Exact. With P_T the averaging over the axes in T, and W one round along axis a (a projection inside each line):
    E[W] = s + (1 - s) P_a inside a line of m, where s = (m f - f^m) / (m - 1); lines fail independently. So
    E[W P_T W] stays in the span of the P_T: it is P_T when a is in T, and else
    P_T (s^2 + (1 - s^2) P_a) + s (1 - s) (1 - P_a) / (cells averaged by P_T).
    Applied backwards to "what differs from the mean of all", the trace is the answer.
    """
    axes = len(shape)
    everything = frozenset(range(axes))
    form: dict[frozenset[int], float] = {frozenset(): 1.0, everything: -1.0}  # T -> coefficient of P_T
    for t in reversed(range(rounds)):
        before, form = form, {}
        one = frozenset({t % axes})
        side = shape[t % axes]
        kept = (side * failure - failure**side) / (side - 1) if side > 1 else 1.0
        for over, weight in before.items():
            for term, factor in _met(over, one, kept, math.prod(shape[k] for k in over)):
                form[term] = form.get(term, 0.0) + weight * factor
    cells = math.prod(shape)
    trace = sum(weight * cells / math.prod(shape[k] for k in over) for over, weight in form.items())
    return trace / (cells - 1)


def _met(
    over: frozenset[int], one: frozenset[int], kept: float, averaged: int
) -> Iterator[tuple[frozenset[int], float]]:
    if one <= over:
        yield over, 1.0
        return
    yield over, kept**2
    yield over | one, 1 - kept**2
    yield frozenset(), kept * (1 - kept) / averaged
    yield one, -kept * (1 - kept) / averaged
