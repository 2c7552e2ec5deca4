"""A conductor's forecast for all who ask: the batch, and then as long as averaging took in the steps before.
Text on what a stalled step waits for, once nothing has moved for a while.
"""

from __future__ import annotations

import random

from peerd.messages.swarm import Done, Forecast, Position
from peerd.swarm.events import (
    ConductorConfig,
    MemberGone,
    MemberHello,
    MoveEnded,
    Origin,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps.conductor import Conductor
from peerd.swarm.steps.step_watch import Standstill, StepEta, named
from tests.worlds.machines.conducting import hello

BATCH = 4
COMPUTING_S, AVERAGING_S = 5.0, 3.0

START = Position(0, b"")


class One:
    """A conductor with one member and one trainer: a microbatch takes 5 s, averaging 3 s."""

    def __init__(self) -> None:
        self.now, self.seq = 0.0, 0
        self.conductor = Conductor(ConductorConfig(stages=1, microbatches=BATCH), random.Random(1), 0.0)
        self.outlook = StepEta()
        self.conductor.handle(0.0, hello("m"))
        self.now = 2.0
        self._carry_out(self.conductor.wake(self.now))

    def look(self) -> Forecast | None:
        return self.outlook.look(self.now, self.conductor)

    def _carry_out(self, outputs: list[Output]) -> None:
        self.outputs = outputs
        self.look()

    def report(self, done: list[Done]) -> None:
        assert self.conductor.current is not None
        step = self.conductor.current.step
        self._carry_out(self.conductor.handle(self.now, TrainerReport("t", step, (self.seq,), tuple(done))))

    def compute(self) -> None:
        self.report([])
        self.now += COMPUTING_S
        done = Done(self.seq, ["m"])
        self.seq += 1
        self.report([done])

    def average(self) -> None:
        (prepare,) = [order for order in self.outputs if isinstance(order, SendPrepare)]
        self.now += AVERAGING_S
        self._carry_out(self.conductor.handle(self.now, PrepareEnded("m", prepare.attempt, True)))
        (move,) = [order for order in self.outputs if isinstance(order, SendMove)]
        self._carry_out(self.conductor.handle(self.now, MoveEnded("m", move.target)))


def test_a_step_is_foretold_with_the_averaging_after_it() -> None:
    one = One()
    assert one.conductor.current == Position(0, b"")
    assert one.look() is None  # nobody has computed anything yet
    one.compute()
    one.report([])
    assert one.look() == Forecast(15.0, 15.0)  # how long averaging takes was never seen
    for _ in range(BATCH - 1):
        one.compute()
    assert one.look() == Forecast(0.0, 0.0)
    one.average()
    one.report([])
    assert one.look() == Forecast(20.0, 23.0)
    one.now += 0.1  # kept, and counted down
    assert one.look() == Forecast(19.9, 22.9)
    one.now -= 0.1
    for _ in range(BATCH):
        one.compute()
    one.now += 1.0
    assert one.look() == Forecast(0.0, 2.0)
    assert one.conductor.phase is Phase.CLOSING
    one.now += 5.0
    assert one.look() == Forecast(0.0, 0.0)  # late: any moment


def test_nothing_is_foretold_while_something_else_is_waited_for() -> None:
    one = One()
    one.compute()
    assert one.look() is not None
    one.conductor.handle(one.now, MemberGone("m"))
    assert one.look() is None


def opened() -> Conductor:
    """One stage of two members, two microbatches, of which the trainer has begun one."""
    made = Conductor(ConductorConfig(stages=1, microbatches=2), random.Random(1), 0.0)
    for peer in ("member-one", "member-two"):
        made.handle(0.0, MemberHello(peer, 0, 1, START, None, (), frozenset(), frozenset(), ()))
    made.wake(10.0)
    assert made.phase is Phase.OPEN
    made.handle(10.0, TrainerReport("the-trainer", 0, (1,), ()))
    return made


def test_what_a_trainer_began_and_does_not_finish_is_waited_for_by_its_name() -> None:
    made, still = opened(), Standstill()
    assert still.look(10.0, made) == ""
    assert still.look(19.0, made) == ""
    assert still.look(20.0, made) == "1 microbatches that …-trainer began"
    made.handle(21.0, TrainerReport("the-trainer", 0, (), (Done(1, ["member-one"]),)))
    assert still.look(21.0, made) == ""
    assert still.look(31.0, made) == "trainers to begin microbatches: 1 of 2 are there"


def test_who_does_not_average_is_waited_for_by_its_name() -> None:
    made, still = opened(), Standstill()
    made.handle(11.0, TrainerReport("the-trainer", 0, (2,), (Done(1, ["member-one"]),)))
    out = made.handle(12.0, TrainerReport("the-trainer", 0, (), (Done(2, ["member-one"]),)))
    assert [one.peer for one in out if isinstance(one, SendPrepare)] == ["member-one", "member-two"]
    still.look(12.0, made)
    assert still.look(22.0, made) == "…mber-one, …mber-two to average"


def test_many_names_are_counted() -> None:
    assert named(f"peer-number-{n}" for n in range(7)) == "…number-0, …number-1, …number-2, …number-3 and 3 others"


def test_a_stage_that_newcomers_alone_serve_is_named() -> None:
    """They may do nothing, while a trainer waits for them and is named for it."""
    now = Position(3, b"now")
    origin = Origin(own="a/0", established={"a/0": 0, "e/1": 1}, seen=[now])
    made, still = Conductor(ConductorConfig(stages=2, microbatches=1), random.Random(1), 0.0, origin), Standstill()
    for post in ("a/0", "e/1", "new/1"):
        made.handle(0.0, MemberHello(post, int(post[-1]), 1, now, None, (), frozenset(), frozenset(), ()))
    made.wake(10.0)
    made.handle(10.0, TrainerReport("the-trainer", 3, (1,), ()))
    still.look(10.0, made)
    assert still.look(20.0, made) == "1 microbatches that …-trainer began"
    made.handle(21.0, MemberGone("e/1"))
    told = "1 microbatches that …-trainer began; stage 1 has only …new, which has not helped to make a step yet"
    assert still.look(31.0, made) == told
