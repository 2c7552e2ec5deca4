"""The search for a position: what all can reach, how members get there, and when an older one is looked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.swarm import Position
from peerd.swarm.events import ConductorConfig, MemberHello, Origin, SendMove
from peerd.swarm.positions import position_search
from peerd.swarm.positions.phases import RunPhase
from peerd.swarm.positions.position_search import PositionSearch
from peerd.swarm.roster import START, Roster, RosterEntry
from tests.worlds.machines.conducting import hello

OLD, NOW, NEXT = Position(4, b"old"), Position(5, b"now"), Position(6, b"next")
CONFIG = ConductorConfig(stages=2, microbatches=1, first_save=2, gather_s=1.0, broken_s=3.0, hearsay_s=60.0)


def search(*hellos: MemberHello, own: str = "a") -> PositionSearch:
    roster = Roster(2)
    for one in hellos:
        roster.enter(one)
    return PositionSearch(CONFIG, Origin(own=own), roster, RunPhase(), 0.0)


def heard(*others: MemberHello) -> PositionSearch:
    """The search of a conductor that knows two members of stage 0, and four of stage 1, and hears of these."""
    before = {"a/0": 0, "b/0": 0} | dict.fromkeys(("c/1", "d/1", "e/1", "f/1"), 1)
    roster = Roster(2)
    for one in others:
        roster.enter(one)
    return PositionSearch(CONFIG, Origin(own="a/0", established=before, seen=[OLD]), roster, RunPhase(), 0.0)


def stand(made: PositionSearch, position: Position) -> None:
    """All have gone there."""
    made._course.move(position, [], commits=False)
    made._course.arrive(0)
    made.arrived(position)


def test_members_restore_what_they_saved_and_commit_what_they_prepared() -> None:
    made = search(
        hello("a", NOW, saved=(OLD,)),
        hello("b", OLD),
        hello("c", OLD, stage=1, prepared=NOW, digest=b"same"),
        hello("d", NOW, stage=1, digest=b"same"),
        hello("e", OLD, stage=1, prepared=NOW, digest=b"other"),
    )
    assert made.best() == NOW
    assert made.moves(NOW) == [SendMove("c", NOW, commit=True)], "the other sum is nobody's to step with"
    assert made.moves(OLD) == [SendMove("a", OLD, commit=False)]
    assert [(order.peer, order.commit) for order in made.moves(START)] == [(peer, False) for peer in "abcde"]


def test_a_sum_that_few_of_its_stage_have_is_not_stepped_with_unless_the_step_was_made() -> None:
    """A liar may have sent one member another sum; who compared them is gone, and the others are late."""
    first = [hello(post, OLD, prepared=NOW, digest=b"0") for post in ("a/0", "b/0")]
    sums = {"c/1": b"poisoned", "d/1": b"sum", "e/1": b"sum"}
    stage = [hello(post, OLD, stage=1, prepared=NOW, digest=digest) for post, digest in sums.items()]
    alone = heard(*first, stage[0])
    assert alone.best() == OLD
    assert not any(order.commit for order in alone.moves(NOW) if order.peer == "c/1")
    assert heard(*first, *stage).best() == OLD, "nobody orders a step where sums differ"
    most = heard(*first, *stage[1:])
    assert most.best() == NOW, "half of the stage have one sum"
    assert {order.peer for order in most.moves(NOW) if order.commit} == {"a/0", "b/0", "d/1", "e/1"}
    assert heard(hello("a/0", NOW), stage[1]).best() == NOW, "the conductor's own peer made the step"
    made = heard(*(hello(post, NOW, seen=(NOW,)) for post in ("a/0", "b/0", "e/0")), stage[1])
    assert made.best() == NOW, "another stage made the step: its conductor had compared all digests"
    assert [order.peer for order in made.moves(NOW)] == ["d/1"]


def test_a_sum_that_few_have_is_stepped_with_where_going_back_costs_more_than_a_step() -> None:
    """The conductor and another one die with their step's order, and only the other stage's peer has stepped."""
    before = {"a/0": 0, "c/0": 0, "x/0": 0, "e/1": 1}
    long_ago = Position(1, b"long ago")

    def left(saved: Position) -> PositionSearch:
        roster = Roster(2)
        roster.enter(hello("a/0", OLD, prepared=NOW, digest=b"sum", saved=(long_ago,)))
        roster.enter(hello("e/1", NOW, stage=1, digest=b"other stage's", saved=(saved,)))
        seen = [long_ago, OLD]
        return PositionSearch(CONFIG, Origin(own="a/0", established=before, seen=seen), roster, RunPhase(), 0.0)

    made = left(saved=long_ago)
    assert made.best() == NOW
    assert made.moves(NOW) == [SendMove("a/0", NOW, commit=True)]
    assert left(saved=OLD).best() == OLD, "it costs one step"


def test_a_member_that_says_it_has_stepped_vouches_for_no_stage_of_which_half_is_away() -> None:
    first = [hello(post, OLD, prepared=NOW, digest=b"0") for post in ("a/0", "b/0")]
    liar = hello("c/1", NOW, stage=1, digest=b"poisoned", saved=(OLD,))
    late = [hello(post, OLD, stage=1, prepared=NOW, digest=b"sum") for post in ("d/1", "e/1")]
    assert heard(*first, liar).best() == OLD, "nobody bears it out"
    assert heard(*first, liar, late[0]).best() == OLD, "the other one has another sum"
    assert heard(*first, replace(liar, digest=b"sum"), late[0]).best() == NOW, "half of the stage say the same"


def test_strangers_do_not_outvote_the_sum_of_a_stages_members() -> None:
    before = {"a/0": 0, "c/1": 1, "d/1": 1}
    roster = Roster(2)
    for post in ("c/1", "d/1"):
        roster.enter(hello(post, OLD, stage=1, prepared=NOW, digest=b"sum"))
    for number in range(4):
        roster.enter(hello(f"x{number}/1", OLD, stage=1, prepared=NOW, digest=b"made up"))
    roster.enter(hello("a/0", NOW))
    made = PositionSearch(CONFIG, Origin(own="a/0", established=before, seen=[NOW]), roster, RunPhase(), 0.0)
    assert made.best() == NOW
    assert [order.peer for order in made.moves(NOW)] == ["c/1", "d/1"]


def test_a_stage_whose_peers_moved_away_goes_on_from_what_a_newcomer_has() -> None:
    """They left their state behind: nobody waits for their word. The newcomer of stage 0 does not conduct."""
    before = {post: int(post[-1]) for post in ("a/0", "b/0", "c/1", "d/1")}

    def with_newcomer(*others: MemberHello) -> Position | None:
        roster = Roster(2)
        for one in (hello("new/0", START, saved=(NOW,)), hello("c/1", NOW, stage=1), *others):
            roster.enter(one)
        origin = Origin(own="other/0", established=before, seen=[NOW])
        return PositionSearch(CONFIG, origin, roster, RunPhase(), 0.0).best()

    moved = [hello(f"{peer}/1", START, stage=1, saved=(NOW,)) for peer in "ab"]
    assert with_newcomer() is None, "a and b may come back with something newer"
    assert with_newcomer(moved[0]) is None
    assert with_newcomer(*moved) == NOW
    assert with_newcomer(*moved, hello("b/0", OLD)) is None, "b serves the stage, too, and says otherwise"


def test_it_is_decided_after_quiet_time_and_once_more_where_nothing_was_found_before() -> None:
    made = search(hello("a", NOW))
    assert made.due(0.0) == 1.0
    assert not made.is_over(0.5)
    assert made.is_over(1.0)
    assert made.decide(1.0) is None
    assert "the conductor" not in made.problem()
    made._roster.enter(hello("c", NOW, stage=1))
    assert made.decide(1.5) is None, "others may have more to say"
    assert not made.is_over(2.0)
    assert made.problem() == "the conductor gathers the members"
    assert made.decide(2.5) == NOW


def test_an_older_position_is_looked_for_when_a_stage_has_long_lost_the_current_one() -> None:
    made = search(hello("a", NOW, saved=(OLD,)), hello("c", NOW, stage=1))
    stand(made, NOW)
    assert not made.falls_back(10.0)
    assert made.due(10.0) == math.inf
    made._roster.enter(hello("c", OLD, stage=1))
    assert not made.falls_back(10.0)
    assert made.due(10.0) == 13.0
    assert made.falls_back(13.0)
    made.begin(13.0)
    assert made.due(13.0) == math.inf


def test_it_is_lost_where_every_stage_has_members_and_no_position_in_common() -> None:
    made = search(hello("a", NOW), hello("c", START, stage=1))
    assert not made.look_lost(0.5)
    assert made.look_lost(1.0)
    assert made.lost
    assert not made.look_lost(1.5)
    made._roster.enter(hello("c", START, stage=1, saved=(NOW,)))
    assert made.look_lost(2.0)
    assert not made.lost


def test_a_step_that_is_only_heard_of_counts_for_a_while_and_a_keeper_always() -> None:
    made = search(hello("a"), hello("c", stage=1))
    assert made.best() == START
    made.announced_step = 9
    assert made.best() is None
    made.look(60.0)
    assert made.best() == START
    made.kept_step = 9
    assert made.best() is None


def test_a_position_is_apart_where_the_conductor_would_have_seen_it_had_it_been_the_swarms() -> None:
    """One that was away for many steps has an older position than any that the conductor remembers."""
    seen = [Position(step, b"ours") for step in range(100, 164)]
    made = PositionSearch(CONFIG, Origin(own="a", seen=seen), Roster(2), RunPhase(), 0.0)
    stand(made, Position(164, b"ours"))
    assert not made.is_apart(Position(50, b"ours"))
    assert not made.is_apart(seen[10])
    assert not made.is_apart(START)
    assert made.is_apart(Position(110, b"theirs"))
    assert made.is_apart(Position(170, b"theirs"))
    for step in range(165, 1000):
        made.arrived(Position(step, b"ours"))
    assert made.is_apart(Position(110, b"theirs")), "it still knows what it saw itself"


def test_a_member_is_ahead_when_enough_others_stand_behind_it() -> None:
    made = search(hello("a", NOW), hello("c", NOW, stage=1), own="a")
    for peer, stage in ("a", 0), ("b", 0), ("c", 1):
        made.established.add(peer, stage)
    stand(made, NOW)
    made._roster.enter(hello("b", NEXT))
    made._roster.enter(hello("liar", NEXT, stage=1))
    assert not made.is_ahead("b"), "one alone says so, and our own peer knows nothing of it"
    made._roster.remove("liar")
    made._roster.enter(hello("c", NOW, stage=1, seen=(NEXT,)))
    assert not made.is_ahead("b"), "the other stage cannot go there"
    made._roster.enter(hello("c", NEXT, stage=1))
    assert made.is_ahead("b")


def test_a_stranger_that_claims_to_be_ahead_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its hellos, of which it may send any number, would cost a look at what all members claim."""
    made = search(hello("a", NOW), hello("c", NOW, stage=1))
    made.established.add("a", 0)
    made.established.add("c", 1)
    stand(made, NOW)
    made._roster.enter(hello("liar", NEXT, stage=1))
    searched = list[object]()
    monkeypatch.setattr(position_search, "best_position", lambda *facts: searched.append(facts))
    assert not made.is_ahead("liar")
    assert searched == []


