"""What is free inside the heaps goes back to the system when it is told to."""

from __future__ import annotations

import ctypes

import psutil
import pytest

from peerd.model import allocator

BLOCKS, BLOCK_BYTES = 1500, 100_000  # too small to be mapped by themselves


@pytest.mark.skipif(allocator._glibc() is None, reason="another C library than GNU's")
def test_free_blocks_in_the_middle_of_a_heap_go_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    full = psutil.Process().memory_info().rss
    for index, block in enumerate(blocks):
        if index % 10 and index < BLOCKS - 1:  # what stays keeps the heap from shrinking at its end
            libc.free(block)
    allocator.give_back()
    assert full - psutil.Process().memory_info().rss > BLOCKS * BLOCK_BYTES / 2
    for block in blocks[::10]:
        libc.free(block)
