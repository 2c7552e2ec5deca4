"""Members that do not say that they made a step which others have made: a measured wait, and then without them."""

from __future__ import annotations

import random

from peerd.core.messages.swarm import Done
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.positions.phases import Phase
from peerd.machine.swarm.events import ConductorConfig, MoveEnded, PrepareEnded, SendMove, SendPrepare, TrainerReport
from peerd.machine.swarm.latecomers import LateMovers
from tests.worlds.machines.conducting import hello

MEMBERS = {"a": 0, "b": 0, "c": 1, "d": 1}


def at_commit() -> tuple[Conductor, list[SendMove]]:
    """Two stages of two members that have averaged: they are ordered to make the step at 2 s."""
    conductor = Conductor(ConductorConfig(stages=2, microbatches=1, gather_s=1.0), random.Random(1), 0.0)
    for peer, stage in MEMBERS.items():
        conductor.handle(0.0, hello(peer, stage=stage))
    conductor.wake(2.0)
    conductor.handle(2.0, TrainerReport("t", 0, (1,), ()))
    out = conductor.handle(2.0, TrainerReport("t", 0, (), (Done(1, ["a", "c"]),)))
    moves = []
    for order in [one for one in out if isinstance(one, SendPrepare)]:
        told = conductor.handle(2.0, PrepareEnded(order.peer, order.attempt, True))
        moves += [one for one in told if isinstance(one, SendMove)]
    assert conductor.phase is Phase.MOVING
    return conductor, moves


def test_a_stopped_member_holds_a_step_that_others_made_up_for_a_moment() -> None:
    conductor, moves = at_commit()
    for move in moves:
        if move.peer != "d":
            conductor.handle(2.1, MoveEnded(move.peer, move.target))
    assert conductor.wake_at(2.1) <= 4.0
    conductor.wake(3.9)
    assert conductor.phase is Phase.MOVING
    conductor.wake(4.0)
    assert conductor.phase is Phase.OPEN
    assert conductor.current == moves[0].target
    assert [member.peer for member in conductor.members()] == ["a", "b", "c"]
    conductor.handle(5.0, MoveEnded("d", moves[0].target))
    conductor.handle(5.0, hello("d", moves[0].target, stage=1))
    assert [member.peer for member in conductor.members() if member.ready] == ["a", "b", "c", "d"]


def test_the_only_member_of_a_stage_is_waited_for() -> None:
    conductor, moves = at_commit()
    for move in moves:
        if move.peer in "ab":
            conductor.handle(2.1, MoveEnded(move.peer, move.target))
    conductor.wake(60.0)
    assert conductor.phase is Phase.MOVING


def test_slow_devices_have_the_time_that_they_took_before() -> None:
    movers = LateMovers()
    movers.begin(0.0, MEMBERS.items())
    for peer, at in zip("acbd", (1.0, 1.0, 1.5, 30.0), strict=True):
        movers.arrived(at, peer)
    movers.begin(100.0, MEMBERS.items())
    assert movers.late(200.0, MEMBERS) == [], "nobody has arrived"
    for peer in "ac":
        movers.arrived(101.0, peer)
    assert movers.due("bd") == 104.5
    assert movers.late(104.5, "bd") == ["b"]
    assert movers.late(189.0, "d") == []
    assert movers.late(190.0, "d") == ["d"]
