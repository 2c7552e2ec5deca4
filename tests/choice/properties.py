"""Properties that peerd promises, each with the test that shows it: the tables of `tests/README.md`.

A test of the first table runs in `make test` even if it is slow; other slow tests are left to a run of everything.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from tests.choice.imports import ROOT

PAGE: Final = ROOT / "tests/README.md"
QUICK: Final = "| property | test |\n|---|---|\n"
EVERYTHING: Final = "| shown only in a run of everything | test |\n|---|---|\n"
ROW: Final = re.compile(r"\| (?:\*\*[^*]+\.\*\* )?(?P<property>[^|]+) \| `(?P<test>tests/[\w/]+\.py::test_\w+)` \|")


class Property(NamedTuple):
    """A property and the id of the test that shows it."""

    text: str
    test: str


class Table(NamedTuple):
    """Properties of one table, and its lines that are no rows."""

    rows: list[Property]
    faulty: list[str]


def read_table(head: str, page: str) -> Table:
    """The table that begins with `head`."""
    lines = page.partition(head)[2].partition("\n\n")[0].splitlines()
    found = [(line, ROW.fullmatch(line)) for line in lines]
    rows = [Property(match["property"], match["test"]) for _, match in found if match is not None]
    return Table(rows, [line for line, match in found if match is None])


@cache
def shown_in_quick_runs(page: Path = PAGE) -> frozenset[str]:
    """Ids of the tests, without parameters, of the first table."""
    return frozenset(row.test for row in read_table(QUICK, page.read_text("utf-8")).rows)
