"""A step's cycle: of a large batch, one stage after the other begins to average."""

from __future__ import annotations

import random

import pytest

from peerd.messages.swarm import Done
from peerd.swarm.batch.counted_work import PeerWork
from peerd.swarm.events import ConductorConfig, MemberGone, MoveEnded, Output, PrepareEnded, SendMove, SendPrepare
from peerd.swarm.events import TrainerReport as Report
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps import step_cycle
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

MEMBERS = "abc"  # of the stages 0, 1 and 2


def ordered(outputs: list[Output]) -> list[str]:
    """Who is told to average."""
    return [order.peer for order in outputs if isinstance(order, SendPrepare)]


def with_a_whole_batch() -> tuple[Conductor, list[Output]]:
    """Three stages of one member, and a batch of one microbatch that all of them hold: what the conductor orders."""
    conductor = Conductor(ConductorConfig(stages=3, microbatches=1, gather_s=1.0), random.Random(1), 0.0)
    for stage, peer in enumerate(MEMBERS):
        conductor.handle(0.0, hello(peer, stage=stage))
    conductor.wake(2.0)
    conductor.handle(2.0, Report("t", 0, (1,), ()))
    return conductor, conductor.handle(2.0, Report("t", 0, (), (Done(1, list(MEMBERS)),)))


def test_all_stages_begin_to_average_at_once_when_the_batch_is_small() -> None:
    assert ordered(with_a_whole_batch()[1]) == ["a", "b", "c"]


def test_of_a_large_batch_a_stage_begins_in_each_turn_and_the_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cycle, "_AT_ONCE", 1)
    conductor, out = with_a_whole_batch()
    orders, now = [one for one in out if isinstance(one, SendPrepare)], 2.0
    assert ordered(out) == ["a"]
    for peer in "bc":
        assert conductor.wake_at(now) <= now + 0.01  # the next turn is due at once
        now += 0.01
        out = conductor.wake(now)
        assert ordered(out) == [peer]
        orders += [one for one in out if isinstance(one, SendPrepare)]
    assert conductor.wake_at(now) > now + 0.01
    moves = [one for order in orders for one in conductor.handle(now, PrepareEnded(order.peer, order.attempt, True))]
    assert [move.peer for move in moves if isinstance(move, SendMove)] == ["a", "b", "c"]
    for move in [move for move in moves if isinstance(move, SendMove)]:
        conductor.handle(now, MoveEnded(move.peer, move.target))
    assert conductor.current is not None
    assert conductor.current.step == 1


def test_a_batch_counts_once_when_its_step_is_made_though_an_attempt_failed() -> None:
    conductor, out = with_a_whole_batch()
    work, now = conductor.counted_work, 2.0
    assert conductor.phase is Phase.CLOSING
    for order in [one for one in out if isinstance(one, SendPrepare)]:
        out = conductor.handle(now, PrepareEnded(order.peer, order.attempt, order.peer != "b"))
    assert (work.of, work.since_step) == ({}, None)
    again = list[SendPrepare]()
    while not again:
        now = conductor.wake_at(now)
        again = [one for one in conductor.wake(now) if isinstance(one, SendPrepare)]
    moves = [one for order in again for one in conductor.handle(now, PrepareEnded(order.peer, order.attempt, True))]
    for move in [move for move in moves if isinstance(move, SendMove)]:
        assert work.of == {}, "the step is not made before all have moved"
        conductor.handle(now, MoveEnded(move.peer, move.target))
    one = PeerWork(computed=1, brought=0)
    assert work.of == {"a": one, "b": one, "c": one, "t": PeerWork(computed=0, brought=1)}
    assert (work.since_step, work.step) == (0, 1)


def test_a_stage_that_loses_its_member_between_two_turns_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cycle, "_AT_ONCE", 1)
    conductor, _ = with_a_whole_batch()
    assert ordered(conductor.handle(2.0, MemberGone("b"))) == ["c"]
    assert ordered(conductor.wake(2.01)) == []
    assert conductor.waits_for() == "stage 1 has no peers"


def test_a_step_that_nobody_makes_is_not_counted() -> None:
    conductor, out = with_a_whole_batch()
    moves = list[SendMove]()
    for order in [one for one in out if isinstance(one, SendPrepare)]:
        out = conductor.handle(2.0, PrepareEnded(order.peer, order.attempt, True))
        moves += [one for one in out if isinstance(one, SendMove)]
    assert moves
    for move in moves:
        conductor.handle(2.0, MoveEnded(move.peer, None))
    assert (conductor.counted_work.of, conductor.counted_work.since_step) == ({}, None)
