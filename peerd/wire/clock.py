"""The real Clock: trio's time, the machine's wall clock plus an offset, the system's randomness.

Nothing else in `wire`, `reach`, `rpc` and `dht` reads the wall clock or the system's secure random source. Without a
seed, the random streams differ between runs; with a seed they repeat.
"""

from __future__ import annotations

import os
import random
import time

import trio


class RealClock:
    """The `peerd.core.clock.Clock` of a real peer, for use inside a trio run."""

    def __init__(self, seed: int | None = None) -> None:
        self.offset_s = 0.0  # added to the machine's wall clock; agreed with peers
        self._seed = os.urandom(16).hex() if seed is None else str(seed)

    def now(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return time.time() + self.offset_s

    def secure_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}")
