"""Newcomers on probation: what identities that cost nothing may spoil, and for how long."""

from __future__ import annotations

import random

from peerd.messages.swarm import Done, Mb, Position, Receipt
from peerd.swarm.batch.batches import Batches, StageView
from peerd.swarm.batch.probation import Probation
from peerd.swarm.events import (
    ConductorConfig,
    MemberGone,
    MoveEnded,
    Note,
    Origin,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from peerd.swarm.reader_versions import ReaderVersions
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

GENUINE = b"signed"


def place(peer: str) -> str:
    """`honest 1@home` is at home."""
    return peer.rpartition("@")[2]


def test_an_identity_waits_longer_each_time_and_others_of_its_place_do_not() -> None:
    some = Probation(place)
    assert [some.failed(0.0, "a@there") for _ in range(2)] == [15.0, 30.0]
    assert some.waits(29.0, "a@there")
    assert not some.waits(31.0, "a@there")
    assert not some.waits(1.0, "b@there")


def test_an_identity_of_which_nothing_is_proven_waits_no_longer_than_the_next_steps() -> None:
    some = Probation(place)
    some.failed(0.0, "a@there")
    assert some.waits(1.0, "a@there")
    some.step_made()
    assert not some.waits(1.0, "a@there")
    some.failed(2.0, "a@there", proven=True)
    some.step_made()
    some.step_made()
    assert some.waits(3.0, "a@there")


def test_all_newcomers_of_a_place_wait_after_proven_faults_of_several() -> None:
    some = Probation(place)
    some.failed(0.0, "a@there", proven=True)
    some.failed(1.0, "a@there", proven=True)
    assert not some.waits(1.0, "d@there"), "it was one identity"
    some.failed(2.0, "b@there", proven=True)
    for _ in range(8):
        some.step_made()
    assert some.waits(16.0, "d@there")
    assert not some.waits(18.0, "d@there")
    assert not some.waits(3.0, "d@elsewhere")
    some.failed(18.0, "c@there", proven=True)
    assert some.waits(47.0, "d@there"), "twice as long"


def test_newcomers_of_a_place_where_several_failed_are_let_in_one_at_a_time() -> None:
    some = Probation(place)
    for name in "abc":
        some.failed(0.0, f"{name}@there")
    assert some.waits(1.0, "d@there")
    some.step_made()
    assert not some.waits(1.0, "d@there")
    some.let_in(1.0, "d@there")
    assert some.waits(2.0, "e@there"), "d is on trial"
    some.step_made()
    some.failed(3.0, "e@there")
    some.step_made()
    assert some.waits(4.0, "f@there"), "two steps for the next one"
    some.step_made()
    assert not some.waits(4.0, "f@there")


def test_newcomers_that_help_make_up_for_those_that_failed() -> None:
    some = Probation(place)
    for name in "abcd":
        some.failed(0.0, f"{name}@there")
    for name in "efg":
        some.helped(f"{name}@there")
    some.let_in(20.0, "h@there")
    assert not some.waits(20.0, "i@there")


def test_what_a_place_did_is_forgotten_with_time() -> None:
    some = Probation(place)
    for name in "abcd":
        some.failed(0.0, f"{name}@there")
    assert some.times(0.0, "e@there") == (0, 4)
    assert some.times(3600.0, "e@there") == (0, 2)
    assert some.failed(4 * 3600.0, "e@there") == 15.0


def test_no_place_waits_for_ever() -> None:
    some = Probation(place)
    for number in range(50):
        some.failed(float(number), f"{number}@there", proven=True)
    assert some.waits(49.0 + 599.0, "z@there")
    assert not some.waits(49.0 + 601.0, "z@there")


class Swarm:
    """One stage whose members a, b and c have made a step with trainers t and u."""

    def __init__(self) -> None:
        origin = Origin(own="a@home", verify=lambda *told: told[-1].signature == GENUINE, place_of=place)
        config = ConductorConfig(stages=1, microbatches=2, gather_s=1.0)
        self.conductor = Conductor(config, random.Random(1), 0.0, origin)
        self.now = 0.0
        self.outputs: list[Output] = []
        for name in "abc":
            self.tell(hello(f"{name}@home"))
        self.pass_s(2.0)
        self.step()

    def tell(self, event: object) -> None:
        self.outputs += self.conductor.handle(self.now, event)  # type: ignore[arg-type]

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self.outputs += self.conductor.wake(self.now)

    @property
    def position(self) -> Position:
        assert self.conductor.current is not None
        return self.conductor.current

    def fill(self) -> None:
        """Trainers t and u wish for one microbatch each, and do it."""
        step = self.position.step
        for trainer in "t@home", "u@home":
            self.tell(TrainerReport(trainer, step, (step,), ()))
        for trainer in "t@home", "u@home":
            done = Done(step, ["a@home"], [Receipt(1, GENUINE)])
            self.tell(TrainerReport(trainer, step, (), (done,)))

    def orders(self) -> list[SendPrepare]:
        found = [output for output in self.outputs if isinstance(output, SendPrepare)]
        return [order for order in found if order.attempt == found[-1].attempt] if found else []

    def step(self) -> None:
        """All average, and step."""
        self.fill()
        for order in self.orders():
            self.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"same"))
        for move in [output for output in self.outputs if isinstance(output, SendMove)]:
            self.tell(MoveEnded(move.peer, move.target))
        self.outputs.clear()

    def here(self) -> set[str]:
        return {member.peer for member in self.conductor.members()}

    def notes(self) -> list[str]:
        return [output.text for output in self.outputs if isinstance(output, Note)]


