"""The list of members by differences: bounded answers, and whoever asks until nothing is to come has the list."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import MEMBER_NEWS_BYTES, MEMBERS
from peerd.messages.encoding import encode
from peerd.messages.swarm import MemberInfo, MemberNews
from peerd.swarm.steps.member_list import KnownMembers, MemberList, best_addrs

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def member(name: str, ready: bool = True, addrs: tuple[str, ...] = ()) -> MemberInfo:
    return MemberInfo(name, 0, list(addrs), ready, since=1.0)


def made(*members: MemberInfo, news_bytes: int = MEMBER_NEWS_BYTES, seed: int = 1, most: int = MEMBERS) -> MemberList:
    found = MemberList(random.Random(seed), news_bytes, most)
    found.update(members)
    found.check()
    return found


def caught_up(known: KnownMembers, told: MemberList, most: int = 10_000) -> list[MemberInfo] | None:
    """Ask until nothing more is to come; returns the last list."""
    found = None
    for _ in range(most):
        news = told.news(known.version)
        if news is None:
            return found
        found = known.take(news) or found
    raise AssertionError("there is always more")


def test_only_what_has_changed_is_told() -> None:
    told, known = made(member("a"), member("b"), member("c")), KnownMembers()
    caught_up(known, told)
    told.update([member("a"), member("b", ready=False), member("d")])
    news = told.news(known.version)
    assert news is not None
    assert ([m.peer for m in news.changed], news.gone, news.more) == (["b", "d"], ["c/0"], False)
    assert known.take(news) == [member("a"), member("b", ready=False), member("d")]
    assert told.news(known.version) is None


def test_a_list_of_another_conductor_begins_anew() -> None:
    known = KnownMembers()
    caught_up(known, made(member("a"), member("b")))
    after = made(member("b"), seed=2)
    news = after.news(known.version)
    assert news is not None
    assert news.since == 0
    assert known.take(news) == [member("b")]


def test_changes_to_a_list_that_nobody_has_are_left_alone() -> None:
    known = KnownMembers()
    caught_up(known, told := made(member("a")))
    version = known.version
    assert known.take(MemberNews(version + 5, version + 9, [member("x")], [], False)) is None
    assert known.take(MemberNews(version - 5, version - 1, [member("x")], [], False)) is None
    assert known.version == version == told.version


def test_an_answer_ends_at_its_bytes_and_the_list_comes_whole_or_not_at_all() -> None:
    told, known = made(*(member(f"peer{n:04}") for n in range(1000)), news_bytes=2000), KnownMembers()
    answers = 0
    while (news := told.news(known.version)) is not None:
        assert len(encode(news)) <= 2000 + 64
        whole = known.take(news)
        assert known.more == news.more == (whole is None)
        answers += 1
    assert whole is not None
    assert len(whole) == 1000
    assert answers > 10


def test_a_full_list_with_long_addresses_fits_into_bounded_answers() -> None:
    name = ".".join(["x" * 60] * 4)
    addrs = tuple(f"/dns4/{name}/tcp/{port}/p2p/{PEER}/p2p-circuit/p2p/{PEER}" for port in range(1, 5))
    told, known = made(*(member(f"{n:052}", addrs=addrs) for n in range(MEMBERS + 9))), KnownMembers()
    while (news := told.news(known.version)) is not None:
        assert len(encode(news)) <= MEMBER_NEWS_BYTES + 64
        whole = known.take(news)
    assert whole is not None
    assert len(whole) == MEMBERS
    assert {len(m.addrs) for m in whole} == {4}


def test_who_went_away_long_ago_is_forgotten_and_old_lists_begin_anew() -> None:
    told, known = made(member("a"), most=4), KnownMembers()
    caught_up(known, told)
    for number in range(20):
        told.update([member("a"), member(f"b{number}")])
        told.check()
    news = told.news(known.version)
    assert news is not None
    assert news.since == 0
    assert known.take(news) == [member("a"), member("b19")]


@pytest.mark.slow
@given(
    st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.booleans()) | st.integers(1, 3), max_size=40),
    st.integers(0, 120),
)
def test_whatever_changes_between_answers_who_asks_on_has_the_list(
    changes: list[dict[str, bool] | int], news_bytes: int
) -> None:
    told, known = made(news_bytes=news_bytes, most=5), KnownMembers()
    now: list[MemberInfo] = []
    for change in changes:
        if isinstance(change, int):
            for _ in range(change):
                known.take(told.news(known.version))
        else:
            now = [member(name, ready) for name, ready in sorted(change.items())][:5]
            told.update(now)
            told.check()
    caught_up(known, told)
    known.forget()
    assert (caught_up(known, told) or []) == now


@pytest.mark.parametrize(
    ("addrs", "best"),
    [
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1"], ["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1"]),
        (
            [f"/ip4/10.0.0.{n}/tcp/1" for n in range(1, 9)] + ["/ip4/8.8.8.8/tcp/1", "/ip6/2600::1/tcp/1"],
            ["/ip4/8.8.8.8/tcp/1", "/ip6/2600::1/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1"],
        ),
        (
            ["/dns/a/tcp/1", "/dns/b/tcp/1", f"/p2p/{PEER}/p2p-circuit", "nonsense", "/ip4/127.0.0.1/tcp/1"],
            ["/dns/a/tcp/1", f"/p2p/{PEER}/p2p-circuit", "/ip4/127.0.0.1/tcp/1", "/dns/b/tcp/1"],
        ),
    ],
)
def test_the_best_addresses_are_of_different_kinds(addrs: list[str], best: list[str]) -> None:
    assert best_addrs(addrs) == best
