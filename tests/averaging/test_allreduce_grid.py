"""One sum over the rounds of a grid: exact, the same bits for all, and every failure names who failed, in any round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.averaging.allreduce import METHOD, PartCoder, Vector
from peerd.averaging.allreduce_round import AveragingPlan, MemberTerms, RoundFailed, plan_of
from peerd.averaging.topology import GroupTopology
from peerd.averaging.work_split import WorkSplitter
from peerd.codec.error_feedback import ErrorFeedback
from peerd.codec.format.frame import TensorFrame
from peerd.codec.policy import CodingPlan
from peerd.core.errors import Refused, RemoteError
from peerd.messages.encoding import Empty
from peerd.messages.swarm import AverageKey, LineInfo
from tests.averaging.test_allreduce import Node, group
from tests.worlds.machines.fakehost import FakeNet
from tests.worlds.machines.grids import attempt_name, order_of, rounds_of
from tests.worlds.machines.workers import InlineWorker

ATTEMPT = b"g" * 16
PATIENCE_S = 5.0
TIMEOUT_S = 200.0


@dataclass
class Swarm:
    """Members of one attempt, and what became of it."""

    net: FakeNet
    nodes: list[Node]
    plans: dict[str, tuple[AveragingPlan, ...]]
    sums: dict[str, Vector] = field(default_factory=dict)
    failed: list[RoundFailed] = field(default_factory=list)

    def of(self, node: Node) -> tuple[AveragingPlan, ...]:
        return self.plans[node.id.text]

    def node(self, peer: str) -> Node:
        return next(node for node in self.nodes if node.id.text == peer)

    async def sum_all(
        self, vectors: Sequence[Vector], coders: Sequence[Callable[[AveragingPlan], PartCoder | None]] = ()
    ) -> None:
        """Round after round, as a conductor has it; the first failure ends them for all."""
        have = {node.id.text: vector for node, vector in zip(self.nodes, vectors, strict=True)}
        for number in range(len(self.of(self.nodes[0]))):
            sums: dict[str, Vector] = {}
            async with trio.open_nursery() as nursery:
                for i, node in enumerate(self.nodes):
                    coder = coders[i](self.of(node)[number]) if coders else None
                    nursery.start_soon(self.sum_one, node, number, have[node.id.text], coder, sums, nursery)
            if self.failed:
                return
            have = sums
        self.sums = have

    async def sum_one(
        self,
        node: Node,
        number: int,
        vector: Vector,
        coder: PartCoder | None,
        sums: dict[str, Vector],
        nursery: trio.Nursery,
    ) -> None:
        try:
            sums[node.id.text] = await node.averaging.sum(self.of(node)[number], vector, InlineWorker(), coder)
        except RoundFailed as error:
            self.failed.append(error)
            nursery.cancel_scope.cancel()


def ordered(
    nodes: list[Node], size: int, terms: MemberTerms, rates: Sequence[float] = (), length: int = 7001
) -> dict[str, tuple[AveragingPlan, ...]]:
    """Each member's plans by a conductor's orders."""
    names, lines = tuple(node.id.text for node in nodes), WorkSplitter()
    for name, rate in zip(names, rates, strict=False):
        mode = "node" if rate else "client"
        lines.tell(name, 0, LineInfo(mode, rate or 1e6, rate or 1e6, length, "float32"))  # type: ignore[arg-type]
    plans: dict[str, list[AveragingPlan]] = {name: [] for name in names}
    for number, groups in enumerate(rounds_of(GroupTopology(lines, size), names)):
        for at, one in enumerate(groups):
            order = order_of(one, attempt_name(number, at), None, TIMEOUT_S, last=True)
            for peer in one.meeting.peers:
                plans[peer].append(plan_of(order, peer, terms))
    return {name: tuple(found) for name, found in plans.items()}


@asynccontextmanager
async def swarm(
    count: int, size: int = 3, align: int = 1, rates: Sequence[float] = (), length: int = 7001
) -> AsyncIterator[Swarm]:
    async with group(count) as (net, nodes):
        yield Swarm(net, nodes, ordered(nodes, size, MemberTerms(1024, PATIENCE_S, align), rates, length))


def vectors_of(count: int, length: int, dtype: str = "float32") -> list[Vector]:
    rng = np.random.default_rng(count * 10_000 + length)
    return [rng.standard_normal(length).astype(dtype) for _ in range(count)]


def exact(vectors: Sequence[Vector]) -> Vector:
    return np.asarray(np.sum([vector.astype("float64") for vector in vectors], axis=0))


@pytest.mark.parametrize("count", [4, 5, 7, 9, 10])
@pytest.mark.parametrize(("length", "dtype"), [(0, "float32"), (1, "float32"), (7001, "float32"), (7001, "float64")])
async def test_all_get_the_same_bits_of_the_sum(autojump_clock: MockClock, count: int, length: int, dtype: str) -> None:
    vectors = vectors_of(count, length, dtype)
    async with swarm(count) as s:
        await s.sum_all(vectors)
        assert {len(plans) > 1 for plans in s.plans.values()} == {True}
        assert len(s.sums) == count
        assert len({total.tobytes() for total in s.sums.values()}) == 1
        for total in s.sums.values():
            np.testing.assert_allclose(total, exact(vectors), rtol=0, atol=1e-5 if dtype == "float32" else 1e-10)


@pytest.mark.parametrize("count", [5, 9, 10])
async def test_unequal_lines_and_clients_get_the_same_bits(autojump_clock: MockClock, count: int) -> None:
    vectors = vectors_of(count, 7001)
    async with swarm(count, rates=[1e6 * (1 + i % 4) if i % 3 else 0.0 for i in range(count)]) as s:
        assert any(plan.shares is not None and 0 in plan.shares for plans in s.plans.values() for plan in plans)
        await s.sum_all(vectors)
        assert len(s.sums) == count
        assert len({total.tobytes() for total in s.sums.values()}) == 1
        np.testing.assert_allclose(next(iter(s.sums.values())), exact(vectors), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["int8", "nf4", "bf16", "dynamic8"])
@pytest.mark.parametrize("count", [5, 9])
async def test_coded_sums_have_the_same_bits_and_what_codes_take_away_is_remembered_once(
    autojump_clock: MockClock, count: int, code: str
) -> None:
    vectors = vectors_of(count, 20_000)
    feedbacks = [ErrorFeedback(CodingPlan(code, 64)) for _ in vectors]  # type: ignore[arg-type]
    missed = [[feedback.begin(vector)] for feedback, vector in zip(feedbacks, vectors, strict=True)]

    def coder_of(own: ErrorFeedback) -> Callable[[AveragingPlan], PartCoder]:
        def coder(plan: AveragingPlan) -> PartCoder:
            if plan.copy:
                return ErrorFeedback(CodingPlan(code, 64))  # type: ignore[arg-type]
            if plan.copies > 1:
                missed[feedbacks.index(own)].append(own.go_on(vectors[0]))
            return own

        return coder

    rates = [1e6 * (1 + i % 4) for i in range(count)]
    async with swarm(count, align=64, rates=rates, length=20_000) as s:
        await s.sum_all(vectors, [coder_of(feedback) for feedback in feedbacks])
        assert len(s.sums) == count
        assert len({total.tobytes() for total in s.sums.values()}) == 1
        for feedback, rounds in zip(feedbacks, missed, strict=True):
            feedback.settle(*rounds)
        left = np.sum([feedback.residual for feedback in feedbacks if feedback.residual is not None], axis=0)
        total = next(iter(s.sums.values()))
        assert np.abs(total - exact(vectors)).max() > 1e-3
        np.testing.assert_allclose(total + left, exact(vectors), rtol=0, atol=2e-5)


# --- failures ------------------------------------------------------------------------------------------------------


def stop_before(node: Node, attempt: bytes, then: Callable[[], Awaitable[None]]) -> None:
    """The node does `then` when this round is to begin, and nothing more of it."""
    original = node.averaging.sum

    async def stopping(plan: AveragingPlan, *rest: object) -> Vector:
        if plan.attempt == attempt:
            await then()
            await trio.sleep_forever()
        return await original(plan, *rest)  # type: ignore[arg-type]

    node.averaging.sum = stopping  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_member_that_hangs_in_a_round_is_named_and_nobody_else(autojump_clock: MockClock, number: int) -> None:
    async with swarm(9) as s:
        hung = s.nodes[4]
        hung.rpc.unserve("average/2")
        stop_before(hung, s.of(hung)[number].attempt, trio.lowlevel.checkpoint)
        began = trio.current_time()
        await s.sum_all(vectors_of(9, 3000))
        assert [error.lost for error in s.failed] == [(hung.id.text,)]
        assert trio.current_time() - began < PATIENCE_S + 2.0


async def test_a_member_that_dies_in_the_second_round_is_named_at_once_and_the_others_go_on(
    autojump_clock: MockClock,
) -> None:
    vectors = vectors_of(9, 3000)
    async with swarm(9) as s:
        dead = s.nodes[4]

        async def die() -> None:
            for other in s.nodes:
                if other is not dead:
                    s.net.cut(dead.id, other.id)

        stop_before(dead, s.of(dead)[1].attempt, die)
        began = trio.current_time()
        await s.sum_all(vectors)
        assert [error.lost for error in s.failed] == [(dead.id.text,)]
        assert trio.current_time() - began < 1.0
        rest = [node for node in s.nodes if node is not dead]
        again = Swarm(s.net, rest, ordered(rest, 3, MemberTerms(1024, PATIENCE_S)))
        left = [vector for node, vector in zip(s.nodes, vectors, strict=True) if node is not dead]
        await again.sum_all(left)
        assert len(again.sums) == 8
        assert len({total.tobytes() for total in again.sums.values()}) == 1
        np.testing.assert_allclose(again.sums[rest[0].id.text], exact(left), rtol=0, atol=1e-5)
        assert not [node for node in rest if node.averaging._rounds or node.averaging._expected]


# --- liars ---------------------------------------------------------------------------------------------------------


async def send(sender: Node, owner: Node, attempt: bytes, part: int, frames: tuple[TensorFrame, ...]) -> None:
    """One message by hand; raises what it is told."""
    first = AverageKey(attempt, part)
    async with sender.rpc.stream(owner.id, METHOD, first, timeout_s=60.0) as call:
        await call.send(first, frames)
        call.finish()
        while await call.receive(Empty) is not None:
            pass


def ones(count: int) -> TensorFrame:
    return TensorFrame("float32", (count,), np.ones(count, dtype="float32").data.cast("B"))


async def test_a_stranger_that_sends_in_a_round_is_refused_and_does_no_harm(autojump_clock: MockClock) -> None:
    async with swarm(9) as s:
        owner, known = s.nodes[0], {peer for plan in s.of(s.nodes[0]) for peer in plan.group}
        stranger = next(node for node in s.nodes if node.id.text not in known)
        for plan in s.of(owner):
            assert stranger.id.text not in plan.group

        async def lie() -> None:
            for plan in s.of(owner):
                with pytest.raises(Refused):
                    await send(stranger, owner, plan.attempt, 0, (ones(256),))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lie)
            await s.sum_all(vectors_of(9, 3000))
        assert not s.failed
        assert len(s.sums) == 9


async def test_a_frame_of_one_round_is_not_taken_for_one_of_another(autojump_clock: MockClock) -> None:
    async with swarm(9) as s:
        owner = s.nodes[0]
        first, second = s.of(owner)
        assert first.attempt != second.attempt
        liar = s.node(next(peer for peer in first.group if peer != owner.id.text))
        part = next(part for part in first.parts(3000, 4) if part.owner == owner.id.text)

        async def lie(*_: object) -> Vector:
            """Its first message is of this round, the next one of the other."""
            key, frames = AverageKey(first.attempt, part.index), (ones(part.end - part.begin),)
            with suppress(RemoteError):
                async with liar.rpc.stream(owner.id, METHOD, key, timeout_s=60.0) as call:
                    await call.send(key, frames)
                    await call.send(AverageKey(second.attempt, part.index + 1), frames)
                    while await call.receive(Empty) is not None:
                        pass
            await trio.sleep_forever()
            raise AssertionError

        liar.averaging.sum = lie  # type: ignore[method-assign]
        await s.sum_all(vectors_of(9, 3000))
        assert [error.lost for error in s.failed] == [(liar.id.text,)]
        assert "another round" in str(s.failed[0])


@pytest.mark.parametrize("what", ["a vector", "a call for one part twice", "too few calls"])
async def test_a_listener_that_does_something_else_is_named(autojump_clock: MockClock, what: str) -> None:
    async with swarm(5) as s:
        plan = next(plan for plans in s.plans.values() for plan in plans if plan.listeners)
        liar = s.node(plan.listeners[0])
        owner = s.node(plan.senders[0])
        part = next(part for part in plan.parts(3000, 4) if part.owner == owner.id.text)
        original = liar.averaging.sum

        async def lie(found: AveragingPlan, *rest: object) -> Vector:
            if found.attempt != plan.attempt:
                return await original(found, *rest)  # type: ignore[arg-type]
            key = AverageKey(plan.attempt, part.index)
            with suppress(RemoteError):
                if what == "a vector":
                    await send(liar, owner, *(plan.attempt, part.index), (ones(part.end - part.begin),))
                async with liar.rpc.stream(owner.id, METHOD, key, timeout_s=60.0) as call:
                    for _ in range(2 if "twice" in what else 1):
                        await call.send(key, ())
                    call.finish()
                    while await call.receive(Empty) is not None:
                        pass
            await trio.sleep_forever()
            raise AssertionError

        liar.averaging.sum = lie  # type: ignore[method-assign, assignment]
        await s.sum_all(vectors_of(5, 3000))
        assert [error.lost for error in s.failed] == [(liar.id.text,)]


async def test_a_part_of_a_sender_that_listens_elsewhere_is_summed_once(autojump_clock: MockClock) -> None:
    """A plan by hand: two senders and a listener, who asks only when the sum has long been made."""
    async with group(3) as (_, nodes):
        names = tuple(node.id.text for node in nodes)
        plan = AveragingPlan(ATTEMPT, names, 1024, PATIENCE_S, names[:2], listeners=names[2:])
        found: dict[int, Vector] = {}

        async def one(i: int, after_s: float) -> None:
            await trio.sleep(after_s)
            vector = np.full(3000, float(i + 1), dtype="float32")
            found[i] = await nodes[i].averaging.sum(plan, vector, InlineWorker())

        async with trio.open_nursery() as nursery:
            for i, after_s in enumerate((0.0, 0.0, 3.0)):
                nursery.start_soon(one, i, after_s)
        assert [found[i].tolist() for i in range(3)] == [[3.0] * 3000] * 3
