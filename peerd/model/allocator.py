"""Configures the C library's allocator to return freed memory to the system.

GNU's allocator serves blocks of up to 32 MiB from heaps that shrink only at their end, with separate heaps for several
threads. Gradients and activations are allocated and freed in such blocks by several threads, so by default a peer's
heaps grow to several times the memory in use. With fixed thresholds, blocks of 4 MiB and more are mapped separately
(`return_large_blocks`), and free memory inside the heaps is returned twice a step (`give_back`). Allocating memory
again costs the time in which the system clears its pages: up to a few percent of a backward for the large blocks. Other
C libraries are left unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Final

_BIG_BYTES: Final = 4 << 20
_KEPT_AT_END_BYTES: Final = 16 << 20  # free memory that a heap keeps at its end
_ARENAS: Final = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MOST = -1, -3, -8  # options of glibc's mallopt


def return_large_blocks(large_bytes: int = _BIG_BYTES, kept_bytes: int = _KEPT_AT_END_BYTES) -> None:
    """Make freed large blocks return to the system, in all threads, from now on.

    `large_bytes`: the smallest of them. `kept_bytes`: free memory that a heap keeps at its end.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, large_bytes)
        libc.mallopt(_TRIM_THRESHOLD, kept_bytes)
        libc.mallopt(_ARENA_MOST, _ARENAS)


def give_back() -> None:
    """Return free heap memory to the system. Takes milliseconds."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
