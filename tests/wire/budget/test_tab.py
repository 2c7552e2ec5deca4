"""Tabs: however little the book is asked, it covers what is used, and keeps nothing for those who use nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError
from peerd.wire.budget.book import Book, Bounds, Resource, User
from peerd.wire.budget.tab import MinuteTab, UsageTab

USER, OTHER = User("a", "p", "r"), User("b", "q", "s")


def book(total: int) -> Book:
    return Book({Resource.CALLS: Bounds(total=total, peer=total, place=total, region=total)})


@given(st.lists(st.tuples(st.sampled_from(range(3)), st.integers(0, 40)), max_size=60), st.integers(1, 20))
def test_the_book_covers_what_tabs_use_and_not_much_more(steps: list[tuple[int, int]], step: int) -> None:
    shared = book(100)
    tabs = [UsageTab(shared, Resource.CALLS, user, step=step) for user in (USER, USER, OTHER)]
    for number, amount in steps:
        tab = tabs[number]
        before = [each.used for each in tabs]
        full = tab.hold(amount)
        if full is None:
            assert tab.used == amount
        else:
            assert [each.used for each in tabs] == before
            covered = shared.used(Resource.CALLS)
            assert covered - tab.used + amount > 100  # there was no room, not even without going ahead
        shared.check()
        for user, own in ((USER, tabs[:2]), (OTHER, tabs[2:])):
            used = [each.used for each in own]
            assert sum(used) <= shared.used(Resource.CALLS, user) <= 4 * sum(used)
    for tab in tabs:
        tab.hold(0)
    assert shared.used(Resource.CALLS) == 0


def test_what_is_small_and_often_asks_the_book_now_and_then() -> None:
    shared, asked = book(1000), 0
    tab = UsageTab(shared, Resource.CALLS, USER, step=16)
    for taken in range(64):
        before = shared.used(Resource.CALLS)
        assert tab.take() is None
        asked += shared.used(Resource.CALLS) != before
        assert tab.used == taken + 1
    for _ in range(64):
        before = shared.used(Resource.CALLS)
        tab.give()
        asked += shared.used(Resource.CALLS) != before
    assert asked < 16


def test_giving_back_more_than_was_taken_is_our_own_mistake() -> None:
    tab = UsageTab(book(10), Resource.CALLS, USER, step=4)
    tab.take(2)
    with pytest.raises(LocalError):
        tab.give(3)


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans(), st.booleans()), max_size=60))
def test_the_book_has_the_uses_of_the_last_minute(steps: list[tuple[float, bool, bool]]) -> None:
    shared, now, uses = book(3), 0.0, list[tuple[float, User]]()
    tab = MinuteTab(shared, Resource.CALLS)
    for pause_s, other, back in steps:
        now, user = now + pause_s, OTHER if other else USER
        uses = [use for use in uses if use[0] > now - 60]
        full = len(uses) == 3
        assert (tab.objection(now, user) is not None) == full
        if back:
            tab.take_back(user)
            if mine := [use for use in uses if use[1] == user]:
                uses.remove(mine[-1])
        elif tab.take(now, user) is None:
            assert not full
            uses.append((now, user))
        else:
            assert full
        assert shared.used(Resource.CALLS) == len(uses)
