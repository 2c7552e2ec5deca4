"""Tests that have passed: a run of everything need not repeat what a shorter run before it has shown.

With PEERD_TEST_PASSED=FILE, `make test` writes the names of the tests that passed there, and `make test-all` leaves
those out that would do the same again. What does more in a run of everything (more examples, more mutations) is run.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.kit.amount import ALL

FILE: Final = os.environ.get("PEERD_TEST_PASSED", "")


def note(report: pytest.TestReport) -> None:
    """Write down a test that passed in a run that is not of everything."""
    in_worker = "PYTEST_XDIST_WORKER" in os.environ  # whose reports come to the process that started it
    if FILE and not ALL and report.when == "call" and report.passed and not in_worker:
        with Path(FILE).open("a") as file:
            file.write(f"{report.nodeid}\n")


def before(item: pytest.Item) -> bool:
    """True when a test passed before, and does no more in a run of everything."""
    return item.nodeid in _noted() and not grows(item)


@cache
def _noted() -> frozenset[str]:
    return frozenset(Path(FILE).read_text().splitlines() if FILE and Path(FILE).exists() else ())


def grows(item: pytest.Item) -> bool:
    """True when a run of everything tries more in this test."""
    function = getattr(item, "obj", None)
    module = getattr(item, "module", None)
    return getattr(function, "is_hypothesis_test", False) or any(hasattr(module, name) for name in ("ALL", "mutations"))
