"""Sums of a grid whose parts go, come back or differ: everything is in the step once, and nobody is blamed for that."""

from __future__ import annotations

from collections import Counter

from peerd.messages.swarm import Done, Mb
from peerd.swarm.events import (
    CancelAttempt,
    MemberGone,
    MoveEnded,
    Note,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from peerd.swarm.positions.phases import Phase
from tests.swarm.steps.test_group_orders import Grid, with_one_trainer
from tests.worlds.machines.conducting import hello

LATE_S = 1000.0


class Summing(Grid):
    """A grid whose members sum: a sum is the number of times that it has each microbatch."""

    def __init__(self, stages: int, count: int, microbatches: int, **more: object) -> None:
        self.sums: dict[str, dict[bytes, Counter[Mb]]] = {}
        self.sent: dict[str, Counter[Mb]] = {}
        self.stepped: dict[str, Counter[Mb]] = {}
        self.moves: dict[str, Counter[Mb]] = {}
        self.notes: list[str] = []
        self.absent: list[str] = []
        names = tuple(f"p{i}" for i in range(count))
        super().__init__(stages, names, microbatches=microbatches, **more)
        self.tell(TrainerReport("t", 0, tuple(range(microbatches)), ()))

    def done(self, *holders: tuple[int, str]) -> None:
        self.tell(TrainerReport("t", 0, (), tuple(Done(seq, [*self.first, peer]) for seq, peer in holders)))

    def tell(self, event: object) -> list[Output]:
        found = super().tell(event)
        self.notes += [output.text for output in found if isinstance(output, Note)]
        for move in (output for output in found if isinstance(output, SendMove) and output.peer in self.stepped):
            self.moves[move.peer] = self.stepped[move.peer]
        return found

    def finish(self, attempt: bytes, *, silent: tuple[str, ...] = ()) -> Counter[Mb]:
        """The group of this attempt sums; the answers of some are lost."""
        orders = self.known[attempt]
        total = Counter[Mb]()
        for order in orders:
            kept = self.sums.setdefault(order.peer, {})
            if order.peer in order.listeners:
                self.sums[order.peer] = {name: one for name, one in kept.items() if name == order.brings}
            elif order.second:
                total += self.sent[order.peer]
            elif order.brings:
                if order.brings not in kept:
                    self.absent.append(order.peer)
                    self.tell(PrepareEnded(order.peer, attempt, False, absent=True))
                    return total
                self.sums[order.peer] = {order.brings: kept[order.brings]}
                total += kept[order.brings]
            else:
                self.sums[order.peer] = {}
                self.sent[order.peer] = Counter(order.assigned)
                total += self.sent[order.peer]
        digest = repr(sorted(total.items())).encode()
        for order in orders:
            self.sums[order.peer][attempt] = total
            if order.last:
                self.stepped[order.peer] = total
        for order in orders:
            if order.peer not in silent:
                self.tell(PrepareEnded(order.peer, attempt, True, digest=digest))
        return total

    @property
    def known(self) -> dict[bytes, list[SendPrepare]]:
        """All orders so far, by attempt."""
        if not hasattr(self, "_known"):
            self._known: dict[bytes, list[SendPrepare]] = {}
        self._known |= self.orders()
        return self._known

    def under_way(self) -> list[tuple[bytes, tuple[str, ...]]]:
        """The attempts of the last stage, and their groups."""
        close = self.conductor._closing.stages[-1]
        return [(one.name, one.group) for one in close.attempts.values()]

    def go_on(self, rounds: int = 20) -> None:
        """All that is ordered is done, for some time."""
        for _ in range(rounds):
            for attempt, _group in self.under_way():
                if attempt in dict(self.under_way()):
                    self.finish(attempt)
            self.now += 1.0
            self.out += self.conductor.wake(self.now)

    def check(self) -> None:
        for close in self.conductor._closing.stages:
            close.sums.check(self.conductor.batches.due)


def test_an_attempt_whose_parts_are_summed_anew_is_called_off() -> None:
    grid = Summing(2, 8, 4)
    grid.done((0, "p0"), (1, "p2"), (2, "p4"), (3, "p6"))
    for attempt, _ in grid.under_way():
        grid.finish(attempt)
    joins = grid.under_way()
    (one,) = [attempt for attempt, group in joins if "p0" in group]
    (late, group) = next((attempt, group) for attempt, group in joins if "p1" in group)
    assert set(grid.finish(one)) == {Mb("t", 0), Mb("t", 1)}
    for peer in ("p6", "p7"):
        grid.tell(MemberGone(peer))
    assert [redo.seq for redo in grid.conductor.redo("t")] == [3]
    grid.done((3, "p0"))
    grid.check()
    assert late not in dict(grid.under_way()), f"{group} would bring what is summed anew"
    grid.finish(late)  # too late
    grid.go_on()
    grid.check()
    assert not grid.conductor._closing.settled[0]
    assert grid.conductor._closing.settled[1]
    (top,) = grid.conductor._closing.stages[1].sums.tops
    made = {peer: grid.sums[peer][attempt] for peer, attempt in top.kept.items()}
    assert all(found == Counter(Mb("t", seq) for seq in range(4)) for found in made.values())
    assert made.keys() == {f"p{i}" for i in range(6)}


def test_a_sum_that_would_count_twice_makes_the_stage_begin_anew() -> None:
    grid = Summing(1, 4, 2)
    grid.done((0, "p0"), (1, "p2"))
    for attempt, _ in grid.under_way():
        grid.finish(attempt)
    sums = grid.conductor._closing.stages[0].sums
    sums.tops[0].count += 1  # as if there were another way to this
    for attempt, _ in grid.under_way():
        grid.finish(attempt)
    assert grid.conductor.phase is Phase.CLOSING
    assert [note for note in grid.notes if "cannot be right: a microbatch is in it twice" in note]
    grid.go_on()
    assert grid.moves
    assert all(found == Counter([Mb("t", 0), Mb("t", 1)]) for found in grid.moves.values())


def test_second_factors_have_all_that_the_first_ones_had_when_a_member_comes_back_with_more() -> None:
    grid = Summing(1, 9, 9, factors=True)
    grid.done(*((i, f"p{i}") for i in range(9)))
    (one, _), (two, _), _ = grid.under_way()
    grid.finish(one)
    grid.tell(MemberGone("p0"))
    grid.tell(hello("p0", held=frozenset({Mb("t", 0)})))
    grid.tell(MemberGone("p7"))
    grid.done((7, "p0"))
    grid.finish(two)
    grid.go_on()
    assert grid.moves
    assert all(found == Counter(Mb("t", seq) for seq in range(9)) for found in grid.moves.values())


def test_a_stage_that_has_moved_keeps_its_sum_whoever_goes_while_another_one_moves() -> None:
    grid = Grid(2, names=("c", "d", "e"), microbatches=4)
    grid.tell(TrainerReport("t", 0, tuple(range(4)), ()))
    grid.tell(TrainerReport("t", 0, (), tuple(Done(i, ["z", "cd"[i % 2]]) for i in range(4))))
    for order in [output for output in grid.out if isinstance(output, SendPrepare)]:
        grid.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"d"))
    moves = [output for output in grid.out if isinstance(output, SendMove)]
    for move in moves:
        if move.peer == "z":
            grid.tell(MoveEnded("z", move.target))
    credit = grid.conductor.batches.due.credit()
    grid.tell(MemberGone("e"))
    assert grid.conductor.phase is Phase.MOVING
    assert grid.conductor._closing.settled == [True, True]
    assert not grid.conductor.redo("t")
    assert grid.conductor.batches.due.credit()["z"] == credit["z"] == 4


