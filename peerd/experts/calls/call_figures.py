"""Counters of calls to experts at one caller: failures by reason, staleness of updates, lost updates."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import (
    Overloaded,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
    Unreachable,
    Untrusted,
)
from peerd.core.limits import EXPERTS_SEEN
from peerd.run.grid import Uid

log = logging.getLogger("peerd.experts.calls.call_figures")

_REASONS: Final[list[tuple[type[RemoteError], str]]] = [
    (Overloaded, "overloaded"),
    (TooSlow, "slow"),
    (Unreachable, "unreachable"),
    (Untrusted, "untrusted"),
    (Refused, "refused"),
    (ProtocolViolation, "invalid"),
]


def reason_of(error: RemoteError) -> str:
    """One word for the reason of a failed call."""
    return next((word for kind, word in _REASONS if isinstance(error, kind)), "failed")


@dataclass(slots=True)
class CallFigures:
    """Counters of one caller's calls to experts."""

    forwards: int = 0
    backwards: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    late: int = 0  # beyond the grace time or the deadline
    repeats: int = 0
    stale_sum: int = 0  # updates of others between a forward and its backward
    stale_most: int = 0
    lost_updates: int = 0  # of experts that were restored with an older state
    seconds: float = 0.0  # duration of answered calls
    short: int = 0  # forwards with a sample that got too few answers
    _seen: BoundedDict[Uid, tuple[int, int]] = field(default_factory=lambda: BoundedDict(EXPERTS_SEEN))

    def note_backward(self, stale: int) -> None:
        """Count an answered backward, with `stale` updates of other callers since its forward."""
        self.backwards += 1
        self.stale_sum += stale
        self.stale_most = max(self.stale_most, stale)

    def note_version(self, uid: Uid, generation: int, version: int) -> None:
        """Record which weights computed an answer. If a newer generation has fewer updates, some were lost."""
        before = self._seen.get(uid)
        if before is not None and generation > before[0] and version < before[1]:
            self.lost_updates += before[1] - version
            log.info("expert %s was restored with %d fewer updates", uid, before[1] - version)
        if before is None or (generation, version) > before:
            self._seen[uid] = generation, version

    def status(self) -> dict[str, Any]:
        """Plain data for `peerd status`."""
        answered = self.forwards + self.backwards
        return {
            "forwards": self.forwards,
            "backwards": self.backwards,
            "failed": dict(self.failed),
            "late": self.late,
            "repeats": self.repeats,
            "stale": self.stale_sum / self.backwards if self.backwards else None,
            "stale_most": self.stale_most,
            "lost_updates": self.lost_updates,
            "seconds": self.seconds / answered if answered else None,
            "short": self.short,
        }
