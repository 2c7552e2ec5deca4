"""All-reduce bookkeeping: parts cover the vector, sums fall due once, the late are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.allreduce import Round, cut

GROUP = ("a", "b", "c")


@given(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 700))
def test_parts_cover_the_vector_once(length: int, members: int, part_elements: int) -> None:
    group = tuple(f"p{i}" for i in range(members))
    parts = cut(length, group, part_elements)
    assert [p.index for p in parts] == list(range(len(parts)))
    assert [p.begin for p in parts] + [length] == [0] + [p.end for p in parts]
    assert all(0 < p.end - p.begin <= part_elements for p in parts)
    shares = [sum(p.end - p.begin for p in parts if p.owner == owner) for owner in group]
    assert max(shares) - min(shares) <= 1


@given(st.permutations(GROUP))
def test_a_sum_falls_due_with_the_last_version(order: list[str]) -> None:
    parts = cut(9, GROUP, 3)
    round_ = Round("b", GROUP, parts, 5.0)
    assert [round_.arrived(0.0, 1, sender) for sender in order] == [False, False, True]
    assert not round_.finished
    round_.returned(0.0, 0)
    round_.returned(0.0, 2)
    assert round_.finished


def test_strangers_repeats_and_others_parts_are_refused() -> None:
    round_ = Round("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.arrived(0.0, 1, "a")
    for index, sender in ((1, "a"), (1, "z"), (0, "a"), (99, "a")):
        with pytest.raises(ValueError):
            round_.arrived(0.0, index, sender)


def test_a_silent_sender_is_late_before_the_owner_that_waits_for_it() -> None:
    round_ = Round("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.begin(0.0)
    round_.arrived(4.0, 1, "a")
    assert round_.late(4.9) == ()
    assert round_.late(5.1) == ("c",)
    round_.arrived(6.0, 1, "c")
    assert round_.late(13.0) == ()
    assert round_.late(14.5) == ("a",)


def test_a_round_of_one_needs_only_its_own_versions() -> None:
    round_ = Round("a", ("a",), cut(4, ("a",), 2), 5.0)
    assert not round_.finished
    assert round_.arrived(0.0, 0, "a")
    assert round_.arrived(0.0, 1, "a")
    assert round_.finished
