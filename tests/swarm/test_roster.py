"""The roster: who is there, where each stands, and a version that grows with each change of what members are told."""

from __future__ import annotations

import random
from dataclasses import replace

from peerd.messages.swarm import MAX_MEMBERS, LineInfo, Mb, Position
from peerd.swarm.roster import START, Roster, RosterEntry
from tests.worlds.machines.conducting import hello

ONE, TWO = Position(1, b"one"), Position(2, b"two")
MBS = frozenset({Mb("t", 1), Mb("t", 2)})


def two_stages() -> Roster:
    roster = Roster(2)
    for peer, stage, position in (("b", 0, ONE), ("a", 0, START), ("c", 1, START)):
        roster.enter(hello(peer, position, stage=stage))
    return roster


def test_members_stand_where_they_say_and_stages_lack_what_nobody_has() -> None:
    roster = two_stages()
    assert roster.of_stage(0) == ["a", "b"]
    assert roster.at(0, ONE) == ["b"]
    assert roster.lagging_stages(ONE) == [1]
    assert roster.lagging_stages(None) == [0, 1]
    assert roster.empty_stages() == []
    roster.remove("c")
    assert roster.empty_stages() == [1]
    roster.move("a", ONE, stepped=True)
    assert roster.at(0, ONE) == ["a", "b"]
    roster.check()
    assert (roster.session("a"), roster.session("c"), roster.since("c")) == (1, None, 0.0)


def test_the_list_of_members_is_sorted_and_ends_with_the_helpers() -> None:
    roster = two_stages()
    roster.note_line("a", 0, LineInfo("client"), ())
    roster.note_line("0", 1, LineInfo("aux"), ("/ip4/10.0.0.1/tcp/1",))
    told = roster.members(lambda peer, position: position == ONE)
    assert [(m.peer, m.stage, m.ready, m.client) for m in told] == [
        ("a", 0, False, True),
        ("b", 0, True, False),
        ("c", 1, False, False),
        ("0", 1, False, False),
    ]


def test_the_version_grows_with_what_members_are_told_and_only_with_that() -> None:
    roster, seen = two_stages(), 0

    def grew() -> bool:
        nonlocal seen
        before, seen = seen, roster.version
        return seen > before

    assert grew()
    roster.note_saved("a", [ONE])
    roster.note_line("a", 0, LineInfo("node", 1e6, 1e6), ())
    roster.remove("nobody")
    assert not grew()
    for change in (
        lambda: roster.note_line("h", 0, LineInfo("aux"), ()),
        lambda: roster.remove("h"),
        lambda: roster.enter(hello("a", ONE)),
        lambda: roster.remove("a"),
        roster.change,
    ):
        change()
        assert grew()


def test_there_is_room_for_so_many_members_and_for_those_who_are_there() -> None:
    roster = two_stages()
    entry = roster.entries["a"]
    roster.entries |= {str(number): replace(entry) for number in range(MAX_MEMBERS - len(roster.entries))}
    assert roster.has_room("a")
    assert not roster.has_room("d")


def test_only_in_a_delayed_run_a_member_holds_anything_early() -> None:
    for delayed in (False, True):
        entry = Roster(1, delayed=delayed).enter(hello("a", early=MBS))
        assert entry.early == (MBS if delayed else frozenset())


def test_what_was_held_early_is_of_the_step_that_an_earlier_conductor_prepared() -> None:
    def at_start() -> RosterEntry:
        return Roster(1, delayed=True).enter(hello("a", prepared=ONE, held=frozenset({Mb("t", 0)}), early=MBS))

    for target, stepped, held in ((ONE, False, MBS), (ONE, True, frozenset()), (TWO, False, frozenset())):
        entry = at_start()
        entry.move(target, stepped=stepped)
        assert (entry.position, entry.prepared, entry.held, entry.early) == (target, None, held, frozenset())


def test_the_batch_before_is_what_members_count_of_the_last_mean_they_have() -> None:
    roster, rng = Roster(1), random.Random(1)
    told = [("a", ONE, None, 1), ("b", START, ONE, 2), ("c", ONE, TWO, 3), ("d", START, None, 4)]
    for peer, position, prepared, seq in rng.sample(told, len(told)):
        roster.enter(hello(peer, position, prepared=prepared, counted=frozenset({Mb("t", seq)})))
    assert roster.batch_before(ONE, ()) == {Mb("t", 1), Mb("t", 2)}
    assert roster.batch_before(ONE, {"b", "c"}) == {Mb("t", 2)}, "of strangers where nobody else has it"


def test_the_list_of_members_has_a_version_of_its_own() -> None:
    roster = two_stages()
    listed = roster.listed
    roster.change(listed=False)
    assert roster.listed == listed < roster.version
    for tell in (
        roster.change,
        lambda: roster.enter(hello("d", ONE)),
        lambda: roster.note_line("h", 0, LineInfo("aux"), ()),
        lambda: roster.remove("d"),
        lambda: roster.remove("h"),
    ):
        before = roster.version
        tell()
        assert roster.listed == roster.version > before
    for tell in (
        lambda: roster.note_line("a", 0, LineInfo("client"), ()),
        lambda: roster.move("a", ONE, stepped=True),
    ):
        before = roster.version
        tell()
        assert roster.version == before, "no news by itself"
        roster.change(listed=False)
        assert roster.listed == roster.version
        roster.change(listed=False)
        assert roster.listed < roster.version


def test_the_list_of_members_names_rates_and_small_changes_of_them_are_no_news() -> None:
    roster = two_stages()
    version = roster.listed
    roster.note_rates({"a": 4.0, "b": 2.0, "stranger": 1.0})
    assert {m.peer: m.rate for m in roster.members(lambda peer, position: True)} == {"a": 4.0, "b": 2.0, "c": 0.0}
    assert roster.listed > version
    version = roster.version
    roster.note_rates({"a": 5.9, "b": 1.4})
    assert roster.version == version
    roster.note_rates({"a": 6.1, "b": 1.4})
    assert roster.listed > version
    assert [m.rate for m in roster.members(lambda peer, position: True)] == [6.1, 2.0, 0.0]
    roster.remove("a")
    roster.enter(hello("a", START))
    assert roster.members(lambda peer, position: True)[0].rate == 0.0, "another one may have come in its place"


def test_checkpoints_that_a_member_names_again_are_no_news() -> None:
    roster = two_stages()
    roster.note_saved("a", [ONE])
    stands = roster.stands
    roster.note_saved("a", [ONE])
    assert roster.stands == stands
    roster.note_saved("a", [ONE, TWO])
    assert roster.stands > stands
