"""Groups of a stage that fail alone: who computes again what is lost, and what of the others' sums stays."""

from __future__ import annotations

import random

from peerd.messages.swarm import Done, Mb
from peerd.swarm.events import (
    CancelAttempt,
    ConductorConfig,
    MemberGone,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerGone,
    TrainerReport,
)
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

NAMES = tuple(f"p{i}" for i in range(9))
LEASE_S = 30.0


class Grid:
    """Members of the last stage, nine if nothing else is said, average in groups of three."""

    def __init__(self, stages: int, names: tuple[str, ...] = NAMES, **more: object) -> None:
        config = {"stages": stages, "microbatches": 9, "gather_s": 1.0, "group_size": 3, "lease_s": LEASE_S, **more}
        self.conductor = Conductor(ConductorConfig(**config), random.Random(1), 0.0)  # type: ignore[arg-type]
        self.now, self.first = 2.0, ["z"] * (stages - 1)
        self.out: list[Output] = []
        for peer in self.first:
            self.conductor.handle(0.0, hello(peer, stage=0))
        for peer in names:
            self.conductor.handle(0.0, hello(peer, stage=stages - 1))
        self.conductor.wake(self.now)

    def tell(self, event: object) -> list[Output]:
        found = self.conductor.handle(self.now, event)  # type: ignore[arg-type]
        self.out += found
        return found

    def orders(self) -> dict[bytes, list[SendPrepare]]:
        """Those of the members of the last stage that have not been taken yet, by attempt."""
        found: dict[bytes, list[SendPrepare]] = {}
        for output in self.out:
            if isinstance(output, SendPrepare) and output.peer != "z":
                found.setdefault(output.attempt, []).append(output)
        self.out = []
        return found

    def end(self, attempt: bytes, orders: list[SendPrepare], digest: bytes = b"") -> None:
        for order in orders:
            self.tell(PrepareEnded(order.peer, attempt, True, digest=digest or attempt))


def with_one_trainer(stages: int, **more: object) -> tuple[Grid, list[tuple[bytes, list[SendPrepare]]]]:
    """The grid, and the orders of its first round."""
    grid = Grid(stages, **more)
    grid.tell(TrainerReport("t", 0, tuple(range(9)), ()))
    grid.tell(TrainerReport("t", 0, (), tuple(Done(i, [*grid.first, peer]) for i, peer in enumerate(NAMES))))
    return grid, [*grid.orders().items()]


def test_members_whose_gradients_are_in_sums_take_nothing_more_for_a_while() -> None:
    grid, ((one, group), _, _) = with_one_trainer(2)
    grid.end(one, group)
    assert not any(grid.conductor.spares(grid.now, peer) for peer in NAMES), "nothing is to be done"
    version = grid.conductor.members_version
    grid.tell(MemberGone("p7"))
    assert grid.conductor.members_version > version, "members are told"
    spared = [peer for peer in NAMES if grid.conductor.spares(grid.now, peer)]
    assert spared == ["p0", "p1", "p2", "p3", "p4", "p5"]
    assert not grid.conductor.spares(grid.now, "z")
    version, grid.now = grid.conductor.members_version, grid.now + LEASE_S
    grid.out += grid.conductor.wake(grid.now)
    assert not any(grid.conductor.spares(grid.now, peer) for peer in NAMES), "nobody else does it"
    assert grid.conductor.members_version > version


def test_members_in_sums_are_not_spared_where_all_others_rest() -> None:
    grid, ((one, group), _, _) = with_one_trainer(2)
    grid.end(one, group)
    grid.conductor._closing._resting = {"p6", "p8"}
    grid.tell(MemberGone("p7"))
    assert not any(grid.conductor.spares(grid.now, peer) for peer in NAMES)


def test_a_sum_is_made_anew_when_one_of_its_members_holds_more() -> None:
    grid, ((one, group), (two, second), _) = with_one_trainer(2)
    grid.end(one, group)
    grid.end(two, second)
    grid.tell(MemberGone("p7"))
    grid.tell(TrainerReport("t", 0, (), (Done(7, ["z", "p0"]),)))
    again = grid.orders()
    grid.now += 1.0
    grid.out += grid.conductor.wake(grid.now)
    again |= grid.orders()
    brought = {order.peer: order.assigned for orders in again.values() for order in orders}
    assert brought.keys() == {"p0", "p1", "p2", "p6", "p8"}, "the second group keeps its sum"
    assert set(brought["p0"]) == {Mb("t", 0), Mb("t", 7)}


