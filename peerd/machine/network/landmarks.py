"""The network between given peers without gaps: what was measured, and estimates by landmarks for the rest.

A landmark of a pair is a third peer whose delays to both are measured, a and b: by the triangle's inequality the pair's
delay lies between |a - b| and a + b, and the middle of these is the larger of both. Landmarks near one of the two say
most; of those few whose spans are the narrowest the median counts, so that one that lies moves an estimate no farther
than to its neighbour's. (After IDMaps and the triangulated heuristic of Ng and Zhang, 2002; a median in place of the
narrowest span, since peers may lie.) Without a landmark a pair counts as the median of all that is measured.

A rate's estimate is the lower of what the sender sends and the receiver receives where they are known best: the second
highest of a peer's measured rates, since a single other end could claim any, or what its line is said to carry where
that is less, or where nothing was measured. Pure: what was measured is an argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.machine.network.network_map import PairView

LANDMARKS: Final = 5  # that count for one pair: more are farther off, fewer bear only one liar
DELAY_S: Final = 0.05  # a round trip where nothing at all is measured
RATE_BYTES_PER_S: Final = 12.5e6  # likewise: 100 Mb/s

View = Callable[[str, str], PairView]
Lines = Mapping[str, tuple[float, float]]  # by peer: what its line carries up and down, in bytes/s; 0: unknown


@dataclass(frozen=True, slots=True)
class FilledNetwork:
    """Matrices over `peers`, from each (row) to each other (column): what a placement problem needs.

    `rtt_s` / 2 is the delay one way; it is 0 on the diagonal, where `rate` is infinite. The masks are true where a
    figure was measured, and on the diagonal.
    """

    peers: tuple[str, ...]
    rtt_s: list[list[float]]
    rate: list[list[float]]  # bytes/s
    rtt_measured: list[list[bool]]
    rate_measured: list[list[bool]]
    age_s: list[list[float]]  # of the oldest measured figure of the pair
    rtt_guessed: bool = False  # nothing at all was measured: estimates are DELAY_S
    rate_guessed: bool = False  # nor said of lines: estimates are RATE_BYTES_PER_S


def filled(peers: Sequence[str], view: View, lines: Lines | None = None) -> FilledNetwork:
    """The network between `peers`. The time grows with their square, and with their cube where much is missing: a
    second for 256, so more than some dozens are for a worker.
    """
    views = [[PairView() if one == other else view(one, other) for other in peers] for one in peers]
    known = [[pair.rtt_s for pair in row] for row in views]
    rate = [[pair.there for pair in row] for row in views]
    usual_s = statistics.median([rtt_s for row in known for rtt_s in row if rtt_s is not None] or [DELAY_S])
    count = len(peers)
    rtt_s = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            measured = known[i][j]
            found = measured if measured is not None else delay_by_landmarks(known[i], known[j])
            rtt_s[i][j] = rtt_s[j][i] = usual_s if found is None else found
    full = [[float("inf") if i == j else 0.0 for j in range(count)] for i in range(count)]
    up = [_best(peers[i], rate[i], lines, 0) for i in range(count)]
    down = [_best(peers[j], [row[j] for row in rate], lines, 1) for j in range(count)]
    usual = statistics.median([one for row in rate for one in row if one is not None] or [RATE_BYTES_PER_S])
    for i in range(count):
        for j in range(count):
            if i != j:
                measured, ends = rate[i][j], [end for end in (up[i], down[j]) if end is not None]
                full[i][j] = measured if measured is not None else min(ends, default=usual)
    rates_known = any(one is not None for row in rate for one in row)
    return FilledNetwork(
        tuple(peers),
        rtt_s,
        full,
        [[i == j or known[i][j] is not None for j in range(count)] for i in range(count)],
        [[i == j or rate[i][j] is not None for j in range(count)] for i in range(count)],
        [[pair.age_s for pair in row] for row in views],
        all(one is None for row in known for one in row),
        not rates_known and all(one is None for one in (*up, *down)),
    )


def delay_by_landmarks(mine: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """The estimate of a pair's delay from both ends' delays to the same third peers; None: they have none in common."""
    spans = sorted((min(a, b), max(a, b)) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None)
    return statistics.median([middle for _, middle in spans[:LANDMARKS]]) if spans else None


def _best(peer: str, rates: Sequence[float | None], lines: Lines | None, way: int) -> float | None:
    """The rate of a peer's end, one way: the second best measured, or its line's; None: unknown."""
    known = sorted((rate for rate in rates if rate is not None), reverse=True)
    stated = lines.get(peer, (0.0, 0.0))[way] if lines is not None else 0.0
    ends = [known[min(1, len(known) - 1)]] if known else []
    if stated > 0:
        ends.append(stated)
    return min(ends, default=None)
