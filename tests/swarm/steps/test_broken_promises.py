"""Members that say they can go somewhere, or stand there, and do not: a swarm goes on without them."""

from __future__ import annotations

import random

import pytest

from peerd.messages.swarm import Position
from peerd.swarm.events import ConductorConfig, MemberGone, MemberHello, MoveEnded, Origin, SendMove
from peerd.swarm.positions.phases import Phase
from peerd.swarm.roster import START
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

OLDER, OLD, NOW = Position(2, b"older"), Position(6, b"old"), Position(7, b"now")
CONFIG = ConductorConfig(
    stages=2,
    microbatches=1,
    first_save=2,
    gather_s=1.0,
    expect_s=2.0,
    broken_s=3.0,
    hearsay_s=60.0,
    forsake_s=3.0,
    forsake_unseen_s=20.0,
    forsake_most_s=600.0,
)


def carry_out(
    conductor: Conductor, until: float, *, keeps: set[str], says: MemberHello | None = None, hangs_up: bool = False
) -> float:
    """Time passes; members do as they are ordered but for those not in `keeps`, and one says hello again and again.

    Those do not get there, or hang up.

    Returns when all stages stand at one position, by members that keep their word.
    """
    now = 3.0
    while now < until:
        now += 0.5
        if says is not None and says.peer not in conductor.roster.entries:
            conductor.handle(now, says)
        for order in [order for order in conductor.wake(now) if isinstance(order, SendMove)]:
            if hangs_up and order.peer not in keeps:
                conductor.handle(now, MemberGone(order.peer))
            conductor.handle(now, MoveEnded(order.peer, order.target if order.peer in keeps else None))
        there = {entry.stage for post, entry in conductor.roster.entries.items() if post in keeps}
        there &= {stage for stage in (0, 1) for post in conductor.roster.at(stage, conductor.current) if post in keeps}
        if conductor.phase is Phase.OPEN and there == {0, 1}:
            return now
    pytest.fail(f"nothing to go on from: {conductor.waits_for()}")


@pytest.mark.parametrize(
    "says",
    [
        hello("x/1", START, stage=1, saved=(NOW,)),
        hello("x/1", START, stage=1, prepared=NOW, digest=b"x"),
    ],
)
def test_a_stranger_that_says_it_has_what_a_stage_lost_does_not_hold_the_swarm_up(says: MemberHello) -> None:
    before = {"a/0": 0, "b/0": 0, "e/1": 1, "f/1": 1}
    conductor = Conductor(CONFIG, random.Random(0), 0.0, Origin(own="a/0", established=before, seen=[OLDER, NOW]))
    for post in ("a/0", "b/0"):
        conductor.handle(0.0, hello(post, NOW, saved=(OLDER,)))
    conductor.handle(0.0, hello("e/1", NOW, stage=1, saved=(OLDER,)))
    conductor.handle(0.0, hello("f/1", OLDER, stage=1, saved=(OLDER,)))
    conductor.wake(2.0)
    assert conductor.current == NOW
    conductor.handle(3.0, MemberGone("e/1"))
    assert carry_out(conductor, 30.0, keeps={"a/0", "b/0", "f/1"}, says=says) < 20.0
    assert conductor.current == OLDER


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_known_member_that_never_gets_where_it_says_it_can_go_is_not_waited_for_for_ever(hangs_up: bool) -> None:
    before = {"a/0": 0, "b/0": 0, "z/1": 1}
    conductor = Conductor(CONFIG, random.Random(0), 0.0, Origin(own="a/0", established=before, seen=[OLDER, OLD]))
    for post in ("a/0", "b/0"):
        conductor.handle(0.0, hello(post, OLD, saved=(OLDER,)))
    conductor.handle(0.0, hello("n/1", OLDER, stage=1, saved=(OLDER,)))
    conductor.search.keepers({"k": [OLDER], "l": [OLDER]}, lambda peer: f"network of {peer}")
    liar = hello("z/1", START, stage=1, saved=(OLD,))
    assert carry_out(conductor, 120.0, keeps={"a/0", "b/0", "n/1"}, says=liar, hangs_up=hangs_up) < 60.0
    assert conductor.current == OLDER


def test_a_newcomer_that_was_given_the_state_by_a_member_that_died_carries_on() -> None:
    before = {"a/0": 0, "e/1": 1}
    conductor = Conductor(CONFIG, random.Random(0), 0.0, Origin(own="a/0", established=before, seen=[OLDER, NOW]))
    conductor.handle(0.0, hello("a/0", NOW, saved=(OLDER,)))
    conductor.handle(0.0, hello("e/1", NOW, stage=1, saved=(OLDER,)))
    conductor.wake(2.0)
    conductor.handle(2.5, hello("n/1", NOW, stage=1))
    conductor.handle(3.0, MemberGone("e/1"))
    carry_out(conductor, 30.0, keeps={"a/0", "n/1"})
    conductor.wake(60.0)
    assert (conductor.phase, conductor.current) == (Phase.OPEN, NOW)


