"""Enforces a volunteer's memory limit: ends a process that stays above `limits.memory_gb`.

Before a stage is built, `model/stage/footprint` rejects what cannot fit. The memory of activations and libraries is
known only at run time, so `keep` polls the memory that the process holds. Near the limit, freed memory is returned to
the system at once; not earlier, because that costs time. A process that stays more than 5 % above the limit is ended
with an error message. On systems that do not report a process' memory, only the check before a stage is built applies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

import trio

from peerd.daemon.control.guest import GB, resident_bytes
from peerd.model import allocator

_LOOK_S: Final = 0.25
_NEAR: Final = 0.5
_TOLERATED: Final = 1.05
_LOOKS: Final = 12  # checks in a row above the limit; shorter peaks are tolerated
_BIG_BYTES: Final = 1 << 20  # larger blocks are returned as soon as they are freed


async def keep(memory_gb: float, over: Callable[[str], None], held: Callable[[], int | None] = resident_bytes) -> None:
    """Watch the memory until the process stays above its limit; then call `over` with an error message, and return.

    Returns at once if the system does not report the memory (`held` returns None).
    """
    limit, looks, near = memory_gb * GB, 0, False
    while (now := held()) is not None:
        if now > _NEAR * limit and not near:
            near = True
            await trio.to_thread.run_sync(_return_freed)
        if now > limit:
            await trio.to_thread.run_sync(_give_back)
            now = held() or 0
        looks = looks + 1 if now > _TOLERATED * limit else 0
        if looks == _LOOKS:
            over(
                f"this process holds {now / GB:.2f} GB of memory, and limits.memory_gb (--memory-gb) allows "
                f"{memory_gb:g}; allow more, or reduce its work: a smaller stage (limits.stage), fewer threads or "
                "roles, limits.keep_totals: 0"
            )
            return
        await trio.sleep(_LOOK_S)


def _return_freed() -> None:
    """Make the C library return freed memory at once, which otherwise keeps much of it for reuse."""
    allocator.return_large_blocks(_BIG_BYTES, _BIG_BYTES)
    allocator.give_back()


def _give_back() -> None:
    gc.collect()
    allocator.give_back()
