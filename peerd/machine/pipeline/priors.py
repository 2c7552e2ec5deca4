"""Expectations of peers that were never measured, from the rates that the run's conductor publishes of them.

Published rates say how peers compare, not what one trainer gets of each: others use them, too. So an expectation is on
the scale of what was measured of other peers. A claim is no evidence: nobody is expected to be faster than the fastest
peer that was measured, or where none was, than twice the usual rate, and nobody to take a thousand times as long as the
slowest; and what is measured counts from then on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Final

_MOST: Final = 2.0  # times the usual rate, where no peer was measured
_SLOWEST: Final = 1000.0
_LEAST_RATE: Final = 1e-6  # below it a rate counts as unknown: no device takes days for a microbatch


def expected_s(measured_s: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """Seconds that a piece of work is expected to take at each peer that has a rate and was not measured.

    `measured_s`: seconds that the same work took at others; `rates`: work per second by peer, in any unit, 0: unknown.
    Empty where nothing published can be compared with what was measured.
    """
    known = {name: rate for name, rate in rates.items() if rate >= _LEAST_RATE}
    strange = known.keys() - measured_s.keys()
    if not strange:
        return {}
    if not measured_s:
        usual = statistics.median_low(known.values())
        return {name: 1.0 / min(max(known[name], usual / _SLOWEST), _MOST * usual) for name in strange}
    work = [seconds * known[name] for name, seconds in measured_s.items() if name in known]
    if not work:
        return {}
    least_s, most_s = min(measured_s.values()), _SLOWEST * max(measured_s.values())
    return {name: min(max(least_s, statistics.median_low(work) / known[name]), most_s) for name in strange}


def usual_s(rates: Iterable[float]) -> float:
    """Seconds that a piece of work takes at a usual one of the peers with these rates; 0 where none is known."""
    known = [rate for rate in rates if rate >= _LEAST_RATE]
    return 1.0 / statistics.median_low(known) if known else 0.0
