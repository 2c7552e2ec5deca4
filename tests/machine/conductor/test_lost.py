"""A conductor whose members cannot go on with what they have says so, and goes on when they have found more."""

from __future__ import annotations

import random

from peerd.core.messages.swarm import Position
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.conductor.phases import Phase
from peerd.machine.swarm.events import ConductorConfig, MemberGone, MemberHello, MoveEnded, SendMove
from peerd.machine.swarm.roster import START
from tests.kit.conducting import hello

KEPT = Position(50, b"kept")


def conductor(announced: int) -> Conductor:
    made = Conductor(ConductorConfig(stages=2, microbatches=4, first_save=10), random.Random(1), 0.0)
    made.search.announced_step = announced
    return made


def at_stage(peer: str, position: Position = START, saved: tuple[Position, ...] = ()) -> MemberHello:
    return hello(peer, position, stage=int(peer[0]), saved=saved)


def test_fresh_members_of_a_run_that_somebody_keeps_are_lost_until_they_have_it() -> None:
    made = conductor(announced=50)
    made.handle(0.0, at_stage("0a"))
    made.wake(3.0)
    assert not made.lost  # of the other stage there is nobody yet, who may have what is missing
    made.handle(3.0, at_stage("1a"))
    assert not made.lost
    made.wake(5.0)
    assert made.lost
    assert made.current is None
    assert "no position that every stage can reach" in made.waits_for()
    made.handle(6.0, at_stage("0a", saved=(KEPT,)))
    made.handle(6.0, at_stage("1a", saved=(KEPT,)))
    moves = [order for order in made.wake(8.0) if isinstance(order, SendMove)]
    assert [(move.peer, move.target, move.commit) for move in moves] == [("0a", KEPT, False), ("1a", KEPT, False)]
    assert not made.lost
    for move in moves:
        made.handle(8.5, MoveEnded(move.peer, KEPT))
    assert (made.phase, made.current, made.lost) == (Phase.OPEN, KEPT, False)


def test_without_anything_kept_fresh_members_begin_at_the_start() -> None:
    made = conductor(announced=9)
    made.handle(0.0, at_stage("0a"))
    made.handle(0.0, at_stage("1a"))
    made.wake(2.0)
    assert (made.current, made.lost) == (START, False)


def test_a_stage_that_comes_back_with_nothing_is_lost_after_a_while() -> None:
    made, here = conductor(announced=60), Position(60, b"now")
    for peer in ("0a", "1a"):
        made.handle(0.0, at_stage(peer, here, saved=(here,)))
    made.wake(2.0)
    assert made.current == here
    made.handle(3.0, MemberGone("1a"))
    made.handle(3.5, at_stage("1b"))
    assert not made.lost
    made.wake(7.9)
    assert made.lost
    assert made.wake_at(7.9) > 8.0  # it does not look again and again meanwhile
    version = made.members_version
    made.handle(9.0, at_stage("1b", saved=(KEPT,)))
    assert made.lost
    made.handle(9.0, at_stage("0a", here, saved=(here, KEPT)))
    assert made.phase is Phase.GATHERING
    assert made.members_version > version
    made.wake(11.0)
    assert not made.lost
