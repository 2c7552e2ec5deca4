"""Fault for a failed attempt: receipts decide on missing microbatches, accusations on lost peers, digests on sums."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from peerd.messages.swarm import Done, Mb, Receipt
from peerd.swarm.events import (
    ConductorConfig,
    MoveEnded,
    Note,
    Origin,
    Output,
    PrepareEnded,
    Probe,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

MBS = 2
GENUINE = b"signed"


class Stage:
    """One stage of members a, b, ..., the last the one that joined first.

    Trainers t and u each bring one microbatch of the batch, held by a and b.
    """

    def __init__(self, members: str, receipts: dict[str, Receipt] | None = None) -> None:
        config = ConductorConfig(stages=1, microbatches=MBS, gather_s=1.0)
        origin = Origin(own="a", verify=lambda holder, stage, step, mb, shown: shown.signature == GENUINE)
        self.conductor = Conductor(config, random.Random(1), 0.0, origin)
        self.members, self.now, self.receipts = members, 0.0, receipts or {}
        self.notes: list[str] = []
        self.outputs: list[Output] = []
        for peer in members:
            self.tell(hello(peer, since=float(200 - ord(peer))))
        self.pass_s(2.0)
        self.fill()

    def fill(self) -> None:
        """Both trainers wish, and say that they have done it."""
        current = self.conductor.current
        step = current.step if current is not None else 0
        for trainer in "tu":
            self.tell(TrainerReport(trainer, step, (step,), ()))
        for trainer, holder in ("t", "a"), ("u", "b"):
            holder = holder if holder in self.here() else self.here()[-1]
            shown = [self.receipts[trainer]] if trainer in self.receipts else []
            self.tell(TrainerReport(trainer, step, (), (Done(step, [holder], shown),)))

    def tell(self, event: object) -> None:
        self._take(self.conductor.handle(self.now, event))  # type: ignore[arg-type]

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.conductor.wake(self.now))

    def _take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs.append(output)
            if isinstance(output, Note):
                self.notes.append(output.text)

    def orders(self) -> list[SendPrepare]:
        """Those of the last attempt."""
        found = [output for output in self.outputs if isinstance(output, SendPrepare)]
        return [order for order in found if order.attempt == found[-1].attempt] if found else []

    def answer(self, peer: str, ok: bool = False, **more: object) -> None:
        self.tell(PrepareEnded(peer, self.orders()[0].attempt, ok, **more))  # type: ignore[arg-type]

    def here(self) -> str:
        return "".join(m.peer for m in self.conductor.members())

    def agree(self) -> None:
        """All say that they have the same sum, and commit."""
        for order in self.orders():
            self.answer(order.peer, ok=True, digest=b"same")
        for move in [output for output in self.outputs if isinstance(output, SendMove)]:
            self.tell(MoveEnded(move.peer, move.target))
        self.outputs.clear()


def given(stage: Stage, trainer: str) -> list[int]:
    return stage.conductor.admitted(trainer)


def test_what_was_not_assigned_cannot_be_missing_and_costs_whoever_says_so() -> None:
    stage = Stage("abcd")
    for _ in range(3):
        stage.answer("d", missing=(Mb("t", 99), Mb("t", 0)))
        stage.pass_s(6.0)
    assert stage.here() == "abc"
    assert any("d failed averaging and is put aside" in note for note in stage.notes)
    assert (given(stage, "t"), given(stage, "u")) == ([0], [0]), "no credit was lost"
    stage.agree()
    assert stage.conductor.current is not None
    assert stage.conductor.current.step == 1


@pytest.mark.parametrize(
    ("receipt", "at_fault"),
    [
        (Receipt(1, GENUINE), "holder"),
        (Receipt(0, GENUINE), "nobody"),
        (Receipt(1, b"made up"), "trainer"),
        (None, "trainer"),
    ],
)
def test_a_receipt_says_whose_fault_it_is_that_something_is_missing(receipt: Receipt | None, at_fault: str) -> None:
    stage = Stage("abcd", {"t": receipt} if receipt is not None else {})
    for _ in range(3):
        stage.answer("a", missing=(Mb("t", 0),))
        stage.pass_s(6.0)
        stage.fill()
    assert ("a" not in stage.here()) == (at_fault == "holder")
    assert any(note.startswith("trainer …t credits") for note in stage.notes) == (at_fault == "trainer")


def test_a_liar_that_calls_one_after_another_lost_ends_outside_and_its_victims_inside() -> None:
    stage = Stage("abcd")
    for _ in range(12):
        orders = stage.orders()
        if "d" not in {order.peer for order in orders} or stage.conductor.phase is not Phase.CLOSING:
            break
        victim = next(order.peer for order in orders if order.peer != "d")
        stage.answer("d", lost=(victim, "nobody"))
        stage.pass_s(0.6)
        assert Probe(victim) in stage.outputs, "whether it can be reached is looked at"
        stage.pass_s(6.0)
        stage.fill()
    assert "d" not in stage.here()
    assert any("d is contradicted by several others" in note for note in stage.notes)


def test_who_really_is_lost_is_put_aside_at_once_when_several_say_so() -> None:
    stage = Stage("abcd")
    for peer in "ab":
        stage.answer(peer, lost=("d",))
    stage.pass_s(0.6)
    assert stage.here() == "abc"


def test_two_that_contradict_each_other_take_turns() -> None:
    stage = Stage("ab", {"t": Receipt(1, GENUINE)})
    for _ in range(2):
        stage.answer("a", lost=("b",))
        stage.pass_s(6.0)
    assert stage.here() == "b", "the one that joined later"


def test_a_member_that_says_nothing_is_left_behind_and_the_step_is_made() -> None:
    stage = Stage("abcd")
    for peer in "abc":
        stage.answer(peer, ok=True, digest=b"same")
    stage.pass_s(5.0)
    assert stage.conductor.phase is Phase.CLOSING
    stage.pass_s(6.0)
    moves = [output for output in stage.outputs if isinstance(output, SendMove)]
    assert [(move.peer, move.commit) for move in moves] == [("a", True), ("b", True), ("c", True)]


def test_members_with_different_sums_do_not_commit_and_a_lying_summer_ends_without_a_share() -> None:
    stage = Stage("abcd")
    for _ in range(8):
        orders = stage.orders()
        lies = "d" in orders[0].summers  # to c alone
        for order in orders:
            stage.answer(order.peer, ok=True, digest=b"other" if lies and order.peer == "c" else b"same")
        if not lies:
            break
        assert not any(isinstance(output, SendMove) for output in stage.outputs)
        stage.pass_s(6.0)
    assert stage.conductor.phase is Phase.MOVING
    assert stage.here() == "abcd", "nobody honest had to go"
    stage.agree()
    for _ in range(8):  # and it is found in few more attempts, if it goes on
        stage.fill()
        orders = stage.orders()
        lies = "d" in orders[0].summers
        for order in orders:
            stage.answer(order.peer, ok=True, digest=b"other" if lies and order.peer == "c" else b"same")
        stage.pass_s(6.0)
        if not lies:
            stage.agree()
    assert any("…d had a share whenever" in note for note in stage.notes) or "d" not in orders[0].summers


def test_values_that_cannot_be_summed_leave_the_batch_and_their_trainer_gets_less() -> None:
    stage = Stage("abcd")
    stage.answer("a", refused=(Mb("t", 0),))
    assert given(stage, "t") == []
    assert stage.conductor.phase is Phase.OPEN
    assert any("trainer …t brings values that cannot be summed" in note for note in stage.notes)
    stage.tell(TrainerReport("t", 0, (), (Done(0, ["a"]),)))
    assert given(stage, "t") == [], "it does not come back"
    stage.tell(TrainerReport("u", 0, (5,), ()))
    assert given(stage, "u") == [0, 5]
