"""The C library's allocator, told to give freed memory back to the system.

GNU's serves blocks of up to 32 MiB from heaps that only shrink at their end, and one heap for each of several threads.
Gradients and activations come and go in such blocks, in several threads: by default a peer's heaps grow to several
times what is in use. With fixed thresholds blocks of 4 MiB and more are mapped by themselves (`return_large_blocks`),
and what is free inside the heaps goes back twice a step (`give_back`). Getting memory again takes the time in which
the system clears its pages: up to some percent of a backward for the large blocks. Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Final

_BIG_BYTES: Final = 4 << 20
_KEPT_AT_END_BYTES: Final = 16 << 20  # of a heap, for blocks to come
_ARENAS: Final = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MOST = -1, -3, -8  # options of glibc's mallopt


def return_large_blocks() -> None:
    """Have large blocks go back to the system when they are freed, in all threads from now on."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, _BIG_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_AT_END_BYTES)
        libc.mallopt(_ARENA_MOST, _ARENAS)


def give_back() -> None:
    """Give back what is free in the heaps. Takes milliseconds."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    """Returns the C library if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
