"""Unreachable peers, sans-IO: each is excluded from the choice until a probe in the background reaches it.

An unreachable peer costs one call; after that, probes find out when it is back, so that no microbatch has to. Each peer
is probed again after a pause that doubles, a few peers at once. A call that began before a peer was found again used a
path that has ended since, so its failure is ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from peerd.messages.swarm import MAX_MEMBERS
from peerd.wire.rate.suspicion import Suspicion

_FIRST_PAUSE_S: Final = 0.5  # before the first probe, and before the second
_LONGEST_PAUSE_S: Final = 8.0
_AT_ONCE: Final = 8  # concurrent probes


class CutOff:
    """The unreachable peers, given by peer id as text."""

    def __init__(self) -> None:
        self._lost = Suspicion[str](_FIRST_PAUSE_S, _LONGEST_PAUSE_S, MAX_MEMBERS)
        self._back_at: dict[str, float] = {}  # when a peer was last found to be back

    def __contains__(self, name: object) -> bool:
        """True while the peer is unreachable."""
        return name in self._lost

    def is_stale(self, name: str, started: float) -> bool:
        """Return True if a failed call, `started` then, must be ignored because the peer was found again since."""
        return started < self._back_at.get(name, float("-inf"))

    def lost(self, name: str, now: float) -> bool:
        """Record that a call did not reach `name`; returns True if the peer was reachable before."""
        if name in self._lost:
            return False
        self._lost.failed(now, name)
        return True

    def due(self, now: float) -> list[str]:
        """Peers to probe now; report the end of each probe to `ended`."""
        return self._lost.due(now, _AT_ONCE)

    def ended(self, name: str, reached: bool, now: float) -> bool:
        """Record the end of a probe; returns True if the peer is back."""
        if name not in self._lost:
            return False
        if reached:
            self._lost.forgive(name)
            self._back_at[name] = now
        else:
            self._lost.failed(now, name)
        return reached

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all peers not in `names`, because they no longer serve the stage."""
        self._lost.keep_only(names)
        self._back_at = {name: at for name, at in self._back_at.items() if name in names}

    def wakes_at(self) -> float:
        """Time of the next probe, or infinity if there is none."""
        return self._lost.wakes_at()
