"""Sightings of owners, sans-IO: when each was seen first. An owner that one look misses keeps its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peerd.machine.owners.owner_tree import ExpertReign

_FORGOTTEN_PERIODS: Final = 1.1  # without a sighting; as long as a claim lives that its host does not renew
_MOST: Final = 64  # owners that are remembered


class Sightings:
    """Owners of one expert that were seen lately; if there are many, those that came first."""

    def __init__(self) -> None:
        self._seen: dict[ExpertReign, tuple[float, float]] = {}  # first, and last

    def note(self, now: float, period_s: float, reigns: Iterable[ExpertReign]) -> None:
        """Note the owners that one look shows. `period_s`: announcement period."""
        lately = now - _FORGOTTEN_PERIODS * period_s
        self._seen = {reign: times for reign, times in self._seen.items() if times[1] >= lately}
        for reign in reigns:
            if reign in self._seen or len(self._seen) < _MOST:
                self._seen[reign] = self._seen.get(reign, (now, now))[0], now

    def first(self, reign: ExpertReign) -> float:
        """Returns when an owner was seen first; infinity if it was not seen lately."""
        return self._seen[reign][0] if reign in self._seen else float("inf")
