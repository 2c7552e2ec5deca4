"""Amount of testing: little in `make test`, all of it in `make test-all` (PEERD_TEST_ALL=1).

What takes long and is proven by a quicker test as well is marked `thorough`, and left to `make test-all`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pytest

ALL: Final = os.environ.get("PEERD_TEST_ALL", "") not in ("", "0")


def thorough(*values: Any, id: str | None = None) -> Any:
    """A case for `parametrize` that is left to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)


def examples(most: int) -> int:
    """Number of examples that hypothesis draws, of so many at most."""
    return most if ALL else max(5, most // 5)


def mutations(most: int) -> int:
    """Number of mutated inputs that a decoder gets, of so many at most."""
    return most if ALL else max(50, most // 20)


def few(cases: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """Cases for `parametrize` of which all but those `kept` are left to `make test-all`."""
    every = list(cases)
    assert set(kept) <= set(every), "a case is kept that there is none of"
    return [case if case in kept else thorough(*case) for case in every]


def some(values: Sequence[Any], count: int) -> list[Any]:
    """Values for `parametrize` of which all but the first `count` are left to `make test-all`."""
    return [*values[:count], *(thorough(value) for value in values[count:])]
