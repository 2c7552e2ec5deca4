"""Forecast of a step, shared by all peers that ask: when the batch is complete, and when the step is made.

The time between the two, for averaging and stepping, is estimated from the last steps. A forecast scans the whole
batch, so it is cached for a moment and counted down. Reads the conductor's views; changes nothing.
"""

from __future__ import annotations

import math

from peerd.core.limits import FORESEEABLE_S
from peerd.core.messages.swarm import Forecast
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.positions.phases import Phase

_KEPT_S = 0.2
_SMOOTHING = 0.3


class StepEta:
    """Step forecast for one conductor's term."""

    def __init__(self) -> None:
        self._made, self._view = -math.inf, (-1, Phase.GATHERING)
        self._whole_in_s: float | None = None
        self._closing_since: float | None = None
        self._closing_step = 0
        self._closing_s: float | None = None  # smoothed seconds from the complete batch to the next step, or None

    def look(self, now: float, conductor: Conductor) -> Forecast | None:
        """Forecast as of `now`, or None if it is unknown."""
        view = conductor.members_version, conductor.phase
        if view != self._view or now - self._made >= _KEPT_S:
            self._watch_closing(now, conductor)
            self._made, self._view, self._whole_in_s = now, view, conductor.whole_in_s(now)
        if self._whole_in_s is None:
            return None
        whole_in_s = max(0.0, self._whole_in_s - (now - self._made))
        closing_s = self._closing_s or 0.0
        if self._closing_since is not None:
            closing_s = max(0.0, closing_s - (now - self._closing_since))
        return Forecast(whole_in_s, min(whole_in_s + closing_s, FORESEEABLE_S))

    def _watch_closing(self, now: float, conductor: Conductor) -> None:
        """Measure the smoothed time from the complete batch to the step. Callers ask at every change of phase."""
        step = conductor.current.step if conductor.current is not None else 0
        match conductor.phase:
            case Phase.CLOSING:
                if self._closing_since is None:
                    self._closing_since, self._closing_step = now, step
            case Phase.MOVING:
                pass
            case _:
                if self._closing_since is not None and step == self._closing_step + 1:
                    took = now - self._closing_since
                    known = took if self._closing_s is None else self._closing_s
                    self._closing_s = known + (took - known) * _SMOOTHING
                self._closing_since = None
