"""What a run takes of all tests: the quick ones, everything, one slice of it, or what a change touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pytest

from tests.choice import passed
from tests.choice.durations import Durations
from tests.choice.imports import ROOT
from tests.choice.schedule import ALONE, plain_id, workers
from tests.choice.slices import Slice, Weighed, parse_slice, slice_numbers
from tests.choice.touched import BUDGET_S, HOURS, Candidate, changed_files, choose, nearness
from tests.kit.amount import ALL

NAMED_MOST: Final = 5  # tests that a message names


class Selection(NamedTuple):
    """Tests to run, and sentences that say what was chosen and what was left out."""

    run: list[pytest.Item]
    said: list[str]


def select(items: Sequence[pytest.Item], durations: Durations) -> Selection:
    """The tests of this run, by the environment (see `tests/README.md`)."""
    if not ALL:
        quick = [item for item in items if item.get_closest_marker("thorough") is None]
        return Selection(quick or list(items), [] if quick else ["only thorough tests were named: they run"])
    fresh = [item for item in items if not passed.before(item)]
    said = [f"passed before: {len(items) - len(fresh)} tests"] if len(fresh) < len(items) else []
    if BUDGET_S:
        found = _touched(fresh, durations)
    elif chosen := parse_slice():
        found = _slice(items, fresh, chosen, durations)
    else:
        found = Selection(fresh, [])
    return Selection(found.run, said + found.said)


def weigh(item: pytest.Item, durations: Durations) -> Weighed:
    """A test as slices weigh it."""
    repeated = item.get_closest_marker("thorough") is None and not passed.grows(item)
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
