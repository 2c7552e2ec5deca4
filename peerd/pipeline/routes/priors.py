"""Expected speeds of peers that were never measured, from the rates that the run's conductor publishes.

Published rates show how peers compare, not how much of each one trainer gets, because others use them as well. So
expectations are scaled by the measurements of other peers. A claim is not evidence: no peer is expected to be faster
than the fastest measured one (or than twice the usual rate if none was measured), nor more than a thousand times as
slow as the slowest. As soon as a peer is measured, its measurement counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Final

_MOST: Final = 2.0  # greatest expected rate as a multiple of the usual one, if no peer was measured
_SLOWEST: Final = 1000.0  # greatest expected time as a multiple of the longest measured one
_LEAST_RATE: Final = 1e-6  # lower rates count as unknown: no device takes days for a microbatch


def expected_s(measured_s: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """Seconds that a piece of work is expected to take, for each peer that has a rate and was not measured.

    `measured_s`: seconds that the same work took at other peers; `rates`: work per second by peer, in any unit, 0 if
    unknown. Empty if no published rate can be compared with a measurement.
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
    """Seconds that a piece of work takes at the median of these rates, or 0 if none is known."""
    known = [rate for rate in rates if rate >= _LEAST_RATE]
    return 1.0 / statistics.median_low(known) if known else 0.0
