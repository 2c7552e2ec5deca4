"""Choice of the figures for a report: those that changed by a fifth, then those not reported for minutes.

A report is bounded; figures that do not fit are sent with the next one. Figures count as reported once the conductor
received them (`told`); a new conductor knows nothing (`forget`). Sans-IO; bounded by the number of peers in its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from peerd.core.limits import NETWORK_REPORT_PAIRS
from peerd.core.messages.network import PairFigures

CHANGED: Final = 1.2  # ratio of change at which a figure is reported again
REFRESH_S: Final = 300.0  # interval at which it is reported in any case, because it fades at the conductor


class ReportChanges:
    """The figures last reported to the conductor, with their times; finds those to report again."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, PairFigures]] = {}

    def due(self, now: float, figures: Sequence[PairFigures]) -> list[PairFigures]:
        """The figures to report now, the most changed first."""
        known = {one.peer for one in figures}
        self._told = {peer: told for peer, told in self._told.items() if peer in known}
        ranked = []
        for place, one in enumerate(figures):
            at, before = self._told.get(one.peer, (-math.inf, None))
            change = _change(before, one)
            if change >= CHANGED or now - at >= REFRESH_S:
                ranked.append((-change if change >= CHANGED else 0.0, at, place))
        return [figures[place] for *_, place in sorted(ranked)[:NETWORK_REPORT_PAIRS]]

    def told(self, now: float, reported: Iterable[PairFigures]) -> None:
        """Record that the conductor has received these figures."""
        self._told |= {one.peer: (now, one) for one in reported}

    def forget(self) -> None:
        """Forget all reports, because there is a new conductor."""
        self._told.clear()


def _change(before: PairFigures | None, now: PairFigures) -> float:
    """The largest ratio between a figure and its last reported value; infinite if one of the two is unknown."""
    if before is None or (before.up_limited, before.down_limited) != (now.up_limited, now.down_limited):
        return math.inf
    pairs = (
        (before.rtt_s, now.rtt_s),
        (before.up_bytes_per_s, now.up_bytes_per_s),
        (before.down_bytes_per_s, now.down_bytes_per_s),
    )
    return max(_ratio(*pair) for pair in pairs)


def _ratio(one: float, other: float) -> float:
    if one == other:
        return 1.0
    return max(one, other) / min(one, other) if min(one, other) > 0 else math.inf