def test_newcomers_that_accuse_together_are_let_go_and_nobody_else_is() -> None:
    swarm = Swarm()
    liars = [f"{number}@there" for number in range(5)]
    for liar in liars:
        swarm.tell(hello(liar, swarm.position))
    swarm.fill()
    orders = swarm.orders()
    assert {order.peer for order in orders} == {"a@home", "b@home", "c@home", *liars}
    for liar in liars:
        swarm.tell(PrepareEnded(liar, orders[0].attempt, False, lost=("b@home", "c@home")))
        swarm.pass_s(1.0)
        orders = swarm.orders()
    assert {"a@home", "b@home", "c@home"} <= swarm.here()
    swarm.tell(hello("next@there", swarm.position))
    assert "next@there" not in swarm.here(), "their place waits"
    swarm.tell(hello("friend@elsewhere", swarm.position))
    assert "friend@elsewhere" in swarm.here()


def test_an_attempt_that_newcomers_spoil_is_made_again_without_them() -> None:
    swarm = Swarm()
    swarm.tell(hello("liar@there", swarm.position))
    swarm.fill()
    swarm.tell(PrepareEnded("liar@there", swarm.orders()[0].attempt, False, missing=(Mb("t@home", 99),)))
    swarm.pass_s(1.0)
    assert {order.peer for order in swarm.orders()} == {"a@home", "b@home", "c@home"}
    assert swarm.here() == {"a@home", "b@home", "c@home"}


def test_a_newcomer_that_those_who_helped_could_not_reach_is_let_go_alone() -> None:
    swarm = Swarm()
    swarm.tell(hello("silent@there", swarm.position))
    swarm.fill()
    swarm.tell(PrepareEnded("a@home", swarm.orders()[0].attempt, False, lost=("silent@there",)))
    assert swarm.here() == {"a@home", "b@home", "c@home"}


def test_newcomers_that_were_killed_or_slow_keep_no_other_of_their_address_out() -> None:
    swarm = Swarm()
    for number in range(6):
        slow, honest = f"slow {number}@there", f"honest {number}@there"
        swarm.tell(hello(slow, swarm.position))
        assert slow in swarm.here()
        swarm.fill()
        for order in swarm.orders():
            if order.peer != slow:
                swarm.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"same"))
        swarm.pass_s(11.0)
        assert slow not in swarm.here(), "it does not say that it averaged"
        for move in [output for output in swarm.outputs if isinstance(output, SendMove)]:
            swarm.tell(MoveEnded(move.peer, move.target))
        swarm.outputs.clear()
        swarm.tell(hello(honest, swarm.position))
        assert honest in swarm.here(), "it has done nothing"
        swarm.step()


def test_any_number_of_identities_of_one_address_spoil_one_attempt_in_some_steps() -> None:
    swarm = Swarm()
    spoiled = []
    for step in range(40):
        for number in range(3):
            swarm.tell(hello(f"liar {step} {number}@there", swarm.position))
        swarm.fill()
        liars = sorted(swarm.here() - {"a@home", "b@home", "c@home"})
        spoiled.append(len(liars))
        for liar in liars:
            swarm.tell(PrepareEnded(liar, swarm.orders()[0].attempt, False))
            swarm.pass_s(6.0)
        for order in swarm.orders():
            swarm.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"same"))
        for move in [output for output in swarm.outputs if isinstance(output, SendMove)]:
            swarm.tell(MoveEnded(move.peer, move.target))
        swarm.outputs.clear()
    assert swarm.position.step == 41
    assert max(spoiled[2:]) <= 1
    assert sum(spoiled) < 15


def test_a_member_that_follows_another_conductor_for_a_moment_is_back_with_the_next_step() -> None:
    swarm = Swarm()
    for _ in range(5):
        swarm.fill()
        for _ in range(3):
            for order in [order for order in swarm.orders() if order.peer == "c@home"]:
                swarm.tell(PrepareEnded("c@home", order.attempt, False, declines=True))
            swarm.tell(hello("c@home", swarm.position))
            swarm.pass_s(6.0)
        assert swarm.here() == {"a@home", "b@home"}, "it spoils one attempt"
        for order in swarm.orders():
            swarm.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"same"))
        for move in [output for output in swarm.outputs if isinstance(output, SendMove)]:
            swarm.tell(MoveEnded(move.peer, move.target))
        assert not any("put aside" in note for note in swarm.notes())
        swarm.outputs.clear()
        swarm.tell(hello("c@home", swarm.position))
        assert "c@home" in swarm.here()
        swarm.step()


