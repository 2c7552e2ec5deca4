"""Waits for other processes by polling, since nothing wakes a caller when they change. The only place that polls.

Do not use it to wait for this process, which has events, nor in a trio event loop, which it would block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
LOOK_S: Final = 0.1  # between two calls of `look`


def eventually(look: Callable[[], T], most_s: float) -> T:
    """Call `look` until its result is true or `most_s` seconds have passed. Returns the last result."""
    deadline = time.monotonic() + most_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return found
