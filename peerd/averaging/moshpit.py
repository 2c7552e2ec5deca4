"""Group schedule of Moshpit all-reduce: a large group averages in several rounds of small groups.

A run's conductor uses it through `topology`. Peers are in one fixed order, cut into leaves. In the first round each
leaf sums. In each later round `side` neighbouring clusters (leaves at first, then the joined clusters of the previous
round) sum their results: every cluster sends one peer into each group. After one round per side all have the total.

* Exact for any number of peers: each cluster's sum enters each group once. The clusters of one round differ in size by
  at most one peer; a surplus peer listens in one of the groups: it receives the sum and contributes nothing.
* Same bits: groups that compute the same sum add the same bits in the same order, that of the clusters.
* Two senders of a group have not been in the same group before.

This module only decides, and depends on nothing but its arguments. A peer can choose its id and thereby its position,
but gains nothing: it can spoil only its own groups, and is blamed for it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

SMALLEST_GROUP = 3  # least bound on a group's size: no grid with groups of two exists for three peers


@dataclass(frozen=True, slots=True)
class MoshpitGroup:
    """One group of one round; vectors are summed in the order of `senders`.

    Each listener already has the same partial sum as one of the senders; it contributes nothing and receives the sum.
    This is group number `copy`, from 0, of `copies` groups that compute the same sum.
    """

    senders: tuple[str, ...]
    listeners: tuple[str, ...] = ()
    copy: int = 0
    copies: int = 1

    @property
    def peers(self) -> tuple[str, ...]:
        """All peers of the group."""
        return self.senders + self.listeners


def smallest_side(peers: int, axes: int) -> int:
    """The least m with m ** axes >= peers."""
    side: int = max(1, round(peers ** (1 / axes)) - 1)
    while int(side**axes) < peers:
        side += 1
    return side


def largest_group(peers: int, sides: Sequence[int]) -> int:
    """Upper bound of the group size in this grid, senders and listeners together."""
    leaves = math.prod(sides[1:])
    worst, width = -(-peers // leaves), 1
    for side in sides[1:]:
        least, over = divmod(width * peers, leaves)  # peers of a cluster
        worst = max(worst, side + (-(-(side - 1) // least) if over else 0))
        width *= side
    return worst


@functools.lru_cache(256)
def grid_of(peers: int, rounds: int) -> tuple[int, ...]:
    """The sides of the grid with `rounds` rounds that has the smallest groups. Raises ValueError if there is none."""
    found = min(_grids(peers, rounds), key=lambda sides: (largest_group(peers, sides), sides), default=None)
    if found is None:
        raise ValueError(f"no grid of {rounds} rounds for {peers} peers")
    return found


@functools.lru_cache(256)
def grid_within(peers: int, largest: int) -> tuple[int, ...]:
    """The sides of the grid with the fewest rounds whose groups have at most `largest` (3 or more) peers."""
    if peers < 1 or largest < SMALLEST_GROUP:
        raise ValueError(f"no grid with groups of up to {largest} for {peers} peers")
    for rounds in range(1, peers.bit_length() + 1):
        fitting = (sides for sides in _grids(peers, rounds) if largest_group(peers, sides) <= largest)
        found = min(fitting, key=lambda sides: (largest_group(peers, sides), sides), default=None)
        if found is not None:
            return found
    raise AssertionError("halves have groups of three at most")


def _grids(peers: int, rounds: int) -> Iterator[tuple[int, ...]]:
    """Grids with nearly equal sides. The sides after the first ascend: clusters of later rounds have more peers, so
    there are more groups, and the surplus peers of larger sides are spread over all of them.
    """
    about = smallest_side(peers, rounds)
    sides = [side for side in (about - 2, about - 1, about, about + 1) if side >= 2]
    for later in itertools.combinations_with_replacement(sides, rounds - 1):
        leaves = math.prod(later)
        if leaves < peers or peers == 1:
            yield (-(-peers // leaves), *later)


def meetings(order: Sequence[str], sides: Sequence[int], weak: Collection[str] = ()) -> list[list[MoshpitGroup]]:
    """The groups of each round. `weak` peers, which cannot sum, are spread evenly, and become listeners first."""
    order = _spread(order, weak)
    leaves = math.prod(sides[1:])
    bounds = [at * len(order) // leaves for at in range(leaves + 1)]
    rounds = [[MoshpitGroup(tuple(order[begin:end])) for begin, end in itertools.pairwise(bounds)]]
    width = 1
    for side in sides[1:]:
        step, found = width * side, list[MoshpitGroup]()
        for first in range(0, leaves, step):
            parts = [order[bounds[at] : bounds[at + width]] for at in range(first, first + step, width)]
            found += joined(parts, weak)
        rounds.append(found)
        width = step
    return rounds


def joined(parts: Sequence[Sequence[str]], weak: Collection[str] = ()) -> list[MoshpitGroup]:
    """The groups in which clusters of these peers join their sums; each cluster sends one peer into each group."""
    count = min(map(len, parts))
    senders: list[list[str]] = [[] for _ in range(count)]
    listeners: list[list[str]] = [[] for _ in range(count)]
    strong = [0] * count
    for part in parts:
        ranked = sorted(part, key=lambda peer: peer in weak)
        places = sorted(range(count), key=strong.__getitem__)
        extra = sorted(range(count), key=lambda at: len(listeners[at]))
        places += itertools.islice(itertools.cycle(extra), len(part) - count)
        for number, (at, peer) in enumerate(zip(places, ranked, strict=True)):
            (senders if number < count else listeners)[at].append(peer)
            strong[at] += peer not in weak
    return [MoshpitGroup(tuple(senders[at]), tuple(listeners[at]), at, count) for at in range(count)]


def _spread(order: Sequence[str], weak: Collection[str]) -> list[str]:
    """The same peers, with the weak ones distributed evenly among the others."""
    few = [peer for peer in order if peer in weak]
    found = [peer for peer in order if peer not in weak]
    for number, peer in enumerate(few):
        found.insert((2 * number + 1) * len(order) // (2 * len(few)), peer)
    return found
