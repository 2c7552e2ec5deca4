"""The limit of a guest's memory, kept: near it, what is freed goes back at once; a process that stays above it ends.

Before a stage is built, `compute/model/footprint` refuses what surely does not fit. Activations, and what libraries
take, are known only when they come: `keep` looks again and again at what the system says that the process holds. Near
the limit freed memory goes back to the system at once, which takes time and so is not done before; a process that stays
more than 5 % above it is told to end, in one sentence. Where the system does not say what a process holds, only the
look at the stage is taken.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, Final

import trio

from peerd.control.guest import GB, resident_bytes

_LOOK_S: Final = 0.25
_NEAR: Final = 0.5
_TOLERATED: Final = 1.05
_LOOKS: Final = 12  # in a row: a peak that passes is no reason to go
_BIG_BYTES: Final = 1 << 20  # what is bigger is given back as soon as it is free
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MOST = -1, -3, -8  # options of glibc's mallopt
_ARENAS: Final = 2


async def keep(memory_gb: float, over: Callable[[str], None], held: Callable[[], int | None] = resident_bytes) -> None:
    """Watch until the process is over its limit for good: `over` is told why it has to end. Returns then, or at once
    where the system does not say what it holds.
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
                f"{memory_gb:g}; allow more, or give it less to do: a smaller stage (limits.stage), fewer threads or "
                "roles, limits.keep_totals: 0"
            )
            return
        await trio.sleep(_LOOK_S)


def _return_freed() -> None:
    """Have the C library return freed memory at once, where it can: else it keeps much of it for later."""
    if (libc := _glibc()) is not None:
        for option, value in ((_MMAP_THRESHOLD, _BIG_BYTES), (_TRIM_THRESHOLD, _BIG_BYTES), (_ARENA_MOST, _ARENAS)):
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def _give_back() -> None:
    gc.collect()
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> Any:
    """The C library, if it is GNU's; None: another one."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
