"""The tables of tests/README.md: each property names one test that exists, and `make test` runs it where they say so.

Tests are looked up in the text of their files; nothing is imported from them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Final, get_args, get_type_hints

import pytest

from peerd.run.runfile import AveragingSection, BoundarySection, ExpertsSection
from tests.choice.imports import ROOT, entry_points, parsed
from tests.choice.properties import EVERYTHING, QUICK, Property, read_table
from tests.test_house import FLAGS

PAGE: Final = (ROOT / "tests/README.md").read_text("utf-8")
LEFT_OUT: Final = {"thorough", "lab", "interop"}  # marks of tests that `make test` leaves out


def marks_in(node: ast.AST) -> set[str]:
    """Names of the marks in an expression, except those of single cases of `parametrize`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize":
        return set()
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in found if isinstance(each.value, ast.Attribute) and each.value.attr == "mark"}


def marks_of(test: str) -> set[str] | None:
    """Marks of a whole test and of its module, or None if there is no such test."""
    name, _, function = test.partition("::")
    body = parsed(ROOT / name).body if (ROOT / name).exists() else []
    of_module = [each.value for each in body if isinstance(each, ast.Assign) and "pytestmark" in ast.unparse(each)]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return set().union(*map(marks_in, [*of_module, *node.decorator_list]))
    return None


def names_due() -> set[str]:
    """Codes, roles and commands, as rows have to name them."""
    sections = (BoundarySection, AveragingSection, ExpertsSection)
    codes = {code for section in sections for code in get_args(get_type_hints(section)["code"])}
    groups = {command.rpartition(" ")[0] for command in FLAGS}  # such as `token`, and "" for peerd itself
    return codes | entry_points().keys() | {f"peerd {command}" for command in FLAGS.keys() - groups}


def faults_of(page: str) -> list[str]:
    """List the faults of the tables of a page."""
    faults: list[str] = []
    rows: list[Property] = []
    for head in (QUICK, EVERYTHING):
        table = read_table(head, page)
        faults += [f"no row: {line}" for line in table.faulty]
        rows += table.rows
        for test in (row.test for row in table.rows):
            if (marks := marks_of(test)) is None:
                faults.append(f"no test: {test}")
            elif bool(marks & LEFT_OUT) is (head == QUICK):
                faults.append(f"wrong table: {test}")
    faults += [f"twice: {cell}" for cell, count in Counter(cell for row in rows for cell in row).items() if count > 1]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row.text)}
    return faults + [f"not named: {name}" for name in sorted(names_due() - named)]


def test_each_property_has_one_test_that_shows_it() -> None:
    assert faults_of(PAGE) == []


def test_codes_roles_and_commands_need_a_row() -> None:
    assert names_due() >= {"none", "fp16", "powersgd", "aux", "trainer", "peerd join", "peerd token issue"}
    assert not names_due() & {"peerd ", "peerd token"}


OURS: Final = "tests/choice/test_properties.py::test_each_property_has_one_test_that_shows_it"
LAB: Final = "tests/lab/test_reach.py::test_neighbours_behind_one_router_meet_on_their_lan"
WHEEL: Final = "tests/test_house.py::test_the_wheel_holds_all_of_peerd_and_roles_and_nothing_else"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (QUICK, f"{QUICK}| New | {OURS} |\n", f"no row: | New | {OURS} |"),
        (QUICK, f"{QUICK}| New | `{OURS}s` |\n", f"no test: {OURS}s"),
        (QUICK, f"{QUICK}| New | `tests/test_none.py::test_it` |\n", "no test: tests/test_none.py::test_it"),
        (QUICK, f"{QUICK}| New | `{LAB}` |\n", f"wrong table: {LAB}"),
        (QUICK, f"{QUICK}| New | `{WHEEL}` |\n", f"wrong table: {WHEEL}"),
        (EVERYTHING, f"{EVERYTHING}| New | `{OURS}` |\n", f"wrong table: {OURS}"),
        (QUICK, f"{QUICK}| New | `{OURS}` |\n| Newer | `{OURS}` |\n", f"twice: {OURS}"),
        (QUICK, f"{QUICK}| New | `{OURS}` |\n| New | `{LAB}` |\n", "twice: New"),
        ("`powersgd`", "it", "not named: powersgd"),
        ("`aux`", "it", "not named: aux"),
        ("`peerd plan`", "it", "not named: peerd plan"),
    ],
)
def test_a_fault_of_the_tables_is_found(old: str, new: str, fault: str) -> None:
    assert old in PAGE
    assert fault in faults_of(PAGE.replace(old, new))
