"""Averaging with liars: what they send is refused, they are named, and the others' next attempt succeeds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.averaging.allreduce import METHOD, PartCoder, PlainParts, Vector
from peerd.averaging.allreduce_round import AveragingPlan, Part, RoundFailed
from peerd.codec.error_feedback import ErrorFeedback
from peerd.codec.format.frame import TensorFrame
from peerd.codec.policy import CodingPlan
from peerd.core.errors import PeerdError, Refused, RemoteError
from peerd.messages.encoding import Empty
from peerd.messages.swarm import AverageKey, Mbs, Party, Prepare
from peerd.rpc.rpc import Answer, CallStream, Incoming
from tests.averaging.test_allreduce import Node, group, plan
from tests.kit.declared import ANY, declared
from tests.worlds.machines.fakehost import FakeNet
from tests.worlds.machines.workers import InlineWorker

T = TypeVar("T")
LENGTH = 3000  # float32: a share of each of three in four parts of 1 KiB
PARTS_OF_ONE = 4
PATIENCE_S = 5.0

Message = tuple[AverageKey, tuple[TensorFrame, ...]]


def plain(values: Vector) -> TensorFrame:
    return PlainParts().encode(0, values)


def as_it_is(part: Part, attempt: bytes) -> Message:
    return AverageKey(attempt, part.index), (plain(np.ones(part.end - part.begin, dtype="float32")),)


class SlowWorker(InlineWorker):
    """Takes ten milliseconds for a job, so that not all happens at one and the same time."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0) -> T:
        await trio.sleep(0.01)
        return job()


async def first_to_fail(
    honest: list[Node], how: AveragingPlan, coders: Iterable[PartCoder | None] = (None, None), value: float = 1.0
) -> RoundFailed:
    """As a conductor has it: who fails first is believed, and the others' attempts are called off."""
    failed: list[RoundFailed] = []
    async with trio.open_nursery() as nursery:

        async def one(node: Node, coder: PartCoder | None) -> None:
            try:
                await node.averaging.sum(how, np.full(LENGTH, value, dtype="float32"), SlowWorker(), coder)
            except RoundFailed as error:
                failed.append(error)
                nursery.cancel_scope.cancel()

        for node, coder in zip(honest, coders, strict=True):
            nursery.start_soon(one, node, coder)
    return failed[0]


async def assert_goes_on(net: FakeNet, honest: list[Node]) -> None:
    """The others' next attempt gives the right sum, nothing is left behind, and no handler crashed."""
    how, sums = plan(honest, attempt=b"b" * 16), []

    async def one(node: Node, value: float) -> None:
        vector = np.full(LENGTH, value, dtype="float32")
        sums.append(await node.averaging.sum(how, vector, InlineWorker()))

    async with trio.open_nursery() as nursery:
        for value, node in enumerate(honest, 1):
            nursery.start_soon(one, node, float(value))
    assert len(sums) == len(honest)
    for total in sums:
        assert (total == sum(range(1, len(honest) + 1))).all()
    await trio.sleep(60)
    for node in honest:
        assert node.rpc.status()["held_bytes"] == 0
        assert node.rpc.status()["running"] == 0
        assert not node.averaging._rounds
    assert not [crash for host in net._hosts.values() for crash in host.crashes if not isinstance(crash[1], PeerdError)]


@asynccontextmanager
async def liar_and_others(attempt: bytes = b"a" * 16) -> AsyncIterator[tuple[FakeNet, Node, list[Node], AveragingPlan]]:
    async with group(3) as (net, nodes):
        yield net, nodes[1], [nodes[0], nodes[2]], plan(nodes, attempt, PATIENCE_S)


async def exchange(liar: Node, owner: Node, messages: list[Message]) -> None:
    """One call of the liar's; what it is told does not matter to it."""
    with suppress(RemoteError):
        async with liar.rpc.stream(owner.id, METHOD, messages[0][0], timeout_s=60.0) as call:
            for body, frames in messages:
                await call.send(body, frames)
            call.finish()
            while await call.receive(Empty) is not None:
                pass


def mine(how: AveragingPlan, owner: Node) -> list[Part]:
    return [part for part in how.parts(LENGTH, 4) if part.owner == owner.id.text]


