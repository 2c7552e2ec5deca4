"""Exponential backoff: the pause after several failures in a row, which doubles with each up to a limit.

A pure function; the caller counts the failures and resets the count after a success. Any count is allowed: a relay that
refuses for weeks causes no overflow.
"""

from __future__ import annotations

from typing import Final

_DOUBLINGS: Final = 64  # more than any pause needs; bounded so that the float cannot overflow


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after `failures` (at least 1) in a row: `first_s`, doubled each time, at most `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, _DOUBLINGS), longest_s)
