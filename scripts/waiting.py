"""Waiting for what other processes do. Nothing wakes a caller for that, so it looks again and again, here alone.

Not for what happens in this process: that has events. Not in a trio loop: this blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
LOOK_S: Final = 0.1  # between looks


def eventually(look: Callable[[], T], most_s: float) -> T:
    """The result of `look` as soon as it is true, or when `most_s` seconds have passed."""
    deadline = time.monotonic() + most_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return found
