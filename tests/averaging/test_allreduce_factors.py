"""A member's round in low rank: two sums inside one order, the bytes they take, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import trio
from trio.testing import MockClock

from peerd.averaging.allreduce import AllReduceService
from peerd.averaging.allreduce_round import RoundFailed
from peerd.averaging.line_speeds import LineSpeeds
from peerd.averaging.rounds.averaging_rounds import AveragingRounds, Total
from peerd.averaging.topology import GroupTopology
from peerd.averaging.work_split import WorkSplitter
from peerd.codec.flat import FlatLayout
from peerd.codec.format.frame import TensorFrame
from peerd.codec.powersgd import PowerSgd, Vector
from peerd.messages.swarm import AverageKey, Mbs, Party, Prepare
from peerd.rpc.rpc import CallStream
from peerd.run.runfile import AveragingSection, RunFile
from tests.averaging.test_allreduce import Node, group, send_part
from tests.worlds.machines.grids import attempt_name, order_of, rounds_of
from tests.worlds.machines.workers import InlineWorker

LAYOUT = FlatLayout(("a", "b", "c"), (torch.Size((60, 40)), torch.Size((60,)), torch.Size((33, 21))))
RANK = 3
FIRST, SECOND = RANK * (60 + 33) + 60, RANK * (40 + 21)
RUN = RunFile(
    run="factors", averaging=AveragingSection(code="powersgd", rank=RANK, part_bytes=1024, sender_timeout_s=5.0)
)


@dataclass
class Services:
    """The part of a run's services that `AveragingRounds` uses."""

    averaging: AllReduceService

    def line_speeds(self) -> LineSpeeds:
        return LineSpeeds(0.0, 0.0, True, True, True)


class Member:
    """A node with a gradient of its own for every step."""

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number = node, number
        self.worker = InlineWorker()
        self.rounds = AveragingRounds(RUN, cast("Any", Services(node.averaging)), self.worker, node.id)
        self.code = PowerSgd(LAYOUT, RANK, torch.float32, 0)

    def gradient(self, step: int) -> Vector:
        drawn = np.random.default_rng(100 * step + self.number).standard_normal(LAYOUT.count)
        found: Vector = drawn.astype("float32")
        return found

    async def take_part(self, order: Prepare, step: int) -> Total:
        vector = self.gradient(step) if self.rounds.brings_gradient(order) else None
        return await self.rounds.total(order, self.rounds.plan(order, self.node.id), vector, self.code)


def members(nodes: list[Node]) -> list[Member]:
    return [Member(node, number) for number, node in enumerate(nodes)]


def order(nodes: list[Node], attempt: bytes = b"a" * 16, **changes: Any) -> Prepare:
    whole = Prepare(bytes(16), 1, 0, attempt, b"", sorted(node.id.text for node in nodes), Mbs(), 8, 60.0)
    return msgspec.structs.replace(whole, **changes)


async def all_take_part(found: list[Member], how: Prepare, step: int = 0) -> list[Total | RoundFailed]:
    results: dict[int, Total | RoundFailed] = {}

    async def one(member: Member) -> None:
        try:
            results[member.number] = await member.take_part(how, step)
        except RoundFailed as error:
            results[member.number] = error

    async with trio.open_nursery() as nursery:
        for member in found:
            nursery.start_soon(one, member)
    return [results[member.number] for member in found]


def succeeded(results: list[Total | RoundFailed]) -> list[Total]:
    failed = [result for result in results if isinstance(result, RoundFailed)]
    assert not failed
    return [result for result in results if isinstance(result, Total)]


