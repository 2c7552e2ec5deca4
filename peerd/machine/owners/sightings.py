"""Sightings of owners, sans-IO: when each was seen first. An owner that one look-up misses keeps its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peerd.machine.owners.owner_tree import ExpertReign

_FORGOTTEN_PERIODS: Final = 1.1  # without a sighting; as long as a claim lives without renewal
_MOST: Final = 64  # owners that are remembered


class Sightings:
    """Owners of one expert that were seen recently; if there are many, those that were seen first."""

    def __init__(self) -> None:
        self._seen: dict[ExpertReign, tuple[float, float]] = {}  # first, and last

    def note(self, now: float, period_s: float, reigns: Iterable[ExpertReign]) -> None:
        """Record the owners that one look-up shows. `period_s`: announcement period."""
        lately = now - _FORGOTTEN_PERIODS * period_s
        self._seen = {reign: times for reign, times in self._seen.items() if times[1] >= lately}
        for reign in reigns:
            if reign in self._seen or len(self._seen) < _MOST:
                self._seen[reign] = self._seen.get(reign, (now, now))[0], now

    def first(self, reign: ExpertReign) -> float:
        """Time at which an owner was first seen, or infinity if it was not seen recently."""
        return self._seen[reign][0] if reign in self._seen else float("inf")
