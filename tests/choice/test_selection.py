"""Which tests a run takes: slices together are everything, what changed comes first, and the order fits the machine."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.choice import selection
from tests.choice.durations import LISTED_S, Durations, read_table, table_of
from tests.choice.imports import ROOT, distances, sources
from tests.choice.schedule import arrange, collection_order, plain_id
from tests.choice.slices import MOST, Slice, Weighed, parse_slice, slice_numbers
from tests.choice.touched import Candidate, Deadline, changed_files, choose, nearness

WEIGHED = st.builds(Weighed, st.text(min_size=1), st.floats(0, 100), st.booleans())


def test_the_slices_of_this_run_together_have_each_of_its_tests_once(request: pytest.FixtureRequest) -> None:
    items, table = request.session.items, read_table()
    every = Counter(
        item.nodeid
        for number in range(1, MOST + 1)
        for item in selection._slice(items, list(items), Slice(number, MOST), table).run
    )
    assert every == Counter(item.nodeid for item in items)


@given(st.lists(WEIGHED, unique_by=lambda each: each.test), st.integers(1, MOST))
def test_each_test_is_in_one_slice_and_long_ones_are_dealt_out_evenly(tests: list[Weighed], count: int) -> None:
    numbers = slice_numbers(tests, count)
    assert numbers.keys() == {each.test for each in tests}
    assert set(numbers.values()) <= set(range(1, count + 1))
    for repeated in (False, True):
        listed = [each for each in tests if each.seconds >= LISTED_S and each.repeated == repeated]
        loads = dict.fromkeys(range(1, count + 1), 0.0)
        for each in listed:
            loads[numbers[each.test]] += each.seconds
        assert max(loads.values()) - min(loads.values()) <= max((each.seconds for each in listed), default=0) + 1e-6


@pytest.mark.parametrize("text", ["0/6", "7/6", "2", "2/7", "a/b", "2/6/3", " 2/6"])
def test_a_slice_that_there_is_none_of_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="such as 2/6"):
        parse_slice(text)


def test_make_and_ci_ask_for_the_slices_that_are_cut() -> None:
    asked = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed-dev", "test-all", "SLICE=2/6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PEERD_TEST_SLICE=2/6 " in asked.stdout
    assert parse_slice("2/6") == Slice(2, 6)
    assert f"\nSLICES={MOST}\n" in (ROOT / ".ci/run").read_text("utf-8")


def test_a_test_that_imports_what_changed_is_nearer_than_one_behind_another_module() -> None:
    changed = {ROOT / "peerd/core/keys.py"}
    tests = [ROOT / "tests/core/test_keys.py", ROOT / "tests/sim/test_chaos.py", ROOT / "tests/screen/test_units.py"]
    near = nearness(tests, changed)
    assert near[tests[0]] == 1  # it stands in the room, and imports the module
    assert near[tests[1]] > 1
    assert tests[2] not in near


def test_a_changed_test_a_compiled_source_and_a_page_have_their_tests() -> None:
    tests = [path for path in sources("tests") if path.name.startswith("test_")]
    assert nearness(tests, {tests[0]})[tests[0]] == 0
    kernels = nearness(tests, {ROOT / "peerd/codec/kernels/source/blockwise_avx2.h"})
    assert kernels[ROOT / "tests/codec/kernels/test_native.py"] == 1
    assert nearness(tests, {ROOT / "README.md"})[ROOT / "tests/test_readme.py"] == 1


def test_processes_that_a_test_starts_count_as_used() -> None:
    used = distances(ROOT / "tests/e2e/test_processes.py")
    assert {ROOT / "peerd/cli/cli.py", ROOT / "roles/stage.py", ROOT / "roles/backbone.py"} <= used.keys()


def test_files_changed_in_the_repository_exist(tmp_path: Path) -> None:
    assert all(file.is_file() for file in changed_files(hours=12))


@given(st.lists(st.builds(Candidate, st.integers(0, 5), st.floats(0, 50), st.text())), st.floats(0, 200))
def test_what_touches_a_change_is_taken_nearest_first_as_long_as_there_is_time(
    candidates: list[Candidate], budget_s: float
) -> None:
    choice = choose(candidates, budget_s)
    assert sorted([*choice.taken, *choice.left]) == sorted(candidates)
    assert sum(each.seconds for each in choice.taken) <= budget_s
    for left in choice.left:  # it had no room beside what is as near or nearer
        nearer = sum(each.seconds for each in choice.taken if each <= left)
        assert nearer + left.seconds > budget_s


def item(test: str, *marks: str, scope: str = "function") -> Any:
    """A test as the schedule sees it."""
    every = {name: getattr(pytest.mark, name).mark for name in marks}
    fixtures = SimpleNamespace(name2fixturedefs={"scene": [SimpleNamespace(scope=scope)]})
    made = SimpleNamespace(nodeid=test, _fixtureinfo=fixtures, groups=[])
    made.iter_markers = lambda: every.values()
    made.get_closest_marker = every.get
    made.add_marker = lambda mark: made.groups.append(mark.args[0])
    return made


def test_the_longest_come_first_and_what_measures_comes_last() -> None:
    table = Durations({"b.py::slow": 50.0, "c.py::alone": 90.0, "a.py::quick": 0.1})
    items = [
        item("c.py::alone", "alone", "slow"),
        item("a.py::quick"),
        item("a.py::quick too"),
        item("b.py::slow", "slow"),
        item("d.py::scene", "slow", scope="module"),
    ]
    arrange(items, table)
    assert [(each.nodeid, each.groups) for each in items] == [
        ("b.py::slow", []),
        ("a.py::quick", ["a.py"]),
        ("a.py::quick too", ["a.py"]),
        ("d.py::scene", ["d.py"]),
        ("c.py::alone", ["alone"]),
    ]


def test_ranked_tests_keep_their_order_but_for_what_measures() -> None:
    items = [item("c.py::alone", "alone"), item("b.py::b", "slow"), item("a.py::a"), item("b.py::c", "slow")]
    arrange(items, Durations({"b.py::c": 50.0}), ranked=True)
    assert [each.nodeid for each in items] == ["b.py::b", "a.py::a", "b.py::c", "c.py::alone"]


def test_a_run_for_what_changed_ends_with_its_time_and_others_never() -> None:
    deadline = Deadline(budget_s=10.0)
    assert [deadline.is_over(now_s) for now_s in (5.0, 15.0, 15.1)] == [False, False, True]
    endless = Deadline(budget_s=0.0)
    assert not any(endless.is_over(now_s) for now_s in (0.0, 1e9))


@pytest.mark.parametrize(
    ("full", "plain"),
    [("a::b[x]@a.py", "a::b[x]"), ("a::b@alone", "a::b"), ("a::b[x@y]", "a::b[x@y]"), ("a::b", "a::b")],
)
def test_a_tests_id_is_told_from_its_group(full: str, plain: str) -> None:
    assert plain_id(full) == plain


def test_a_table_has_the_longest_run_of_each_long_test_and_one_mean_of_the_others() -> None:
    phases = ["0.1\ta::long", "1.0\ta::long", "0.1\ta::long", "0.0\ta::long", "3.0\ta::long", "0.0\ta::long"]
    text = table_of([*phases, "0.1\ta::one", "0.0\ta::one", "0.0\ta::one", "0.3\ta::two", "0.0\ta::two"])
    assert text.splitlines()[1:] == ["0.1000\tothers", "3.0\ta::long", "0.3\ta::two"]


def test_the_committed_table_can_be_read_and_leaves_a_mean_for_new_tests() -> None:
    table = read_table()
    assert 0 < table["tests/test_new.py::test_nobody_has_measured"] < LISTED_S


def test_processes_collect_the_same_files_and_begin_at_different_ones() -> None:
    orders = [collection_order(ROOT / "tests", number, 3) for number in range(3)]
    assert orders[0] == sorted(orders[1]) == sorted(orders[2])
    assert len({order[0] for order in orders}) == 3
