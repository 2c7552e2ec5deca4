"""Numbers for people: units, separators, and never `nan` or an exponent where digits do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from peerd.screen import units

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def test_bytes_come_in_the_unit_that_people_read() -> None:
    sizes = [units.size(n) for n in (0, 999, 1000, 1.5e6, 378659806, 2e9, 3e15)]
    assert sizes == ["0 B", "999 B", "1.0 kB", "1.5 MB", "378.7 MB", "2.0 GB", "3000.0 TB"]


def test_times_have_their_two_largest_units() -> None:
    found = [units.duration(s) for s in (5.9, 61, 3600, 7800, 100_000, -3)]
    assert found == ["5 s", "1 min 01 s", "1 h 00 min", "2 h 10 min", "1 d 03 h", "0 s"]
    assert [units.took(s) for s in (0.1641, 2.5, 61, 0.9999)] == ["164 ms", "2.5 s", "1 min 01 s", "1.0 s"]


def test_counts_and_figures_have_separators_and_no_exponent() -> None:
    assert [units.count(n) for n in (7, 14930.4)] == ["7", "14,930"]
    assert [units.number(n) for n in (1.493e4, 12.5, 1.23456, 0.03124, 3.0, 1e-7)] == [
        *("14,930", "12.5", "1.235", "0.03124", "3", "1e-07"),
    ]
    assert [units.rate(r) for r in (214.3, 22.44, 0.0)] == ["214 samples/s", "22.4 samples/s", "0 samples/s"]
    assert [units.share(part) for part in (0.18, 0.004, 0.0, 1.0)] == ["18 %", "0.4 %", "0 %", "100 %"]
    assert units.counted(1, "peer") == "1 peer"
    assert units.counted(2000, "peer") == "2,000 peers"


FORMS = (units.count, units.number, units.loss, units.size, units.share, units.duration, units.took)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "nan", "text", True, 10**400])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_is_a_dash(form: Any, value: object) -> None:
    assert form(value) == "-"


def test_any_plain_value_is_told_briefly() -> None:
    assert units.brief({"a": [1.23456, None, PEER], "b": None}) == "a 1.235, -, …4kx6nXTN"
    assert units.brief([{"peer": PEER}, {"peer": PEER}]) == "2 entries"
    assert units.brief("nan") == "-"
    assert units.brief(list(range(9))) == "0, 1, 2, 3, 4, 5, …"


def test_ids_in_a_sentence_become_names_where_there_are_names() -> None:
    assert units.named(f"trainer …{PEER[-8:]}, and {PEER}", {PEER: "Ann"}) == "trainer Ann, and Ann"
    assert units.named(f"waits for {PEER}", {}) == f"waits for …{PEER[-8:]}"
