"""A dictionary that forgets what was written longest ago, however it is written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peerd.core.bounded_dict import BoundedDict


def filled(maxlen: int, keys: str) -> BoundedDict[str, int]:
    made = BoundedDict[str, int](maxlen)
    for number, key in enumerate(keys):
        made[key] = number
    return made


def test_the_key_written_longest_ago_makes_room() -> None:
    assert list(filled(3, "abcd").items()) == [("b", 1), ("c", 2), ("d", 3)]


def test_a_key_written_anew_is_the_youngest() -> None:
    assert list(filled(3, "abcad").items()) == [("c", 2), ("a", 3), ("d", 4)]


def test_reading_makes_nothing_younger_unless_it_is_moved() -> None:
    kept = filled(2, "ab")
    assert (kept["a"], kept.get("a"), "a" in kept) == (0, 0, True)
    kept["c"] = 2
    assert list(kept) == ["b", "c"]
    kept.move_to_end("b")
    kept["d"] = 3
    assert list(kept) == ["b", "d"]


@pytest.mark.parametrize(
    "write",
    [
        lambda kept: kept.setdefault("c", 9),
        lambda kept: kept.update(c=9),
        lambda kept: kept.__ior__({"c": 9}),
    ],
    ids=["setdefault", "update", "or"],
)
def test_every_way_to_write_is_bounded(write: Callable[[BoundedDict[str, int]], object]) -> None:
    kept = filled(2, "ab")
    write(kept)
    assert list(kept.items()) == [("b", 1), ("c", 9)]


def test_what_is_there_already_is_not_overwritten_by_setdefault() -> None:
    kept = filled(2, "ab")
    assert kept.setdefault("a", 9) == 0
    assert list(kept.items()) == [("a", 0), ("b", 1)]


def test_both_ends_can_be_taken_out() -> None:
    kept = filled(3, "abc")
    assert kept.popitem(last=False) == ("a", 0)
    assert kept.popitem() == ("c", 2)
    assert kept.pop("b") == 1
    assert not kept
