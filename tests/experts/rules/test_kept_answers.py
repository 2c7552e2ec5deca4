"""A backward that is repeated counts once, and is answered as the first time while its answer is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError
from peerd.experts.rules.kept_answers import KeptAnswers, KeptBounds, Known

Kept = KeptAnswers[int, str, str]


def kept(seconds: float = 10.0, total_bytes: int = 400, answers: int = 100) -> Kept:
    return KeptAnswers(KeptBounds(seconds=seconds, total_bytes=total_bytes, answers=answers))


def made(k: Kept, now: float, caller: str, name: int, size_bytes: int = 1) -> None:
    k.begin(caller, name, "job")
    k.finish(now, caller, name, f"answer {name}", size_bytes)
    k.check()


def test_a_repeat_joins_the_first_and_later_finds_its_answer() -> None:
    k = kept()
    assert k.look(0.0, "a", 1) is Known.NEW
    k.begin("a", 1, "job 1")
    assert k.look(0.0, "a", 1) is Known.UNDER_WAY
    assert k.under_way("a", 1) == "job 1"
    assert k.look(0.0, "b", 1) is Known.NEW  # ids are the caller's own
    with pytest.raises(LocalError):
        k.begin("a", 1, "job 2")
    k.finish(1.0, "a", 1, "answer", 5)
    assert k.look(2.0, "a", 1) is Known.KEPT
    assert k.answer("a", 1) == "answer"


def test_what_was_given_up_may_be_begun_again() -> None:
    k = kept()
    k.begin("a", 1, "job")
    k.give_up("a", 1)
    assert k.look(0.0, "a", 1) is Known.NEW
    made(k, 0.0, "a", 1)


def test_answers_are_kept_for_a_time() -> None:
    k = kept(seconds=10.0)
    made(k, 0.0, "a", 1)
    made(k, 5.0, "a", 2)
    assert k.look(10.0, "a", 1) is Known.NEW
    assert k.look(10.0, "a", 2) is Known.KEPT


def test_an_update_whose_answer_takes_too_many_bytes_is_still_known() -> None:
    k = kept(total_bytes=400)
    made(k, 0.0, "a", 1, size_bytes=101)
    assert k.look(0.0, "a", 1) is Known.FORGOTTEN
    assert k.held_bytes == 0


def test_a_caller_pushes_out_its_own_answers_first() -> None:
    k = kept(total_bytes=400)
    made(k, 0.0, "quiet", 0, size_bytes=50)
    for name in range(50):
        made(k, 1.0, "flood", name, size_bytes=40)
    assert k.look(1.0, "quiet", 0) is Known.KEPT
    assert k.look(1.0, "flood", 0) is Known.FORGOTTEN
    assert k.look(1.0, "flood", 49) is Known.KEPT
    assert k.held_bytes == 50 + 2 * 40


def test_many_callers_together_stay_below_the_bounds() -> None:
    k = kept(total_bytes=400, answers=30)
    for number in range(100):
        made(k, 0.0, f"caller {number}", 0, size_bytes=90)
    assert k.held_bytes == 360
    assert k.look(0.0, "caller 0", 0) is Known.NEW
    assert k.look(0.0, "caller 80", 0) is Known.FORGOTTEN
    assert k.look(0.0, "caller 99", 0) is Known.KEPT


moves = st.lists(
    st.tuples(st.sampled_from("bfgl"), st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 120)), max_size=80
)


@given(moves)
def test_whatever_comes_no_update_counts_twice_while_it_is_remembered(
    schedule: list[tuple[str, str, int, int]],
) -> None:
    k, under_way, counted = kept(seconds=20.0), set[tuple[str, int]](), dict[tuple[str, int], float]()
    for moment, (move, caller, name, size) in enumerate(schedule):
        now, key = float(moment), (caller, name)
        state = k.look(now, caller, name)
        if key in under_way:
            assert state is Known.UNDER_WAY
        elif key in counted and now - counted[key] < 20.0:
            assert state in (Known.KEPT, Known.FORGOTTEN)
        else:
            assert state is Known.NEW
        if move == "b" and state is Known.NEW:
            k.begin(caller, name, "job")
            under_way.add(key)
        elif move == "f" and key in under_way:
            k.finish(now, caller, name, f"{caller}{name}", size)
            under_way.discard(key)
            counted[key] = now
        elif move == "g" and key in under_way:
            k.give_up(caller, name)
            under_way.discard(key)
        elif state is Known.KEPT:
            assert k.answer(caller, name) == f"{caller}{name}"
        k.check()
