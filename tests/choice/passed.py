"""Tests that have passed: a run need not repeat what a run before it has shown.

With PEERD_TEST_PASSED=FILE, each run writes the ids of the tests that passed there at its end, and a run of everything
leaves those out that would do the same again. A test that does more in a run of everything (more examples, more
mutations) is left out only after it has passed in such a run.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.choice.schedule import plain_id
from tests.kit.amount import ALL

FILE: Final = os.environ.get("PEERD_TEST_PASSED", "")
_passed: list[str] = []


def note(report: pytest.TestReport) -> None:
    """Remember a test that passed."""
    in_worker = "PYTEST_XDIST_WORKER" in os.environ  # its reports also reach the process that started it
    if FILE and report.when == "call" and report.passed and not in_worker:
        _passed.append(_line(report.nodeid, ALL))


def write() -> None:
    """Add what was remembered to the file, at the end of a run: processes that collect tests read it at the start."""
    if _passed:
        with Path(FILE).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in _passed)


def before(item: pytest.Item) -> bool:
    """True when a test passed before, and does no more in a run of everything."""
    test = plain_id(item.nodeid)
    return _line(test, True) in _noted() or (_line(test, False) in _noted() and not grows(item))


def _line(test: str, everything: bool) -> str:
    return f"{'everything' if everything else 'quick'}\t{test}"


@cache
def _noted() -> frozenset[str]:
    return frozenset(Path(FILE).read_text("utf-8").splitlines() if FILE and Path(FILE).exists() else ())


def grows(item: pytest.Item) -> bool:
    """True when a run of everything tries more in this test."""
    function = getattr(item, "obj", None)
    module = getattr(item, "module", None)
    return getattr(function, "is_hypothesis_test", False) or any(hasattr(module, name) for name in ("ALL", "mutations"))
