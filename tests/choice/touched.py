"""Tests that a change touches: those in its room, and those that import what changed, the nearest first.

Changed files are those of the commits of the last hours before the newest one, and of the working tree.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.choice.imports import ROOT, distances

HOURS: Final = 12
BUDGET_S: Final = float(os.environ.get("PEERD_TEST_TOUCHED", "0"))  # seconds for tests of what changed; 0: no such run
COMPILED: Final = {".c", ".cpp", ".cu", ".h"}  # built and loaded by the Python files beside or above them
SAME_ROOM: Final = 1  # as near as a direct import


class Deadline:
    """End of a run that has a bound in time: durations are measured on another machine, and may be wrong."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._end_s = math.inf

    def is_over(self, now_s: float) -> bool:
        """True when the time of this run is used up; it begins with the first question."""
        if self._budget_s and self._end_s == math.inf:
            self._end_s = now_s + self._budget_s
        return now_s > self._end_s


class Candidate(NamedTuple):
    """A test that meets a changed file."""

    distance: int  # 0: changed itself; 1: same room, or imports what changed; 2: imports such a file; and so on
    seconds: float  # of the whole run
    test: str


class Choice(NamedTuple):
    """Tests for a change, in the order in which they were chosen, and those for which there was no time."""

    taken: list[Candidate]
    left: list[Candidate]


def changed_files(hours: float = HOURS) -> set[Path]:
    """Files of the repository that changed lately and still exist."""
    newest = int(_git("log", "-1", "--format=%ct") or "0")
    names = _git("log", f"--since={newest - int(hours * 3600)}", "--format=", "--name-only")
    names += _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names.split("\n") if name and (ROOT / name).is_file()}


def _git(*arguments: str) -> str:
    """Return the output of git, or "" outside a repository."""
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout if ended.returncode == 0 else ""


def nearness(tests: Iterable[Path], changed: set[Path]) -> dict[Path, int]:
    """Distance of each test file to the nearest changed one; files that meet none are left out."""
    python = {file for file in changed if file.suffix == ".py"} | _beside_compiled(changed)
    others = {file.name for file in changed if file.suffix not in {".py", *COMPILED}}
    rooms = {mirror(file) for file in python}
    found = {}
    for test in tests:
        near = [steps for file, steps in distances(test).items() if file in python]
        if test.parent in rooms or any(name in test.read_text("utf-8") for name in others):
            near.append(SAME_ROOM)
        if near:
            found[test] = min(near)
    return found


def mirror(file: Path) -> Path | None:
    """Folder of the tests of a file of peerd or roles; None for other files."""
    top, *parts = file.relative_to(ROOT).parent.parts or ("",)
    if top == "peerd" and parts:
        return ROOT.joinpath("tests", *parts)
    return ROOT / "tests" / "roles" if top == "roles" else None


def _beside_compiled(changed: set[Path]) -> set[Path]:
    """Python files in the folder of a changed compiled source, or in the folder above it."""
    folders = {folder for file in changed if file.suffix in COMPILED for folder in (file.parent, file.parent.parent)}
    return {file for folder in folders if folder != ROOT for file in folder.glob("*.py")}


def choose(candidates: Sequence[Candidate], budget_s: float) -> Choice:
    """As many tests as fit the budget: the nearest first, of equally near ones the shortest first."""
    taken, left, spent_s = [], [], 0.0
    for each in sorted(candidates):
        if spent_s + each.seconds <= budget_s:
            spent_s += each.seconds
            taken.append(each)
        else:
            left.append(each)
    return Choice(taken, left)
