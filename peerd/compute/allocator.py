"""The C library's allocator, told to give large blocks back to the system as soon as they are free.

GNU's serves blocks of up to 32 MiB from heaps that only shrink at their end, and one heap for each of several threads.
Gradients and activations come and go in such blocks, in several threads: by default a peer's heaps grow to several
times what is in use. With fixed thresholds blocks of 4 MiB and more are mapped by themselves. Getting them takes the
time in which the system clears their pages, a few percent of computing at most; smaller ones are served as before.
Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_BIG_BYTES: Final = 4 << 20
_KEPT_AT_END_BYTES: Final = 16 << 20  # of a heap, for blocks to come
_ARENAS: Final = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MOST = -1, -3, -8  # options of glibc's mallopt


def return_large_blocks() -> None:
    """Have large blocks go back to the system when they are freed, in all threads from now on."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):  # not GNU's
        return
    libc.mallopt(_MMAP_THRESHOLD, _BIG_BYTES)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_AT_END_BYTES)
    libc.mallopt(_ARENA_MOST, _ARENAS)
