"""Claims of experts: what a host announces, and which free experts it takes.

Sans-IO. Hosts claim experts by announcing them with a generation: 0 for an expert that begins anew, one more each time
that it is adopted from a checkpoint. A hostile host may claim experts that are not its own, in any generation: the
expert's lineage (`experts.owners.lineage`) decides which claim counts, never the number alone. Claims outside the grid
are ignored.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from peerd.messages.experts import Announced, Name
from peerd.run.grid import Grid, Uid, bitmap

_LOOKED_AT: Final = 100_000  # places that a host checks for free ones: a fuller grid needs no more hosts


def in_own_order(grid: Grid, rng: random.Random) -> Iterator[Uid]:
    """Every expert of the grid once, in an order that `rng` decides: hosts that start together take different ones."""
    count = grid.layers * grid.places
    start, stride = rng.randrange(count), rng.randrange(count) | 1
    while math.gcd(stride, count) != 1:
        stride = (stride + 2) % count or 1
    for i in range(count):
        yield grid.uid((start + i * stride) % count)


def candidates(grid: Grid, rng: random.Random, room: int) -> list[Uid]:
    """Experts that this host checks for a free one, in its own order: several times as many as it has room for."""
    order, most = in_own_order(grid, rng), min(_LOOKED_AT, 64 + 8 * room)
    return [uid for _, uid in zip(range(most), order, strict=False)]


def to_take(looked_at: Iterable[Uid], taken: Iterable[Uid], room: int) -> list[Uid]:
    """The first free experts among `looked_at`, at most `room`."""
    held, found = set(taken), list[Uid]()
    for uid in looked_at:
        if len(found) >= room:
            break
        if uid not in held:
            found.append(uid)
    return found


def capacity(limit: int, measured: int, grid: Grid) -> int:
    """Number of experts that a host takes: the user's `limit` (0: none set), otherwise what its memory holds."""
    return min(limit or max(0, measured), grid.layers * grid.places)


def last_prefixes(uids: Iterable[Uid]) -> list[Uid]:
    """The prefixes right above these experts, each once, sorted. All claims to the experts are there."""
    return sorted({uid.prefix for uid in uids})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimingHost:
    """What a host states about itself in each of its announcements."""

    queue_s: float
    addrs: tuple[str, ...] = ()
    token: bytes = b""
    client: bool = False


def announcements(grid: Grid, hosted: Mapping[Uid, tuple[int, int]], words: ClaimingHost) -> list[Announced]:
    """One record for each prefix below which this host has experts. `hosted`: (generation, version) by expert."""
    below = defaultdict[Uid, set[int]](set)
    for uid in hosted:
        for prefix in grid.prefixes(uid):
            below[prefix].add(uid.at[len(prefix.at)])
    records = []
    for prefix, coordinates in sorted(below.items()):
        uids = [prefix.below(c) for c in sorted(coordinates)]
        experts = uids if len(prefix.at) == len(grid.sides) - 1 else []
        records.append(
            Announced(
                prefix=Name.of(prefix),
                below=bitmap(coordinates, grid.side_below(prefix)),
                generations=[hosted[uid][0] for uid in experts],
                versions=[hosted[uid][1] for uid in experts],
                queue_s=max(0.0, min(1e6, words.queue_s)),
                addrs=list(words.addrs),
                token=words.token,
                client=words.client,
            )
        )
    return records
