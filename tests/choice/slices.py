"""Slices of a run of everything: several runs, one slice each, test what one run of everything would.

Long tests are dealt out by their measured duration, so that slices take equally long; all others go by a hash of their
id. The same tests and the same table of durations give the same slices.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection
from typing import Final, NamedTuple

import pytest

from tests.choice.durations import LISTED_S

ASKED: Final = os.environ.get("PEERD_TEST_SLICE", "")
MOST: Final = 6


class Slice(NamedTuple):
    """One of `count` slices, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"slice {self.number} of {self.count}"


class Weighed(NamedTuple):
    """A test as slices weigh it."""

    test: str
    seconds: float  # of the whole run: less than its own where others run beside it
    repeated: bool  # `make test` does the same, so that a run after it leaves the test out


def parse_slice(text: str = ASKED) -> Slice | None:
    """Parse a slice such as 2/6. Returns None, which means everything, for an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", text)
    if found is None or not int(found[1]) <= int(found[2]) <= MOST:
        raise pytest.UsageError(f"SLICE is {text!r}; it has to be such as 2/6: one of {MOST} slices at the most")
    return Slice(int(found[1]), int(found[2]))


def slice_numbers(tests: Collection[Weighed], count: int) -> dict[str, int]:
    """The slice of each test, from 1 to `count`."""
    loads = {repeated: dict.fromkeys(range(1, count + 1), 0.0) for repeated in (False, True)}
    numbers = {}
    for each in tests:
        if each.seconds < LISTED_S:
            numbers[each.test] = 1 + int.from_bytes(hashlib.sha256(each.test.encode()).digest()[:8], "big") % count
    for each in sorted(tests, key=lambda each: (-each.seconds, each.test)):
        if each.test not in numbers:
            load = loads[each.repeated]
            numbers[each.test] = min(load, key=lambda number: (load[number], number))
            load[numbers[each.test]] += each.seconds
    return numbers