def test_a_sum_outlives_who_brought_to_it_and_is_lost_with_the_last_that_keeps_it() -> None:
    grid, ((one, group), *_) = with_one_trainer(2)
    grid.end(one, group)
    for peer in ("p0", "p1"):
        grid.tell(MemberGone(peer))
        assert not grid.conductor.redo("t")
    grid.tell(MemberGone("p2"))
    assert [(redo.seq, redo.stage) for redo in grid.conductor.redo("t")] == [(0, 1), (1, 1), (2, 1)]


def test_others_than_those_in_sums_fill_the_batch_again_when_a_replica_is_lost() -> None:
    grid = Grid(1)
    for peer in NAMES:
        grid.tell(TrainerReport(peer, 0, (0,), ()))
    for peer in NAMES:
        assert grid.conductor.admitted(peer) == [0]
        grid.tell(TrainerReport(peer, 0, (1, 2, 3), (Done(0, [peer]),)))
    (one, group), (two, second), (three, _) = grid.orders().items()
    grid.end(one, group)
    grid.tell(MemberGone("p7"))
    out = grid.tell(TrainerGone("p7"))
    assert grid.conductor.phase is Phase.OPEN
    assert CancelAttempt(two) not in (*grid.out, *out), "others go on"
    assert CancelAttempt(three) in (*grid.out, *out)
    for peer in NAMES:
        if peer != "p7":
            grid.tell(TrainerReport(peer, 0, (1, 2, 3), ()))
    (more,) = [peer for peer in NAMES if grid.conductor.admitted(peer) == [0, 1]]
    assert more in ("p6", "p8")
    grid.orders()
    grid.end(two, second)
    grid.tell(TrainerReport(more, 0, (2, 3), (Done(1, [more]),)))
    ((again, rest),) = grid.orders().items()
    assert {order.peer: len(order.assigned) for order in rest} == {"p6": 1 + (more == "p6"), "p8": 1 + (more == "p8")}
    grid.end(again, rest)
    for attempt, orders in grid.orders().items():
        grid.end(attempt, orders, b"sum")
    moved = [output.peer for output in grid.out if isinstance(output, SendMove)]
    assert moved == [peer for peer in NAMES if peer != "p7"]
    assert all(output.target.step == 1 for output in grid.out if isinstance(output, SendMove))


def test_groups_that_make_different_sums_of_the_same_are_found_out() -> None:
    grid, first = with_one_trainer(1)
    for attempt, orders in first:
        grid.end(attempt, orders)
    one, two, three = grid.orders().items()
    grid.end(*one, b"sum")
    grid.end(*two, b"another sum")
    grid.end(*three, b"sum")
    assert not any(isinstance(output, SendMove) for output in grid.out)
    grid.now += 6.0
    grid.out += grid.conductor.wake(grid.now)
    again = [order for orders in grid.orders().values() for order in orders]
    assert sorted(order.peer for order in again) == [*NAMES]
    assert not any(order.brings for order in again), "they begin anew"


def test_first_factors_are_summed_before_the_second_ones_and_a_loss_begins_anew() -> None:
    grid, first = with_one_trainer(1, factors=True)
    for attempt, orders in first:
        assert not any(order.last or order.second for order in orders)
        grid.end(attempt, orders)
    given = {}
    for attempt, orders in grid.orders().items():
        assert not any(order.last or order.second for order in orders)
        given |= {order.peer: attempt for order in orders}
        grid.end(attempt, orders, b"first")
    second = grid.orders()
    for orders in second.values():
        assert all(order.second and not order.last and order.brings == given[order.peer] for order in orders)
        assert {order.assigned for order in orders} == {(Mb("t", int(order.peer[1])),) for order in orders}
    grid.end(*next(iter(second.items())))
    grid.tell(MemberGone("p7"))
    grid.tell(TrainerReport("t", 0, (), (Done(7, ["p6"]),)))
    grid.now += 6.0
    grid.out += grid.conductor.wake(grid.now)
    again = [order for orders in grid.orders().values() for order in orders]
    assert sorted(order.peer for order in again) == [peer for peer in NAMES if peer != "p7"]
    assert not any(order.second or order.brings for order in again)
