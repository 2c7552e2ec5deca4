"""Measured duration of each test, from a committed table; `make durations` renews it.

The table holds what takes long in a run of everything, in seconds of one process; all other tests share one mean.
With PEERD_TEST_DURATIONS=FILE a run adds what it measures to that file, and writing the table merges such files.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

TABLE: Final = Path(__file__).resolve().parent / "durations.tsv"
MEASURED: Final = os.environ.get("PEERD_TEST_DURATIONS", "")
LISTED_S: Final = 0.3  # tests that take longer have a row of their own
OTHERS: Final = "others"
OTHERS_S: Final = 0.02  # while the table has no mean


class Durations:
    """Seconds that each test takes."""

    def __init__(self, rows: Mapping[str, float]) -> None:
        self._rows = rows
        self._others_s = rows.get(OTHERS, OTHERS_S)

    def __getitem__(self, test: str) -> float:
        """Seconds of a test, by its id."""
        return self._rows.get(test, self._others_s)


def read_table(file: Path = TABLE) -> Durations:
    """Read the committed table. Returns an empty one if there is no file."""
    if not file.exists():
        return Durations({})
    rows = (line.split("\t", 1) for line in file.read_text("utf-8").splitlines() if not line.startswith("#"))
    return Durations({test: float(seconds) for seconds, test in rows})


def note(report: pytest.TestReport) -> None:
    """Append the seconds of one phase of a test to the file of measurements."""
    if MEASURED and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(MEASURED).open("a", encoding="utf-8") as file:
            file.write(f"{report.duration:.4f}\t{report.nodeid}\n")


def table_of(lines: Iterable[str]) -> str:
    """The text of a table from lines of measurements; a test that was measured several times gets the longest."""
    phases: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        seconds, test = line.rstrip("\n").split("\t", 1)
        phases[test].append(float(seconds))
    whole = {test: _one_run(found) for test, found in phases.items()}
    short = [seconds for seconds in whole.values() if seconds < LISTED_S]
    rows = [f"{sum(short) / max(1, len(short)):.4f}\t{OTHERS}"]
    rows += [f"{seconds:.1f}\t{test}" for test, seconds in sorted(whole.items()) if seconds >= LISTED_S]
    head = f"# Seconds of each test of {LISTED_S} s or more in a run of everything on two cores: `make durations`\n"
    return head + "\n".join(rows) + "\n"


def _one_run(phases: list[float]) -> float:
    """Seconds of the longest run of a test, of which each has three phases (a skipped one two)."""
    return max(sum(phases[at : at + 3]) for at in range(0, len(phases), 3))


if __name__ == "__main__":  # python -m tests.choice.durations FILE ...
    measured = [line for name in sys.argv[1:] for line in Path(name).read_text("utf-8").splitlines()]
    TABLE.write_text(table_of(measured), "utf-8")