def test_the_others_are_waited_for_before_few_make_a_step_that_was_perhaps_not_made() -> None:
    """The only one of stage 1 here may have been sent another sum than those that are cut off."""
    before = {"a/0": 0, "b/0": 0, "v/1": 1, "d/1": 1, "e/1": 1, "z/2": 2, "y/2": 2}

    def gather() -> Conductor:
        config = ConductorConfig(stages=3, microbatches=1, first_save=2, gather_s=1.0, expect_s=2.0, hearsay_s=60.0)
        made = Conductor(config, random.Random(0), 0.0, Origin(own="a/0", established=before, seen=[OLDER, OLD]))
        for post in ("a/0", "b/0"):
            made.handle(0.0, hello(post, OLD, prepared=NOW, digest=b"0", saved=(OLDER,)))
        made.handle(0.0, hello("v/1", OLD, stage=1, prepared=NOW, digest=b"poisoned", saved=(OLDER,)))
        made.handle(0.0, hello("z/2", NOW, stage=2, digest=b"2", saved=(OLDER,)))
        return made

    conductor = gather()
    assert not any(isinstance(order, SendMove) for order in conductor.wake(10.5))
    assert "less than half of a stage's members confirm step 7" in conductor.waits_for()
    assert conductor.wake_at(10.5) <= 71.0
    found = list[object]()
    for post in ("d/1", "e/1"):
        found += conductor.handle(20.0, hello(post, OLD, stage=1, prepared=NOW, digest=b"sum", saved=(OLDER,)))
    found += [*conductor.wake(21.5), *conductor.wake(30.0)]
    orders = [order for order in found if isinstance(order, SendMove)]
    assert {order.target for order in orders} == {NOW}
    assert {order.peer for order in orders if order.commit} == {"a/0", "b/0", "d/1", "e/1"}, "the sum of most is right"

    alone = gather()
    alone.wake(10.5)
    orders = [order for order in alone.wake(71.0) if isinstance(order, SendMove)]
    assert {(order.peer, order.commit) for order in orders} == {("a/0", True), ("b/0", True), ("v/1", True)}


def test_a_member_whose_disk_is_slow_is_tried_again_and_the_run_does_not_begin_anew() -> None:
    before = {"a/0": 0, "e/1": 1}
    conductor = Conductor(CONFIG, random.Random(0), 0.0, Origin(own="a/0", established=before, seen=[OLD]))
    slow = hello("e/1", START, stage=1, saved=(OLD,))
    now, tries = 0.0, 0
    conductor.handle(now, hello("a/0", OLD))
    while not conductor.roster.at(1, OLD):
        now += 0.5
        assert now < 200.0, conductor.waits_for()
        if "e/1" not in conductor.roster.entries:
            conductor.handle(now, slow)
        for order in [order for order in conductor.wake(now) if isinstance(order, SendMove)]:
            tries += 1
            assert order.target == OLD
            conductor.handle(now, MoveEnded(order.peer, order.target if tries > 6 else None, slow=tries <= 6))
    assert (conductor.current, tries) == (OLD, 7)


def test_nobody_becomes_one_of_the_run_by_going_where_it_is_ordered_to() -> None:
    """Its word would count from then on; the digest of a sum is no secret."""
    before = {"a/0": 0, "e/1": 1}
    conductor = Conductor(CONFIG, random.Random(0), 0.0, Origin(own="a/0", established=before, seen=[NOW]))
    conductor.handle(0.0, hello("a/0", NOW, digest=b"sum"))
    conductor.handle(0.0, hello("e/1", NOW, stage=1, digest=b"sum"))
    for number in range(4):
        conductor.handle(0.0, hello(f"x{number}/1", OLD, stage=1, prepared=NOW, digest=b"sum"))
    carry_out(conductor, 10.0, keeps={"a/0", "e/1", "x0/1", "x1/1", "x2/1", "x3/1"})
    assert conductor.search.established.peers == {"a", "e"}


def test_strangers_settle_nothing_where_no_member_of_a_stage_is_known() -> None:
    conductor = Conductor(CONFIG, random.Random(0), 0.0, Origin(own="a/0"))
    conductor.handle(0.0, hello("a/0", START, prepared=NOW, digest=b"0"))
    told = [("h1/1", b"sum"), ("h2/1", b"sum"), *((f"x{number}/1", b"made up") for number in range(3))]
    for post, digest in told:
        conductor.handle(0.0, hello(post, START, stage=1, prepared=NOW, digest=digest))
    assert not any(isinstance(order, SendMove) and order.target == NOW for order in conductor.wake(70.0))
