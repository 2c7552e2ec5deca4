"""Selects the tests of a run: the quick ones, everything, one slice of it, or those that a change touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pytest

from tests.choice import passed
from tests.choice.durations import Durations
from tests.choice.imports import ROOT
from tests.choice.properties import shown_in_quick_runs
from tests.choice.schedule import ALONE, marks_of, plain_id, workers
from tests.choice.slices import Slice, Weighed, parse_slice, slice_numbers
from tests.choice.touched import BUDGET_S, HOURS, Candidate, changed_files, choose, nearness
from tests.kit.amount import ALL

LONG: Final = {"thorough", "lab", "interop"}
NAMED_MOST: Final = 5  # tests that a message names


class Selection(NamedTuple):
    """Tests to run, and sentences that say what was chosen and what was left out."""

    run: list[pytest.Item]
    said: list[str]


def select(items: Sequence[pytest.Item], durations: Durations, whole: bool) -> Selection:
    """The tests of this run, by the environment (see `tests/README.md`).

    `whole`: no files are named. Named files run with their slow tests; long ones run only if nothing else is named.
    """
    if not ALL:
        quick = [item for item in items if (is_quick(item) if whole else not marks_of(item) & LONG)]
        return Selection(quick or list(items), [] if quick else ["only long tests are named: all run"])
    fresh = [item for item in items if not passed.before(item)]
    said = [f"passed before: {len(items) - len(fresh)} tests"] if len(fresh) < len(items) else []
    if BUDGET_S:
        found = _touched(fresh, durations)
    elif chosen := parse_slice():
        found = _slice(items, fresh, chosen, durations)
    else:
        found = Selection(fresh, [])
    return Selection(found.run, said + found.said)


def is_quick(item: pytest.Item) -> bool:
    """True for a test of `make test`: one that takes no time, or shows a property of the table in `tests/README.md`."""
    marks = marks_of(item)
    return not marks & LONG and ("slow" not in marks or item.nodeid.partition("[")[0] in shown_in_quick_runs())


def weigh(item: pytest.Item, durations: Durations) -> Weighed:
    """A test as slices weigh it."""
    repeated = is_quick(item) and not passed.grows(item)
    return Weighed(plain_id(item.nodeid), wall_s(item, durations), repeated)


def wall_s(item: pytest.Item, durations: Durations) -> float:
    """Seconds by which a test prolongs the whole run."""
    return durations[plain_id(item.nodeid)] / (1 if item.get_closest_marker(ALONE) else workers())


def _slice(items: Sequence[pytest.Item], fresh: list[pytest.Item], chosen: Slice, durations: Durations) -> Selection:
    numbers = slice_numbers([weigh(item, durations) for item in items], chosen.count)
    run = [item for item in fresh if numbers[plain_id(item.nodeid)] == chosen.number]
    minutes = sum(wall_s(item, durations) for item in run) / 60
    others = len(fresh) - len(run)
    return Selection(run, [f"{chosen}: {len(run)} tests, about {minutes:.1f} min; for others: {others} tests"])


def _touched(fresh: list[pytest.Item], durations: Durations) -> Selection:
    changed = changed_files()
    near = nearness({ROOT / item.nodeid.partition("::")[0] for item in fresh}, changed)
    by_id = {plain_id(item.nodeid): item for item in fresh}
    candidates = [
        Candidate(near[file], wall_s(item, durations), test)
        for test, item in by_id.items()
        if (file := ROOT / test.partition("::")[0]) in near
    ]
    choice = choose(candidates, BUDGET_S)
    minutes = sum(each.seconds for each in choice.taken) / 60
    said = [
        f"{len(changed)} files changed in the last {HOURS} hours of commits: {len(choice.taken)} of {len(candidates)} "
        f"tests that use them chosen, about {minutes:.1f} min"
    ]
    if choice.left:
        files = list(dict.fromkeys(each.test.partition("::")[0] for each in choice.left))
        more = f" and {len(files) - NAMED_MOST} more files" if len(files) > NAMED_MOST else ""
        said.append(f"left out for want of time: {len(choice.left)} tests of {', '.join(files[:NAMED_MOST])}{more}")
    return Selection([by_id[each.test] for each in choice.taken], said)