def fresh(made: PositionSearch) -> Position | None:
    """The best position, computed anew."""
    made._follows_from = ()
    return made.best()


CHANGES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([START, OLD, NOW, NEXT]), st.integers(0, 6)), max_size=40
)


@given(CHANGES)
def test_the_best_position_follows_every_change_of_what_is_known(changes: list[tuple[str, Position, int]]) -> None:
    made = search()
    roster = made._roster
    for peer, position, what in changes:
        there = peer in roster.entries
        match what:
            case 0 | 1:
                roster.enter(hello(peer, position, stage=ord(peer) % 2, prepared=NEXT if what else None))
            case 2 if there:
                roster.remove(peer)
            case 3 if there:
                roster.move(peer, position, stepped=False)
            case 4:
                roster.note_saved(peer, [position])
            case 5:
                made.established.add(peer, ord(peer) % 2)
            case _:
                made.kept_step = position.step
        found, wanted = made.best(), made.wanted()
        assert found == fresh(made)
        made._judged_from = ()
        assert wanted == made.wanted()
        assert found is None or found not in made.unproven()
        roster.check()


def test_judging_many_claims_looks_at_each_member_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers claim thousands of positions: each claim is not compared with each member, again and again."""
    looked_at = list[str]()
    saw = RosterEntry.saw.fget
    assert saw is not None

    def counted(entry: RosterEntry) -> set[Position]:
        looked_at.append(entry.digest.hex())
        return saw(entry)

    monkeypatch.setattr(RosterEntry, "saw", property(counted))
    claims = [tuple(Position(1000 * n + k, b"made up") for k in range(64)) for n in range(20)]
    made = search(*(hello(f"liar {n}", START, stage=n % 2, saved=claim) for n, claim in enumerate(claims)))
    made.established.add("a", 0)
    for _ in range(3):
        assert made.best() is not None
        assert made.wanted() == []
        assert len(made.unproven()) == 20 * 64
        assert made.unproven() is made.unproven()
        assert made.without_any_state() == [0, 1]
    assert len(looked_at) == 20