def test_the_only_member_of_a_stage_that_declines_an_order_may_return_at_once() -> None:
    swarm = Swarm()
    for peer in "bc":
        swarm.tell(MemberGone(f"{peer}@home"))
    swarm.fill()
    swarm.tell(PrepareEnded("a@home", swarm.orders()[0].attempt, False, declines=True))
    assert swarm.here() == set()
    swarm.tell(hello("a@home", swarm.position))
    assert swarm.here() == {"a@home"}


def test_a_newcomer_that_is_not_let_in_hears_why() -> None:
    swarm = Swarm()
    for number in range(4):
        swarm.tell(hello(f"liar {number}@there", swarm.position))
    swarm.fill()
    for number in range(4):
        swarm.tell(PrepareEnded(f"liar {number}@there", swarm.orders()[0].attempt, False))
        swarm.pass_s(6.0)
    swarm.tell(hello("next@there", swarm.position))
    assert "next@there" not in swarm.here()
    assert "are let in one at a time" in swarm.conductor.keeps_out(swarm.now, "next@there")
    assert "sits out" in swarm.conductor.keeps_out(swarm.now, "liar 3@there")
    assert swarm.conductor.keeps_out(swarm.now, "a@home") == ""
    assert swarm.conductor.keeps_out(swarm.now, "friend@elsewhere") == ""


def test_a_trainer_that_gets_nothing_hears_why_and_one_that_has_helped_is_not_held_back() -> None:
    batches = trained()
    trainers = batches.trainers
    for number in range(4):
        trainers.report(f"late {number}@home", (0,))
        batches.strike(2.0, f"late {number}@home")
    trainers.report("next@home", (0,))
    assert "one at a time" in trainers.why_nothing(2.0, "next@home")
    assert "did not finish" in trainers.why_nothing(2.0, "late 3@home")
    assert trainers.why_nothing(2.0, "t@home") == ""


def test_whoever_helped_to_make_a_step_is_no_newcomer() -> None:
    swarm = Swarm()
    swarm.tell(hello("d@there", swarm.position))
    swarm.step()
    swarm.fill()
    swarm.tell(PrepareEnded("d@there", swarm.orders()[0].attempt, False))
    assert "d@there" in swarm.here()


def trained() -> Batches:
    """A batch of four after a step that trainer t has helped to make."""
    batches = Batches(1, 4, ReaderVersions())
    batches.trainers.newcomers.probation = Probation(place)
    batches.verify = lambda *told: told[-1].signature == GENUINE
    view = StageView(lambda peer, stage: True, [False])
    batches.trainers.report("t@home", (0, 1, 2, 3))
    batches.fill(0.0, 0, early=False)
    done = tuple(Done(seq, ["a"], [Receipt(1, GENUINE)]) for seq in range(4))
    batches.take(1.0, TrainerReport("t@home", 0, (), done), view, delayed=False)
    batches.step_made(0)
    return batches


def test_a_new_trainer_gets_one_microbatch_until_a_step_has_counted_one() -> None:
    batches = trained()
    batches.trainers.report("new@there", tuple(range(10)))
    batches.fill(2.0, 1, early=False)
    assert batches.due.of_trainer("new@there") == [0]


def test_of_a_place_where_several_trainers_failed_one_newcomer_gets_a_microbatch_of_a_batch() -> None:
    batches = trained()
    batches.due.capacity = 16  # four of them are for newcomers
    for number in range(2):
        batches.trainers.report(f"other {number}@elsewhere", (0,))
        batches.trainers.report(f"next {number}@there", (0,))
    for _ in range(3):
        batches.trainers.newcomers.probation.failed(0.0, "late@there")
        batches.trainers.newcomers.probation.step_made()
    for _ in range(10):
        batches.trainers.newcomers.probation.step_made()
    batches.fill(100.0, 1, early=False)
    assert len(batches.due.of_trainer("other 0@elsewhere") + batches.due.of_trainer("other 1@elsewhere")) == 2
    assert len(batches.due.of_trainer("next 0@there") + batches.due.of_trainer("next 1@there")) == 1


def test_what_a_new_trainer_credits_without_receipts_is_not_believed() -> None:
    batches = trained()
    told: list[str] = []
    batches.tell = told.append
    view = StageView(lambda peer, stage: True, [False])
    batches.trainers.report("new@there", (0,))
    batches.fill(2.0, 1, early=False)
    batches.take(2.1, TrainerReport("new@there", 1, (), (Done(0, ["a"], [Receipt(1, b"made up")]),)), view, False)
    assert batches.due.of_trainer("new@there") == []
    assert any("new@there"[-8:] in text for text in told)
    batches.trainers.report("newer@there", (0,))
    batches.fill(2.2, 1, early=False)
    assert batches.due.of_trainer("newer@there") == [0], "it may be another's neighbour"
    batches.take(2.3, TrainerReport("newer@there", 1, (), (Done(0, ["a"], [Receipt(1, b"made up")]),)), view, False)
    batches.trainers.report("newest@there", (0,))
    batches.fill(2.4, 1, early=False)
    assert batches.due.of_trainer("newest@there") == [], "two of its place were found out"
