"""The wait for latecomers: who is waited for, how long, and how often.
Members that do not say that they made a step which others have made: a measured wait, and then without them.
"""

from __future__ import annotations

import random

from peerd.messages.swarm import Done, Position
from peerd.swarm.events import ConductorConfig, MoveEnded, Output, PrepareEnded, SendMove, SendPrepare, TrainerReport
from peerd.swarm.latecomers import Latecomers, LateMovers
from peerd.swarm.positions.phases import Phase
from peerd.swarm.roster import Roster
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

STEP_S = 1.0

MEMBERS = {"a": 0, "b": 0, "c": 1, "d": 1}


def at(step: int) -> Position:
    return Position(step, b"here" if step else b"")


class Waits:
    """Steps of a second each, with members that say where they stand."""

    def __init__(self) -> None:
        self.roster = Roster(1, delayed=True)
        self.late = Latecomers(self.roster)
        self.now, self.step = 0.0, 0

    def make(self, **stands: int) -> bool:
        """Make a step, with members that stand at these steps then; True: one of them is waited for."""
        self.now += STEP_S
        self.step += 1
        for peer, step in stands.items():
            self.roster.enter(hello(peer, at(step)))
        self.late.arrived(self.now, at(self.step))
        return self.awaits()

    def awaits(self, later_s: float = 0.0) -> bool:
        return self.late.awaits(self.now + later_s, 0, at(self.step))


def test_who_comes_closer_is_waited_for_until_it_is_there() -> None:
    waits = Waits()
    assert not waits.make(new=0)
    assert waits.make(new=1)
    assert waits.awaits(later_s=STEP_S / 2)
    waits.roster.enter(hello("new", at(waits.step)))
    assert not waits.awaits(later_s=STEP_S / 2)


def test_one_step_behind_no_longer_than_the_last_step_took() -> None:
    waits = Waits()
    waits.make(new=0)
    assert waits.make(new=1)
    assert waits.late.due(waits.now) == waits.now + STEP_S
    assert not waits.awaits(later_s=STEP_S)
    assert waits.late.due(waits.now + STEP_S) is None


def test_one_that_is_some_steps_behind_has_the_time_of_these_steps_and_of_four_at_most() -> None:
    for behind, waited in ((1, 1), (2, 2), (3, 3), (9, 4)):
        waits = Waits()
        for _ in range(10):
            waits.make(new=0)
        assert waits.make(new=11 - behind)
        assert waits.late.due(waits.now) == waits.now + waited * STEP_S
        assert not waits.awaits(later_s=waited * STEP_S)


def test_who_stands_still_or_goes_is_not_waited_for() -> None:
    waits = Waits()
    waits.make(still=0, goes=0)
    assert not waits.make(still=0)
    assert waits.make(goes=1)
    waits.roster.remove("goes")
    assert not waits.awaits()


def test_one_that_never_arrives_is_waited_for_ever_more_rarely() -> None:
    waits = Waits()
    waited = [waits.step for _ in range(64) if waits.make(liar=waits.step)]
    assert waited == [2, 3, 5, 9, 17, 33]


class Swarm:
    """A delayed run of one stage, whose next batch is always whole when a step is made; `late` follows it."""

    def __init__(self) -> None:
        self.now, self.seq = 0.0, 0
        config = ConductorConfig(stages=1, microbatches=1, delayed=True)
        self.conductor = Conductor(config, random.Random(1), 0.0)
        self.orders: list[Output] = []
        self._carry_out(self.conductor.handle(0.0, hello("old")))
        self.now = 2.0
        self._carry_out(self.conductor.wake(self.now))
        self.fill()

    @property
    def current(self) -> Position:
        assert self.conductor.current is not None
        return self.conductor.current

    def fill(self, *, early: bool = False) -> None:
        """Bring the microbatch that the batch under way wants; `early`: the one after it."""
        step, (seq, ahead) = self.current.step, (self.seq, (self.seq,) if early else ())
        self._carry_out(self.conductor.handle(self.now, TrainerReport("t", step, (seq,), (), ahead)))
        done = (Done(seq, ["old"]),)
        self._carry_out(self.conductor.handle(self.now, TrainerReport("t", step, (), done, ahead)))
        self.seq += 1

    def _carry_out(self, outputs: list[Output]) -> None:
        self.orders += outputs

    def group(self) -> set[str]:
        return {order.peer for order in self.orders if isinstance(order, SendPrepare)}

    def average(self) -> None:
        """All that are averaging have the mean a second later, and commit."""
        self.now += STEP_S
        prepared = [order for order in self.orders if isinstance(order, SendPrepare)]
        self.orders = []
        for order in prepared:
            ended = PrepareEnded(order.peer, order.attempt, True, digest=b"same")
            self._carry_out(self.conductor.handle(self.now, ended))
        for move in [order for order in self.orders if isinstance(order, SendMove)]:
            self._carry_out(self.conductor.handle(self.now, MoveEnded(move.peer, move.target)))

    def say(self, position: Position) -> None:
        """The latecomer says where it stands."""
        self._carry_out(self.conductor.handle(self.now, hello("late", position)))


def test_a_newcomer_takes_part_though_every_batch_is_whole_when_the_step_before_is_made() -> None:
    swarm = Swarm()
    swarm.say(at(0))
    for _ in range(3):
        swarm.fill(early=True)
        swarm.average()
        assert swarm.conductor.phase is Phase.CLOSING
        swarm.now += STEP_S / 2  # the newcomer fetches the step's total, and makes the step
        swarm.say(swarm.current)
        if swarm.group() == {"old", "late"}:
            return
    raise AssertionError("it never took part")


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
