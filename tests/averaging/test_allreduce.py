"""All-reduce between peers: the same bits for all, and every failure names who failed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from peerd.averaging.allreduce import METHOD, AllReduceService, PartCoder, PlainParts, Vector
from peerd.averaging.allreduce_round import AveragingPlan, RoundFailed
from peerd.codec.error_feedback import ErrorFeedback
from peerd.codec.format.frame import TensorFrame
from peerd.codec.policy import CodingPlan
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_OUTBOX_BYTES
from peerd.messages.encoding import Empty
from peerd.messages.swarm import AverageKey
from peerd.rpc.rpc import Rpc
from tests.worlds.machines.fakehost import FakeNet, TrioClock, fake_net
from tests.worlds.machines.workers import InlineWorker

T = TypeVar("T")


@dataclass
class Node:
    id: PeerId
    rpc: Rpc
    averaging: AllReduceService


@asynccontextmanager
async def group(count: int) -> AsyncIterator[tuple[FakeNet, list[Node]]]:
    async with fake_net() as net, trio.open_nursery() as nursery:
        nodes = []
        for i in range(count):
            host = net.host(f"peer {i}")
            rpc = Rpc(host, TrioClock())
            await nursery.start(rpc.run)
            nodes.append(Node(host.id, rpc, AllReduceService(rpc, host.id)))
        yield net, sorted(nodes, key=lambda node: node.id.text)
        nursery.cancel_scope.cancel()


def plan(nodes: list[Node], attempt: bytes = b"a" * 16, patience_s: float = 5.0) -> AveragingPlan:
    return AveragingPlan(attempt, tuple(node.id.text for node in nodes), part_bytes=1024, patience_s=patience_s)


async def run_all(
    nodes: list[Node], vectors: Sequence[Vector | None], how: AveragingPlan
) -> list[Vector | RoundFailed]:
    results: list[Vector | RoundFailed] = [np.empty(0)] * len(nodes)

    async def one(i: int) -> None:
        try:
            results[i] = await nodes[i].averaging.sum(how, vectors[i], InlineWorker())
        except RoundFailed as error:
            results[i] = error

    async with trio.open_nursery() as nursery:
        for i in range(len(nodes)):
            nursery.start_soon(one, i)
    return results


async def send_part(sender: Node, owner: Node, attempt: bytes, part: int, frame: TensorFrame) -> TensorFrame | None:
    """One part by hand; the sum of it, or None."""
    first = AverageKey(attempt, part)
    async with sender.rpc.stream(owner.id, METHOD, first, timeout_s=5.0) as call:
        await call.send(first, (frame,))
        call.finish()
        answer = await call.receive(Empty)
        return answer.frames[0] if answer is not None else None


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 7001])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_all_get_the_same_bits_of_the_sum(autojump_clock: MockClock, count: int, length: int, dtype: str) -> None:
    rng = np.random.default_rng(count * 10_000 + length)
    async with group(count) as (_, nodes):
        vectors = [rng.standard_normal(length).astype(dtype) for _ in nodes]
        results = await run_all(nodes, vectors, plan(nodes))
        expected = vectors[0].copy()
        for vector in vectors[1:]:
            expected += vector
        for result in results:
            assert isinstance(result, np.ndarray)
            assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("code", ["none", "int8"])
async def test_small_plain_parts_are_summed_at_once_and_coded_ones_by_the_worker(
    autojump_clock: MockClock, code: str
) -> None:
    """Coding costs milliseconds that the loop does not have, however small the parts are."""
    jobs: list[str] = []

    class Listed(InlineWorker):
        async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0) -> T:
            jobs.append(name)
            return job()

    def coder() -> PartCoder:
        return PlainParts() if code == "none" else ErrorFeedback(CodingPlan(code))

    async with group(3) as (_, nodes), trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.averaging.sum, plan(nodes), np.ones(3000, dtype="float32"), Listed(), coder())
    assert set(jobs) == (set() if code == "none" else {"code a part", "sum a part", "take a sum"})


async def test_a_silent_member_ends_the_round_and_is_named(autojump_clock: MockClock) -> None:
    async with group(3) as (_, nodes):
        vectors = [np.ones(3000, dtype="float32") for _ in nodes]
        began = trio.current_time()
        results = await run_all(nodes[:2], vectors[:2], plan(nodes))
        for result in results:
            assert isinstance(result, RoundFailed)
            assert nodes[2].id.text in result.lost
            assert len(result.lost) == 1
        assert trio.current_time() - began < 12.0


async def test_a_member_whose_answer_queues_on_a_full_line_is_not_named_in_place_of_a_silent_one(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, slow = AllReduceService._alive, set[str]()

    async def late(self: AllReduceService, call: Any) -> Any:
        await trio.sleep(1.0 if self._own in slow else 0.0)
        return await answer(self, call)

    monkeypatch.setattr(AllReduceService, "_alive", late)
    async with group(3) as (_, nodes):
        slow.update(node.id.text for node in nodes[:2])
        results = await run_all(nodes[:2], [np.ones(3000, dtype="float32")] * 2, plan(nodes))
        assert [r.lost for r in results if isinstance(r, RoundFailed)] == [(nodes[2].id.text,)] * 2


async def test_a_lost_link_ends_the_round_at_once(autojump_clock: MockClock) -> None:
    async with group(2) as (net, nodes):
        net.cut(nodes[0].id, nodes[1].id)
        began = trio.current_time()
        results = await run_all(nodes, [np.ones(3000, dtype="float32")] * 2, plan(nodes))
        assert [r.lost for r in results if isinstance(r, RoundFailed)] == [(nodes[1].id.text,), (nodes[0].id.text,)]
        assert trio.current_time() - began < 1.0


async def test_values_that_are_not_finite_name_their_sender(autojump_clock: MockClock) -> None:
    async with group(3) as (_, nodes):
        vectors = [np.ones(3000, dtype="float32") for _ in nodes]
        vectors[1][2000] = np.nan
        results = await run_all(nodes, vectors, plan(nodes))
        assert all(isinstance(result, RoundFailed) for result in results)
        assert any(isinstance(r, RoundFailed) and r.lost == (nodes[1].id.text,) for r in results)


async def test_a_member_that_does_not_take_its_sums_fills_no_queue(autojump_clock: MockClock) -> None:
    """Sums that exceed a call's queue wait uncopied: as the one sum for all members."""
    async with group(2) as (_, (lazy, honest)):
        how = AveragingPlan(b"a" * 16, (lazy.id.text, honest.id.text), 64 << 10, 30.0, shares=(0.0, 1.0))
        vector = np.ones(1 << 20, dtype="float32")
        parts = how.parts(len(vector), 4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(honest.averaging.sum, how, vector, InlineWorker())
            await trio.testing.wait_all_tasks_blocked()
            (state,) = honest.averaging._rounds.values()
            stream = lazy.rpc.stream(honest.id, METHOD, AverageKey(how.attempt, 0), timeout_s=60.0)
            async with stream as call:
                for part in parts:
                    values = vector[part.begin : part.end]
                    frame = TensorFrame("float32", values.shape, values.data.cast("B"))
                    await call.send(AverageKey(how.attempt, part.index), (frame,))
                await trio.testing.wait_all_tasks_blocked()
                (returns,) = state.returns
                assert returns._due, "it is owed more than its call takes"
                assert returns._parts.full
                outbox = returns._parts._outbox
                assert outbox._put_bytes - outbox._sent_bytes <= RPC_OUTBOX_BYTES + (65 << 10)
                call.finish()
                for _ in parts:
                    assert await call.receive(Empty) is not None
                assert await call.receive(Empty) is None