@pytest.fixture
def payload_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every message of averaging that is sent."""
    sent: list[int] = []
    whole, soon = CallStream.send, CallStream.put

    async def send(self: Any, body: Any, frames: Any = ()) -> None:
        sent.append(sum(frame.payload.nbytes for frame in frames))
        await whole(self, body, frames)

    def put(self: Any, part: Any) -> None:
        sent.append(sum(map(len, part.payloads)))
        soon(self, part)

    monkeypatch.setattr(CallStream, "send", send)
    monkeypatch.setattr(CallStream, "put", put)
    return sent


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_all_end_with_the_same_bits_and_send_the_factors_alone(
    autojump_clock: MockClock, payload_bytes: list[int], count: int
) -> None:
    async with group(count) as (_, nodes):
        found = members(nodes)
        for step in range(3):
            payload_bytes.clear()
            totals = succeeded(await all_take_part(found, order(nodes, bytes([step]) * 16), step))
            assert len({total.vector.tobytes() for total in totals}) == 1
            assert sum(payload_bytes) == 2 * (count - 1) * 4 * (FIRST + SECOND)  # to the owners, and back
            for total in totals:
                total.settle()
            states = [{k: q.numpy().tobytes() for k, q in member.code.state().items()} for member in found]
            assert all(state == states[0] for state in states)
        assert found[0].code.elements == (FIRST, SECOND)
        assert LAYOUT.count > 4 * (FIRST + SECOND)


async def test_a_lone_member_sends_nothing_and_loses_nothing(
    autojump_clock: MockClock, payload_bytes: list[int]
) -> None:
    async with group(1) as (_, nodes):
        (member,) = members(nodes)
        (total,) = succeeded(await all_take_part([member], order(nodes)))
        assert np.array_equal(total.vector, member.gradient(0))
        assert not payload_bytes


async def test_a_helper_sums_both_vectors(autojump_clock: MockClock) -> None:
    async with group(4) as (_, nodes):
        *senders, helper = nodes
        found, plain = members(senders), members(senders)
        split = [Party(n.id.text, "node", 0.1) for n in senders] + [Party(helper.id.text, "aux", 0.7)]
        line = {"elements": FIRST, "dtype": "float32", "further": SECOND}
        how = order(senders, split=split, part_bytes=256, **line)
        plan = found[0].rounds.plan(how, senders[0].id)

        async def help_out() -> None:
            for one in (plan, plan.second()):
                await helper.averaging.sum(one, None, InlineWorker())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(help_out)
            totals = succeeded(await all_take_part(found, how))
        expected = succeeded(await all_take_part(plain, order(senders, b"b" * 16)))
        assert {total.vector.tobytes() for total in totals} == {total.vector.tobytes() for total in expected}
        assert helper.averaging.aggregated_bytes >= 3 * 0.6 * 4 * (FIRST + SECOND)
        said = found[0].rounds.line()
        assert {name: getattr(said, name) for name in line} == line


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 9])
async def test_all_end_with_the_same_bits_also_over_the_rounds_of_a_grid(autojump_clock: MockClock, count: int) -> None:
    async with group(count) as (_, nodes):
        found, together = members(nodes), members(nodes)
        grouping, names = GroupTopology(WorkSplitter(), 3), tuple(node.id.text for node in nodes)
        rounds = rounds_of(grouping, names)
        for step in range(2):
            totals, brings = dict[int, Total](), dict[str, bytes]()

            async def one(member: Member, how: Prepare, step: int, totals: dict[int, Total]) -> None:
                totals[member.number] = await member.take_part(how, step)

            for number, groups in enumerate([*rounds, *rounds]):  # the first factors, and then the second ones
                async with trio.open_nursery() as nursery:
                    second, last = number == len(rounds), number == 2 * len(rounds) - 1
                    for at, made in enumerate(groups):
                        attempt = attempt_name(number, 100 * step + at)
                        for member in (m for m in found if m.node.id.text in made.meeting.peers):
                            own = brings.get(member.node.id.text)
                            how = order_of(made, attempt, own, 60.0, last=last)
                            how = msgspec.structs.replace(how, second=second)
                            nursery.start_soon(one, member, how, step, totals)
                            brings[member.node.id.text] = attempt
            assert len({total.vector.tobytes() for total in totals.values()}) == 1
            expected = succeeded(await all_take_part(together, order(nodes, bytes([9, step]) * 8), step))
            np.testing.assert_allclose(totals[0].vector, expected[0].vector, rtol=0, atol=1e-3)
            for total in (*totals.values(), *expected):
                total.settle()
            states = [{k: q.numpy().tobytes() for k, q in member.code.state().items()} for member in found]
            assert all(state == states[0] for state in states)


async def test_an_order_for_other_sizes_is_refused(autojump_clock: MockClock) -> None:
    async with group(2) as (_, nodes):
        found = members(nodes)
        split = [Party(node.id.text, "node", 0.5) for node in sorted(nodes, key=lambda n: n.id.text)]
        for wrong in ({"elements": FIRST, "further": SECOND + 1}, {"elements": FIRST + 1, "further": SECOND}):
            how = order(nodes, split=split, part_bytes=1024, dtype="float32", **wrong)
            for result in await all_take_part(found, how):
                assert isinstance(result, RoundFailed)
                assert "another size" in str(result)


def meddle(node: Node, monkeypatch: pytest.MonkeyPatch, sum_number: int, with_what: Callable[[Vector], Any]) -> None:
    """Change what the node brings to its first or second sum."""
    original, seen = node.averaging.sum, []

    async def meddled(plan: Any, vector: Any, worker: Any, coder: Any = None) -> Any:
        seen.append(plan)
        if len(seen) == sum_number:
            vector = with_what(vector)
        return await original(plan, vector, worker, coder)

    monkeypatch.setattr(node.averaging, "sum", meddled)


class Died(Exception):
    """In place of a peer that vanishes."""


def die(vector: Vector) -> Vector:
    raise Died


@pytest.mark.parametrize("sum_number", [1, 2])
async def test_who_vanishes_in_either_sum_is_named_and_the_round_repeated_as_if_it_had_not_been(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, sum_number: int
) -> None:
    async with group(3) as (net, nodes):
        found, calm = members(nodes), members(nodes[:2])
        victim = found[2]
        meddle(victim.node, monkeypatch, sum_number, die)

        async def vanish(how: Prepare) -> None:
            with pytest.raises(Died):
                await victim.take_part(how, 0)
            for node in nodes[:2]:
                net.cut(node.id, victim.node.id)

        async with trio.open_nursery() as nursery:
            how = order(nodes)
            nursery.start_soon(vanish, how)
            for result in await all_take_part(found[:2], how):
                assert isinstance(result, RoundFailed)
                assert result.lost == (victim.node.id.text,)
        totals = succeeded(await all_take_part(found[:2], order(nodes[:2], b"b" * 16)))
        expected = succeeded(await all_take_part(calm, order(nodes[:2], b"c" * 16)))
        assert {total.vector.tobytes() for total in totals} == {total.vector.tobytes() for total in expected}
        for total, one in zip([*totals, *expected], [*found[:2], *calm], strict=True):
            total.settle()
            assert one.code.residual().any()
        for member, other in zip(found[:2], calm, strict=True):
            assert member.code.residual().tobytes() == other.code.residual().tobytes()


@pytest.mark.parametrize("sum_number", [1, 2])
async def test_values_that_are_not_finite_are_refused_in_either_sum_and_their_sender_named(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, sum_number: int
) -> None:
    async with group(3) as (_, nodes):
        found = members(nodes)
        meddle(nodes[1], monkeypatch, sum_number, lambda vector: vector * np.float32("nan"))
        results = await all_take_part(found, order(nodes))
        honest = [results[0], results[2]]
        assert all(isinstance(result, RoundFailed) for result in honest)
        assert nodes[1].id.text in {name for r in honest if isinstance(r, RoundFailed) for name in r.lost}
        for member in found:
            assert not member.code.residual().any()


async def test_a_part_of_the_first_sum_is_not_taken_for_one_of_the_second(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owners wait in the second sum; what comes under the first one's id finds no round."""
    async with group(2) as (_, nodes):
        found = members(nodes)
        plan = found[0].rounds.plan(order(nodes), nodes[0].id)
        first_is_over, goes_on = trio.Event(), trio.Event()

        async def slow(one: Any, vector: Any, worker: Any, coder: Any = None) -> Any:
            if one.attempt != plan.attempt:
                first_is_over.set()
                await goes_on.wait()
            return await original(one, vector, worker, coder)

        original = nodes[1].averaging.sum
        monkeypatch.setattr(nodes[1].averaging, "sum", slow)

        async def stale_part() -> None:
            await first_is_over.wait()
            owners = plan.parts(FIRST, 4)
            part = next(p for p in owners if p.owner == nodes[0].id.text)
            ones = np.ones(part.end - part.begin, "float32")
            frame = TensorFrame("float32", ones.shape, ones.data.cast("B"))
            with trio.move_on_after(1.0) as limit:
                await send_part(nodes[1], nodes[0], plan.attempt, part.index, frame)
            assert limit.cancelled_caught  # nobody took it: there is no such round any more
            goes_on.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stale_part)
            totals = succeeded(await all_take_part(found, order(nodes)))
        assert totals[0].vector.tobytes() == totals[1].vector.tobytes()
        assert AverageKey(plan.attempt, 0) != AverageKey(plan.second().attempt, 0)
