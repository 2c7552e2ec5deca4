"""Exponential backoff: the pause after several failures in a row, which grows with each of them up to a longest one.

A pure figure; who counts the failures, and forgets them after a success, is the caller. Any count is allowed: a relay
that refuses for weeks is no overflow.
"""

from __future__ import annotations

from typing import Final

_DOUBLINGS: Final = 64  # more than any pause needs; beyond them a float would overflow in the end


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after so many failures in a row, at least one: `first_s`, then twice as long each time."""
    return min(first_s * 2.0 ** min(failures - 1, _DOUBLINGS), longest_s)
