"""Versions of trainers' views: a trainer that has its newest version is not woken by changes of others'."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.swarm.reader_versions import ReaderVersions

READERS = ("a", "b", "c")


def test_a_change_for_one_is_none_for_the_others() -> None:
    versions = ReaderVersions()
    a, b = versions.of("a"), versions.of("b")
    versions.change("a")
    assert versions.of("a") > a
    assert versions.of("b") == b


@given(st.lists(st.sampled_from([None, *READERS])))
def test_a_version_grows_with_each_change_that_its_reader_sees_and_with_no_other(changes: list[str | None]) -> None:
    versions = ReaderVersions()
    for changed in changes:
        before = {reader: versions.of(reader) for reader in READERS}
        versions.change(changed) if changed else versions.change_all()
        for reader in READERS:
            grew = versions.of(reader) - before[reader]
            assert grew > 0 if changed in (None, reader) else grew == 0


def test_readers_with_news_are_told_once_and_no_others() -> None:
    versions = ReaderVersions()
    versions.concerned()
    versions.change("a")
    versions.change("b")
    versions.change("a")
    assert versions.concerned() == {"a", "b"}
    assert versions.concerned() == set()
    versions.change("c")
    versions.change_all()
    versions.change("a")
    assert versions.concerned() is None
    assert versions.concerned() == set()