def test_a_member_that_gave_a_copy_is_not_asked_for_what_it_let_go_of() -> None:
    grid = Summing(2, 4, 5, lease_s=30.0)
    grid.done(*((i, f"p{i}") for i in range(4)))
    grid.tell(TrainerReport("t", 0, (4,), (Done(4, ["z", "p0"]),)))
    for attempt, _ in grid.under_way():
        grid.finish(attempt)
    (one, _), (two, late) = grid.under_way()
    grid.finish(one)
    grid.finish(two, silent=late[-1:])
    grid.tell(PrepareEnded(late[-1], two, False))
    grid.now += 6.0
    grid.out += grid.conductor.wake(grid.now)
    ((copy, group),) = grid.under_way()
    orders = {order.peer: order for order in grid.known[copy]}
    (listeners,) = {order.listeners for order in orders.values()}
    assert listeners
    for peer in listeners:
        assert orders[peer].brings in grid.sums[peer], "the order names the sum that a listener keeps"
    (holder,) = set(group) - set(listeners)
    (top,) = grid.conductor._closing.stages[1].sums.tops
    assert [one for one in top.all() if holder in one.kept] == [top]
    grid.go_on()
    assert not grid.absent
    assert grid.conductor._closing.settled[1]


def test_a_member_without_the_sum_that_it_is_to_bring_is_not_blamed_and_costs_no_other_sum() -> None:
    grid, first = with_one_trainer(2)
    for attempt, orders in first:
        grid.end(attempt, orders, b"sum of " + orders[0].peer.encode())
    ((one, orders), *_) = grid.orders().items()
    blamed = list[str]()
    grid.conductor._blame.failed = lambda now, peer, why: blamed.append(peer)  # type: ignore[method-assign]
    grid.tell(PrepareEnded(orders[0].peer, one, False, absent=True))
    assert not blamed
    assert len(grid.conductor._closing.stages[1].sums.tops) == 3
    assert not [output.text for output in grid.out if isinstance(output, Note)]
    grid.now += 6.0
    grid.out += grid.conductor.wake(grid.now)
    assert grid.conductor.is_member(orders[0].peer, grid.conductor.roster.session(orders[0].peer) or 0)


