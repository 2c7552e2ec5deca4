"""Order of the tests of one run, which tests share a process, and which have the machine for themselves.

The longest come first, so that no process is left with a long test at the end; what measures time or rates comes last,
and runs while nothing else does. Quick tests of a file stay together, and so do tests that share a scene of their file.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final

import pytest

from tests.choice.durations import Durations

if os.name == "posix":
    import fcntl

ALONE: Final = "alone"
LAB: Final = {"lab", "interop"}
WORKERS_MOST: Final = 8


def group_of(item: pytest.Item) -> str:
    """Tests of one group run one after the other, in one process."""
    if item.get_closest_marker(ALONE):
        return ALONE
    marks = marks_of(item)
    file = item.nodeid.partition("::")[0]
    return file if "slow" not in marks or marks & LAB or shares_a_scene(item) else ""


def marks_of(item: pytest.Item) -> set[str]:
    """Names of a test's marks, those of its module included."""
    return {mark.name for mark in item.iter_markers()}


def shares_a_scene(item: pytest.Item) -> bool:
    """True when a test uses a fixture of its module's own scope."""
    info = getattr(item, "_fixtureinfo", None)
    fixtures = info.name2fixturedefs.values() if info is not None else ()
    return any(found[-1].scope in ("module", "package") for found in fixtures)


def arrange(items: list[pytest.Item], durations: Durations, ranked: bool = False) -> None:
    """Put each test into its group, and the groups in order: the same one in whatever order files were collected.

    `ranked`: the tests have an order already, which the groups keep.
    """
    if not ranked:
        items.sort(key=lambda item: item.nodeid.partition("::")[0])
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if name := group_of(item):
            item.add_marker(pytest.mark.xdist_group(name))
        groups[name or item.nodeid].append(item)
    seconds = {name: sum(durations[item.nodeid] for item in group) for name, group in groups.items()}
    order = sorted(groups, key=lambda name: (name == ALONE, 0 if ranked else -seconds[name], "" if ranked else name))
    items[:] = [item for name in order for item in groups[name]]


def collection_order(folder: Path, number: int, count: int) -> list[Path]:
    """Order in which process `number` of `count` collects a folder of tests: each begins at another place.

    pytest compiles each file that it collects, and keeps the result on disk: processes in step would all compile all.
    """
    entries = sorted(path for path in folder.iterdir() if path.is_dir() or path.match("test_*.py"))
    files = [list(entry.rglob("*.py")) if entry.is_dir() else [entry] for entry in entries]
    sizes = [sum(file.stat().st_size for file in each) for each in files]
    before = list(accumulate(sizes, initial=0))
    first = next((at for at, size in enumerate(before) if size * count >= sum(sizes) * number), 0)
    return entries[first:] + entries[:first]


def plain_id(test: str) -> str:
    """A test's id without the group that the scheduler appends to it."""
    head, mark, group = test.rpartition("@")
    return head if mark and "]" not in group else test


def workers() -> int:
    """Processes that run tests: one more than there are processors, since some tests wait for others' processes."""
    return min(WORKERS_MOST, (os.cpu_count() or 1) + 1)


@contextlib.contextmanager
def place(item: pytest.Item) -> Iterator[None]:
    """Wait until the test may run: alone, or beside others that need not be alone."""
    folder = item.config.getoption("basetemp")  # of this process; the folder above it is all processes'
    if os.name != "posix" or not folder or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with (Path(folder).parent / "alone.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker(ALONE) else fcntl.LOCK_SH)
        yield
