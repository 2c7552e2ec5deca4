"""The Clock contract: every reading of time and every draw of randomness goes through it.

`now` never jumps; `wall` is Unix time corrected by the offset that peers agree on. Named random streams are
derived from (seed, purpose), so a run with the same seed makes the same choices. Key and nonce bytes come from
`secure_bytes`, which the simulator replaces. What peers tell each other is `uncorrected` time.
"""

from __future__ import annotations

import random
from typing import Protocol, runtime_checkable


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; equals trio.current_time() inside a trio run."""
        ...

    def wall(self) -> float:
        """Corrected Unix seconds: for expiry of records only."""
        ...

    def secure_bytes(self, count: int) -> bytes:
        """Unpredictable bytes for keys and nonces."""
        ...

    def rng(self, purpose: str) -> random.Random:
        """A fresh random stream for this purpose; the same purpose gives the same stream."""
        ...


@runtime_checkable
class AdjustableClock(Protocol):
    """A clock whose wall time can be corrected, as `net.clock.RealClock`."""

    offset_s: float


def uncorrected(clock: Clock) -> float:
    """Unix seconds as this machine's own clock shows them, without the correction by peers."""
    return clock.wall() - (clock.offset_s if isinstance(clock, AdjustableClock) else 0.0)