def part_of(count: int, value: float = 1.0, dtype: str = "float32") -> tuple[TensorFrame, ...]:
    return (plain(np.full(count, value, dtype=dtype)),)


def coded(count: int) -> tuple[TensorFrame, ...]:
    return (ErrorFeedback(CodingPlan("int8", 64)).encode(0, np.ones(count, dtype="float32")),)


SENT: dict[str, Callable[[AverageKey, int], Message]] = {
    "NaN": lambda key, count: (key, part_of(count, np.nan)),
    "infinity": lambda key, count: (key, part_of(count, np.inf)),
    "values that overflow only in the sum": lambda key, count: (key, part_of(count, float(np.finfo("float32").max))),
    "float64": lambda key, count: (key, part_of(count, dtype="float64")),
    "int32": lambda key, count: (key, part_of(count, 1, "int32")),
    "half as many values": lambda key, count: (key, part_of(count // 2)),
    "no values": lambda key, count: (key, part_of(0)),
    "another shape": lambda key, count: (key, (TensorFrame("float32", (1, count), bytes(4 * count)),)),
    "no frame": lambda key, count: (key, ()),
    "a code in a plain run": lambda key, count: (key, coded(count)),
    "a packed part": lambda key, count: (key, (TensorFrame("float32", (count,), b"\0" * 9, lossless=True),)),
    "a part beyond the last": lambda key, count: (AverageKey(key.attempt, 12), part_of(count)),
    "a huge index": lambda key, count: (AverageKey(key.attempt, (1 << 31) - 1), part_of(count)),
    "a part of its own share": lambda key, count: (AverageKey(key.attempt, PARTS_OF_ONE), part_of(count)),
    "a part of another attempt": lambda key, count: (AverageKey(b"z" * 16, key.part), part_of(count)),
}


@pytest.mark.parametrize("what", SENT)
@pytest.mark.parametrize("at", [0, PARTS_OF_ONE - 1])
async def test_a_sender_of_nonsense_is_refused_and_named(autojump_clock: MockClock, what: str, at: int) -> None:
    """Its `at`-th part to one owner is bad, all others are as they should be."""
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:
        for owner in honest:
            messages = [as_it_is(part, how.attempt) for part in mine(how, owner)]
            if owner is honest[0]:
                part = mine(how, owner)[at]
                messages[at] = SENT[what](messages[at][0], part.end - part.begin)
            nursery.start_soon(exchange, liar, owner, messages)
        began = trio.current_time()
        failed = await first_to_fail(honest, how, value=1e33)
        assert failed.lost == (liar.id.text,), failed
        unknown = what == "a part of another attempt" and at == 0  # of which they may hear yet
        assert trio.current_time() - began < (PATIENCE_S + 2.0 if unknown else 1.0)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await assert_goes_on(net, honest)


async def test_more_than_a_part_may_hold_is_not_received(autojump_clock: MockClock) -> None:
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:
        for owner in honest:
            key = AverageKey(how.attempt, mine(how, owner)[0].index)
            nursery.start_soon(exchange, liar, owner, [(key, part_of(3 << 20))])
        assert (await first_to_fail(honest, how)).lost == (liar.id.text,)
        await assert_goes_on(net, honest)


@pytest.mark.parametrize("count", [0, 1, PARTS_OF_ONE - 1])
async def test_a_sender_that_ends_early_or_leaves_is_named(autojump_clock: MockClock, count: int) -> None:
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:

        async def some(owner: Node) -> None:
            async with liar.rpc.stream(owner.id, METHOD, AverageKey(how.attempt, 0), timeout_s=60.0) as call:
                for part in mine(how, owner)[:count]:
                    await call.send(*as_it_is(part, how.attempt))
                if owner is honest[0]:
                    call.finish()
                    with suppress(RemoteError):
                        await call.receive(Empty)

        for owner in honest:
            nursery.start_soon(some, owner)
        assert (await first_to_fail(honest, how)).lost == (liar.id.text,)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await assert_goes_on(net, honest)


async def test_a_part_that_comes_twice_is_refused_and_its_sender_named(autojump_clock: MockClock) -> None:
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:
        twice = [as_it_is(mine(how, honest[0])[0], how.attempt)] * 2
        nursery.start_soon(exchange, liar, honest[0], twice)
        assert (await first_to_fail(honest, how)).lost == (liar.id.text,)
        await assert_goes_on(net, honest)


async def test_large_but_finite_values_are_summed(autojump_clock: MockClock) -> None:
    """Averaging does not judge values: no peer is blamed before a sum overflows."""
    async with group(3) as (_, nodes):
        how, sums = plan(nodes), []

        async def one(i: int) -> None:
            vector = np.full(LENGTH, (1.0, 1e30, 1.0)[i], dtype="float32")
            sums.append(await nodes[i].averaging.sum(how, vector, InlineWorker()))

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(one, i)
        assert [float(total.min()) for total in sums] == [float(np.float32(1e30))] * 3


async def test_parts_for_an_unknown_attempt_wait_for_it_and_are_refused_in_time(autojump_clock: MockClock) -> None:
    async with liar_and_others() as (net, liar, honest, _):
        refused: list[str] = []

        async def one() -> None:
            key = AverageKey(b"z" * 16, 0)
            try:
                async with liar.rpc.stream(honest[0].id, METHOD, key, timeout_s=3600.0) as call:
                    for _ in range(100):
                        await call.send(key, part_of(256))
                    await call.receive(Empty)
            except RemoteError as error:
                refused.append(str(error))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(one)
                await trio.sleep(1)
                assert honest[0].rpc.status()["held_bytes"] < 64 << 10
                assert honest[0].rpc.status()["running"] <= 8
        assert len(refused) == 20
        await assert_goes_on(net, honest)


ANSWERS: dict[str, Callable[[list[int]], list[tuple[TensorFrame, ...]]] | Exception | None] = {
    "another shape": lambda sizes: [part_of(7)],
    "NaN": lambda sizes: [part_of(sizes[0], np.nan)],
    "infinity": lambda sizes: [part_of(sizes[0], np.inf)],
    "float64": lambda sizes: [part_of(sizes[0], dtype="float64")],
    "a code": lambda sizes: [coded(sizes[0])],
    "no frame": lambda sizes: [()],
    "no sum": lambda sizes: [],
    "too few": lambda sizes: [part_of(size) for size in sizes[:-1]],
    "too many": lambda sizes: [part_of(size) for size in (*sizes, sizes[0])],
    "nothing": None,
    "a refusal": Refused("I do not feel like it"),
}


@pytest.mark.parametrize("what", ANSWERS)
async def test_an_owner_that_answers_nonsense_is_named(autojump_clock: MockClock, what: str) -> None:
    """It sends what it has to, takes what it gets, and lies about the sums."""
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:

        async def handler(call: Incoming[AverageKey], parts: CallStream) -> None:
            await parts.receive(AverageKey)
            if (answers := ANSWERS[what]) is None:
                await trio.sleep_forever()
            elif isinstance(answers, Exception):
                raise answers
            else:
                for frames in answers([part.end - part.begin for part in mine(how, liar)]):
                    await parts.send(Empty(), frames)

        async def lives(call: Incoming[AverageKey]) -> Answer[Empty]:
            return Answer(Empty())

        liar.rpc.unserve("average/2")
        liar.rpc.serve("average/2/alive", AverageKey, lives, declared=ANY)
        liar.rpc.serve_stream(METHOD, AverageKey, handler, declared=declared(frames=1, frame_bytes=1 << 20))
        for owner in honest:
            messages = [as_it_is(part, how.attempt) for part in mine(how, owner)]
            nursery.start_soon(exchange, liar, owner, messages)
        began = trio.current_time()
        assert (await first_to_fail(honest, how)).lost == (liar.id.text,)
        assert trio.current_time() - began < PATIENCE_S + 2.0
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await assert_goes_on(net, honest)


@pytest.mark.parametrize("what", ["plain", "NaN in a code", "another length"])
async def test_a_coded_run_takes_plain_parts_and_no_others(autojump_clock: MockClock, what: str) -> None:
    """The code of a part is its sender's choice, as everywhere; its content is not."""
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:
        coders = [ErrorFeedback(CodingPlan("int8", 64)) for _ in honest]
        for owner in honest:
            messages = [as_it_is(part, how.attempt) for part in mine(how, owner)]
            if what == "NaN in a code":
                payload = bytearray(coded(256)[0].payload)
                payload[:4] = np.float32("nan").tobytes()
                messages[0] = (messages[0][0], (replace(coded(256)[0], payload=bytes(payload)),))
            elif what == "another length":
                messages[0] = (messages[0][0], coded(64))
            nursery.start_soon(exchange, liar, owner, messages)
        if what != "plain":
            assert (await first_to_fail(honest, how, coders)).lost == (liar.id.text,)
        else:  # its share is never summed: what it sent was taken all the same
            with trio.fail_after(60):
                assert (await first_to_fail(honest, how, coders)).lost == (liar.id.text,)
            assert all(node.averaging.aggregated_bytes for node in honest)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await assert_goes_on(net, honest)


async def test_who_only_passes_a_failure_on_is_not_named_before_who_caused_it(autojump_clock: MockClock) -> None:
    """One honest member finds the liar out; the other only sees that its call to the first was refused."""
    async with liar_and_others() as (net, liar, honest, how), trio.open_nursery() as nursery:
        bad = (AverageKey(how.attempt, mine(how, honest[0])[0].index), part_of(256, np.nan))
        nursery.start_soon(exchange, liar, honest[0], [bad])
        failed: dict[str, tuple[float, RoundFailed]] = {}

        async def one(node: Node) -> None:
            try:
                await node.averaging.sum(how, np.ones(LENGTH, dtype="float32"), InlineWorker())
            except RoundFailed as error:
                failed[node.id.text] = (trio.current_time(), error)

        async with trio.open_nursery() as both:
            for node in honest:
                both.start_soon(one, node)
        first, second = failed[honest[0].id.text], failed[honest[1].id.text]
        assert first[1].lost == (liar.id.text,)
        assert second[0] - first[0] > 0.5  # time enough for a conductor to call it off
        await assert_goes_on(net, honest)


def parties(nodes: list[Node], *shares: float, mode: str = "node") -> list[Party]:
    return [Party(node.id.text, mode, share) for node, share in zip(nodes, shares, strict=True)]  # type: ignore[arg-type]


def order(nodes: list[Node], split: list[Party]) -> Prepare:
    names = sorted(node.id.text for node in nodes)
    return Prepare(b"f" * 16, 1, 1, b"c" * 16, b"", names, Mbs(), 1, 60.0, split, 0, LENGTH, "float32")


async def test_shares_that_make_no_sense_are_not_begun(autojump_clock: MockClock) -> None:
    async with group(3) as (net, nodes):
        stranger = [Party("somebody else", "node", 0.0)]
        nan, inf = float("nan"), float("inf")
        wrong = [
            parties(nodes, 0.5, 0.5, 0.5),
            parties(nodes, 0.0, 0.0, 0.0),
            parties(nodes, 2.0, -0.5, -0.5),
            parties(nodes, nan, 0.5, 0.5),
            parties(nodes, inf, 0.0, 0.0),
            parties(nodes, 0.5, 0.25, 0.25, mode="client"),
            parties(nodes[:2], 0.5, 0.5),
            parties(nodes, 0.5, 0.25, 0.25) + stranger,
            parties([*nodes, nodes[0]], 0.25, 0.25, 0.25, 0.25),
        ]
        for split in wrong:
            with pytest.raises(ValueError):
                AveragingPlan.of(order(nodes, split), 1024, PATIENCE_S)
        await assert_goes_on(net, nodes)


async def test_orders_that_differ_from_member_to_member_end_in_time(autojump_clock: MockClock) -> None:
    """A conductor tells each member another division: nobody takes what the other's order says."""
    async with group(3) as (net, nodes):
        shares = [(0.6, 0.2, 0.2), (0.2, 0.6, 0.2), (0.2, 0.2, 0.6)]
        ended: list[RoundFailed] = []

        async def one(i: int) -> None:
            how = AveragingPlan.of(order(nodes, parties(nodes, *shares[i])), 1024, PATIENCE_S)
            try:
                await nodes[i].averaging.sum(how, np.ones(LENGTH, dtype="float32"), InlineWorker())
            except RoundFailed as error:
                ended.append(error)

        with trio.fail_after(PATIENCE_S + 2.0):
            async with trio.open_nursery() as nursery:
                for i in range(3):
                    nursery.start_soon(one, i)
        assert len(ended) == 3
        await assert_goes_on(net, nodes)
