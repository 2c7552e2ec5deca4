"""A conductor's forecast for all who ask: the batch, and then as long as averaging took in the steps before."""

from __future__ import annotations

import random

from peerd.core.messages.swarm import Done, Forecast, Position
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.conductor.step_watch import StepEta
from peerd.machine.positions.phases import Phase
from peerd.machine.swarm.events import (
    ConductorConfig,
    MemberGone,
    MoveEnded,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from tests.worlds.machines.conducting import hello

BATCH = 4
COMPUTING_S, AVERAGING_S = 5.0, 3.0


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
