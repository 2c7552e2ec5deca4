"""The network between given peers without gaps: measured figures, and estimates by landmarks for the rest.

A landmark of a pair is a third peer with measured delays to both, a and b. By the triangle inequality the pair's delay
is between |a - b| and a + b, and the middle of this interval is max(a, b). Landmarks near one of the two are the most
informative. The estimate is the median over the few landmarks with the narrowest intervals, so that one lying landmark
moves it no farther than to a neighbouring value. (After IDMaps and the triangulated heuristic of Ng and Zhang, 2002;
with a median instead of the narrowest interval, because peers may lie.) A pair without a landmark gets the median of
all measurements.

The estimate of a rate is the lower of the sender's sending rate and the receiver's receiving rate. Each is the second
highest of the peer's measured rates, because a single other end could claim any rate, or the stated rate of its
connection if that is lower or nothing was measured. Pure functions of the measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.placement.network.network_map import PairView

LANDMARKS: Final = 5  # most landmarks per pair: more would be farther off, fewer would tolerate only one liar
DELAY_S: Final = 0.05  # round trip if nothing at all is measured
RATE_BYTES_PER_S: Final = 12.5e6  # rate if nothing at all is measured: 100 Mb/s

View = Callable[[str, str], PairView]
Lines = Mapping[str, tuple[float, float]]  # by peer: upload and download rate of its line in bytes/s; 0: unknown


@dataclass(frozen=True, slots=True)
class FilledNetwork:
    """Matrices over `peers`, from each (row) to each other (column), as input of a placement problem.

    `rtt_s` / 2 is the one-way delay; it is 0 on the diagonal, where `rate` is infinite. The masks are True for measured
    entries and on the diagonal.
    """

    peers: tuple[str, ...]
    rtt_s: list[list[float]]
    rate: list[list[float]]  # bytes/s
    rtt_measured: list[list[bool]]
    rate_measured: list[list[bool]]
    age_s: list[list[float]]  # of the oldest measured figure of the pair
    rtt_guessed: bool = False  # nothing at all was measured: estimates are DELAY_S
    rate_guessed: bool = False  # no rate was measured or stated: estimates are RATE_BYTES_PER_S


def filled(peers: Sequence[str], view: View, lines: Lines | None = None) -> FilledNetwork:
    """The network between `peers`. Time is quadratic in their number, and cubic if many entries are missing.

    It takes a second for 256 peers, so run it on a worker for more than a few dozen.
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
    """Estimate of a pair's delay from both ends' delays to the same third peers, or None if none is shared."""
    spans = sorted((min(a, b), max(a, b)) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None)
    return statistics.median([middle for _, middle in spans[:LANDMARKS]]) if spans else None


def _best(peer: str, rates: Sequence[float | None], lines: Lines | None, way: int) -> float | None:
    """Rate of a peer's end in one direction: the second highest measured, at most the stated one; None if unknown."""
    known = sorted((rate for rate in rates if rate is not None), reverse=True)
    stated = lines.get(peer, (0.0, 0.0))[way] if lines is not None else 0.0
    ends = [known[min(1, len(known) - 1)]] if known else []
    if stated > 0:
        ends.append(stated)
    return min(ends, default=None)