def test_a_few_members_do_not_decide_who_is_at_fault() -> None:
    grid, ((one, orders), *_) = with_one_trainer(1)
    for order, digest in zip(orders, (b"lie", b"lie", b"truth"), strict=True):
        grid.tell(PrepareEnded(order.peer, one, True, digest=digest))
    assert not grid.conductor._closing._agreements[0].idle
    grid.now += 6.0
    grid.out += grid.conductor.wake(grid.now)
    again = [order for found in grid.orders().values() for order in found if order.attempt != one]
    flat = [order for order in again if len(order.group) == 9]
    assert len(flat) == 9, "all sum together, so that all vote"
    for order in flat:
        grid.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"lie" if order.peer in ("p0", "p1") else b"ok"))
    assert grid.conductor._closing._agreements[0].idle, "now it is sought who sums wrongly"


def test_a_copy_that_differs_convicts_nobody() -> None:
    grid, first = with_one_trainer(1)
    for attempt, orders in first:
        grid.end(attempt, orders)
    one, two, (three, orders) = grid.orders().items()
    grid.end(*one, b"sum")
    grid.end(*two, b"sum")
    grid.tell(PrepareEnded(orders[0].peer, three, False))
    holders = list[str]()
    for _ in range(2):
        grid.now += 6.0
        grid.out += grid.conductor.wake(grid.now)
        ((copy, orders),) = grid.orders().items()
        assert len(orders) == 4
        holders.append(orders[0].peer)
        for order in orders:
            lies = order.peer == orders[-1].peer
            grid.tell(PrepareEnded(order.peer, copy, True, digest=b"another" if lies else b"sum"))
    assert holders[0] != holders[1]
    assert not grid.conductor._closing._agreements[0].idle
    assert len(grid.conductor.members()) == 9
    grid.now += 6.0
    grid.out += grid.conductor.wake(grid.now)
    for copy, orders in grid.orders().items():
        grid.end(copy, orders, b"sum")
    assert len([output for output in grid.out if isinstance(output, SendMove)]) == 8, "the other one goes without"


def test_a_group_is_not_waited_for_when_others_have_its_sum() -> None:
    grid, first = with_one_trainer(1, late_s=2.0)
    for attempt, orders in first:
        grid.end(attempt, orders)
    one, two, (three, slow) = grid.orders().items()
    grid.now += 4.0
    grid.end(*one, b"sum")
    grid.end(*two, b"sum")
    due = grid.conductor.wake_at(grid.now)
    assert due <= grid.now + 12.0
    while grid.now < 40.0 and CancelAttempt(three) not in grid.out:
        grid.now = grid.conductor.wake_at(grid.now)
        grid.out += grid.conductor.wake(grid.now)
    assert grid.now <= 2.0 + 4.0 + 12.0 + 0.1
    ((copy, orders),) = grid.orders().items()
    assert set(orders[0].listeners) == {order.peer for order in slow}
    grid.end(copy, orders, b"sum")
    assert len([output for output in grid.out if isinstance(output, SendMove)]) == 9


def test_groups_that_fail_in_one_moment_make_one_pause() -> None:
    grid, first = with_one_trainer(2)
    for attempt, orders in first:
        grid.tell(PrepareEnded(orders[0].peer, attempt, False))
    assert grid.conductor._closing.stages[1].failures == 1


def test_no_more_newcomers_listen_than_the_groups_have_room_for() -> None:
    grid, first = with_one_trainer(1)
    for i in range(30):
        grid.tell(hello(f"q{i:02}"))
    for attempt, orders in first:
        grid.end(attempt, orders)
    joins = grid.orders()
    assert {order.brings != b"" for orders in joins.values() for order in orders if order.peer[0] == "p"} == {True}
    assert all(len(orders) <= 6 for orders in joins.values())
