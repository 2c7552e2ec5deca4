"""All-reduce in unequal shares: helpers that bring nothing, clients that sum nothing, and plans that lie."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.averaging.allreduce import PlainParts, Vector
from peerd.averaging.allreduce_round import AveragingPlan, RoundFailed
from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import LocalError, Refused
from tests.averaging.test_allreduce import Node, group, run_all, send_part
from tests.worlds.machines.workers import InlineWorker


def plan(
    nodes: list[Node], senders: list[Node], shares: tuple[float, ...], length: int, dtype: str = "float32"
) -> AveragingPlan:
    names = tuple(node.id.text for node in nodes)
    sending = tuple(node.id.text for node in senders)
    return AveragingPlan(b"a" * 16, names, 1024, 5.0, sending, shares, length, dtype)


@pytest.mark.parametrize(
    "shares",
    [(0.3, 0.2, 0.0, 0.5), (0.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25), (0.0, 0.9, 0.1, 0.0)],
)
@pytest.mark.parametrize("length", [1, 3, 7001])
async def test_senders_get_the_sum_and_a_helper_nothing(
    autojump_clock: MockClock, shares: tuple[float, ...], length: int
) -> None:
    """The third is a client where its share is 0, the last a helper."""
    rng = np.random.default_rng(length)
    async with group(4) as (_, nodes):
        senders = nodes[:3]
        vectors: list[Vector | None] = [rng.standard_normal(length).astype("float32") for _ in senders]
        results = await run_all(nodes, [*vectors, None], plan(nodes, senders, shares, length))
        expected = vectors[0] + vectors[1] + vectors[2]  # type: ignore[operator]
        for result in results[:3]:
            assert isinstance(result, np.ndarray)
            assert result.tobytes() == expected.tobytes()
        assert isinstance(results[3], np.ndarray)
        assert len(results[3]) == 0


async def test_sums_are_made_in_the_order_of_the_senders_whoever_makes_them(autojump_clock: MockClock) -> None:
    """Three numbers whose sum depends on the order."""
    async with group(4) as (_, nodes):
        values = [1.0, 1e8, -1e8]
        vectors: list[Vector | None] = [np.full(700, value, dtype="float32") for value in values]
        how = plan(nodes, nodes[:3], (0.25, 0.25, 0.25, 0.25), 700)
        for result in (await run_all(nodes, [*vectors, None], how))[:3]:
            assert isinstance(result, np.ndarray)
            assert (result == (np.float32(1) + np.float32(1e8)) - np.float32(1e8)).all()


@pytest.mark.parametrize("missing", [1, 2], ids=["a sender", "a helper"])
async def test_who_never_comes_is_named(autojump_clock: MockClock, missing: int) -> None:
    async with group(3) as (_, nodes):
        how, ones = plan(nodes, nodes[:2], (0.5, 0.0, 0.5), 3000), np.ones(3000, dtype="float32")
        there = [0, 3 - missing]
        results = await run_all([nodes[at] for at in there], [ones if at < 2 else None for at in there], how)
        assert [r.lost for r in results if isinstance(r, RoundFailed)] == [(nodes[missing].id.text,)] * 2


async def test_values_that_are_not_finite_are_found_by_a_helper(autojump_clock: MockClock) -> None:
    async with group(3) as (_, nodes):
        vectors: list[Vector | None] = [np.ones(3000, dtype="float32") for _ in nodes[:2]]
        vectors[1] = np.full(3000, np.inf, dtype="float32")
        results = await run_all(nodes, [*vectors, None], plan(nodes, nodes[:2], (0.0, 0.0, 1.0), 3000))
        assert all(isinstance(result, RoundFailed) for result in results)
        assert any(isinstance(r, RoundFailed) and r.lost == (nodes[1].id.text,) for r in results)


class Counting(PlainParts):
    """Counts what it decodes."""

    decoded = 0

    def decode(self, frame: TensorFrame, like: Vector) -> Vector:
        self.decoded += 1
        return super().decode(frame, like)


async def test_what_nobody_asked_for_is_refused_before_it_is_decoded(autojump_clock: MockClock) -> None:
    """A stranger's part, a helper's, and one beyond the last."""
    async with group(4) as (_, nodes):
        how = plan(nodes[:3], nodes[:2], (0.5, 0.0, 0.5), 512)  # two parts: the first node's and the helper's
        coder, vector = Counting(), np.ones(512, dtype="float32")
        frame = TensorFrame("float32", (256,), np.ones(256, dtype="float32").data.cast("B"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes[0].averaging.sum, how, vector, InlineWorker(), coder)
            await trio.testing.wait_all_tasks_blocked()
            for sender, part in ((nodes[3], 0), (nodes[2], 0), (nodes[3], 1), (nodes[3], 2)):
                with pytest.raises(Refused):
                    await send_part(sender, nodes[0], how.attempt, part, frame)
            assert coder.decoded == 0
            nursery.start_soon(nodes[1].averaging.sum, how, vector, InlineWorker())
            nursery.start_soon(nodes[2].averaging.sum, how, None, InlineWorker())


@pytest.mark.parametrize(("length", "dtype"), [(3000, "object"), (3000, ""), (-1, "float32"), (1 << 40, "float32")])
async def test_a_helper_sums_no_nonsense(autojump_clock: MockClock, length: int, dtype: str) -> None:
    async with group(3) as (_, nodes):
        how = plan(nodes, nodes[:2], (0.5, 0.0, 0.5), length, dtype)
        with pytest.raises(RoundFailed):
            await nodes[2].averaging.sum(how, None, InlineWorker())


async def test_a_plan_for_another_vector_is_not_begun(autojump_clock: MockClock) -> None:
    async with group(3) as (_, nodes):
        how = plan(nodes, nodes[:2], (0.5, 0.0, 0.5), 3000)
        for vector in (np.ones(2999, dtype="float32"), np.ones(3000, dtype="float64")):
            with pytest.raises(RoundFailed) as failed:
                await nodes[0].averaging.sum(how, vector, InlineWorker())
            assert failed.value.lost == (nodes[0].id.text,)


async def test_nobody_takes_another_part_than_the_plan_gives(autojump_clock: MockClock) -> None:
    async with group(4) as (_, nodes):
        how = plan(nodes[:3], nodes[:2], (0.5, 0.0, 0.5), 3000)
        vector = np.ones(3000, dtype="float32")
        for node, brought in ((nodes[0], None), (nodes[2], vector), (nodes[3], None)):
            with pytest.raises(LocalError):
                await node.averaging.sum(how, brought, InlineWorker())
