"""Payloads that grow while they are sent, where it takes a fake host or a raw stream to see what happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.core.errors import LocalError, PeerdError, Unreachable
from peerd.core.ids import PeerId
from peerd.messages.encoding import encode
from peerd.rpc.loopback import LoopbackStream, local_pair
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.outbox import GrowingPayload, Outbox
from peerd.rpc.rpc import Answer, Encoded, Incoming, Rpc
from tests.worlds.machines.fakehost import FakeHost, TrioClock
from tests.worlds.machines.rpc_cases import FRAMES, Held, Pair, Text, echo, fake_pair
from tests.worlds.machines.rpc_growing_cases import UNFINISHED, Making, settled

Clock = trio.testing.MockClock
ONE, OTHER = (PeerId.from_public_key(bytes([number]) * 32) for number in (1, 2))


def request(name: bytes, call_id: int = 1, timeout_s: float = 600.0) -> bytes:
    return wire.encode_call(wire.REQUEST, call_id, name, timeout_s, encode(Text("x")))


@asynccontextmanager
async def growing_answer(timeout_s: float = 600.0) -> AsyncIterator[tuple[Pair, FakeHost, Making, LoopbackStream]]:
    """Two peers, the server's host, its answer, which grows, and the stream on which it was asked for."""
    async with fake_pair() as (pair, _, a_host, b_host):
        making = Making(ready=1000)

        async def give(call: Incoming[Text]) -> Answer[Text]:
            return Answer(call.body, (making.frame,))

        pair.b.serve("t/1/give", Text, give, declared=FRAMES)
        stream = await a_host.open_stream(b_host.id, "/peerd/t/1")
        await stream.send(request(b"give", timeout_s=timeout_s))
        yield pair, b_host, making, stream


async def read_all(stream: LoopbackStream) -> bytes:
    got = bytearray()
    while data := await stream.receive_some(1 << 16):
        got += data
    return bytes(got)


@pytest.mark.parametrize("half_closed", [False, True])
async def test_an_answer_being_made_ends_when_its_caller_resets_the_stream(
    half_closed: bool, autojump_clock: Clock
) -> None:
    async with growing_answer() as (pair, b_host, making, stream):
        if half_closed:
            await stream.close_write()
        await making.asked.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["running"] == 1
        stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        assert making.left.is_set()
        assert pair.b.status()["running"] == 0
        assert not b_host.crashes


async def test_a_server_that_has_stopped_reading_notices_a_reset_while_an_answer_is_made(autojump_clock: Clock) -> None:
    async with growing_answer() as (pair, _, making, stream):
        await making.asked.wait()
        await stream.send(request(b"none", 2))  # the outbox is full: this waits for room
        await trio.testing.wait_all_tasks_blocked()
        stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        assert making.left.is_set()
        await settled(pair)


async def test_a_half_closed_caller_still_gets_an_answer_that_grows(autojump_clock: Clock) -> None:
    async with growing_answer() as (pair, _, making, stream):
        await stream.close_write()
        await making.asked.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(making.make, 1)
            assert (await read_all(stream)).endswith(making.final)
        await settled(pair)


async def test_the_servers_deadline_ends_an_answer_that_is_never_made(autojump_clock: Clock) -> None:
    async with growing_answer(3.0) as (pair, b_host, making, stream):
        start = trio.current_time()
        with pytest.raises(Unreachable):
            await read_all(stream)
        assert trio.current_time() - start == pytest.approx(3.0)
        assert making.left.is_set()
        await settled(pair)
        assert not b_host.crashes  # too slow is nobody's bug


async def test_a_service_that_stops_ends_what_is_being_made_on_both_sides(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        held = Held()
        pair.b.serve("t/1/held", Text, held, declared=FRAMES)
        rpc, making = Rpc(a_host, TrioClock()), Making(ready=1 << 20)
        async with trio.open_nursery() as nursery, trio.open_nursery() as running:
            await running.start(rpc.run)

            async def call() -> None:
                with pytest.raises(Unreachable):
                    await rpc.call(b_host.id, "t/1/held", Text(""), Text, frames=(making.frame,), timeout_s=600)

            nursery.start_soon(call)
            await making.asked.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert pair.b.status()["held_bytes"]
            running.cancel_scope.cancel()
        assert making.left.is_set()
        await settled(pair)
        assert trio.current_time() < 10


async def test_a_peer_that_cannot_be_reached_ends_a_call_before_its_payload_is_made(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, net, a_host, b_host):
        net.cut(a_host.id, b_host.id)
        making = Making()
        with pytest.raises(Unreachable):
            await pair.a.call(b_host.id, "t/1/echo", Text(""), Text, frames=(making.frame,), timeout_s=600)
        with pytest.raises(Unreachable):
            async with pair.a.stream(b_host.id, "t/1/echo", Text(""), frames=(making.frame,), timeout_s=600):
                pass
        await settled(pair)


async def test_an_idle_stream_is_used_again_after_a_payload_that_grew(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
        for seed in range(3):
            making = Making(500_000, seed=seed)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(making.make, seed)
                await pair.a.call(b_host.id, "t/1/echo", Text(""), Text, frames=(making.frame,), timeout_s=5)
        assert len(a_host.opened) == 1
        making.ready_bytes = 0
        making.fail(PeerdError("no"))
        with pytest.raises(PeerdError, match="no"):
            await pair.a.call(b_host.id, "t/1/echo", Text(""), Text, frames=(making.frame,), timeout_s=5)
        await pair.a.call(b_host.id, "t/1/echo", Text(""), Text, frames=(Making(100, 100).frame,), timeout_s=5)
        assert len(a_host.opened) == 2


# The outbox by itself.


def growing(making: Making) -> GrowingPayload:
    return GrowingPayload(memoryview(making.buffer), making)


def outbox_and_reader(nursery: trio.Nursery) -> tuple[Outbox, LoopbackStream, LoopbackStream]:
    ours, theirs = local_pair(ONE, OTHER, "/peerd/t/1")
    outbox = Outbox()
    nursery.start_soon(outbox.run, ours)
    return outbox, ours, theirs


async def test_what_was_put_behind_a_growing_payload_follows_it(autojump_clock: Clock) -> None:
    async with trio.open_nursery() as nursery:
        outbox, _, theirs = outbox_and_reader(nursery)
        making = Making(100_000, 10)
        message = [b"head", growing(making), b"tail"]
        outbox.put(*message)
        outbox.put(b"next")
        nursery.start_soon(outbox.feed, message)
        await trio.testing.wait_all_tasks_blocked()
        assert await theirs.receive_some(1 << 20) == b"head" + making.final[:10]
        outbox.put(b"and next")  # while the writer waits: not at once, though it is small
        await trio.testing.wait_all_tasks_blocked()
        assert outbox.pending
        making.grow(100_000)
        await outbox.flushed()
        assert not outbox.pending
        assert await theirs.receive_some(1 << 20) == making.final[10:] + b"tail" + b"next" + b"and next"
        outbox.end()


async def test_a_payload_is_flushed_only_once_all_of_it_was_taken(autojump_clock: Clock) -> None:
    async with trio.open_nursery() as nursery:
        outbox, _, theirs = outbox_and_reader(nursery)
        making, flushed = Making(100_000, 50_000), trio.Event()
        payload = growing(making)
        outbox.put(payload)

        async def send() -> None:
            await outbox.feed([payload])
            await outbox.flushed()
            flushed.set()

        nursery.start_soon(send)
        for count in (49_999, 1):
            await trio.testing.wait_all_tasks_blocked()
            assert not flushed.is_set()
            making.grow(count)
        await flushed.wait()
        assert UNFINISHED not in await theirs.receive_some(1 << 20)
        outbox.end()


@pytest.mark.parametrize("end", ["close", "reset", "cancel"])
async def test_feeding_ends_with_the_outbox_the_stream_or_its_task(end: str, autojump_clock: Clock) -> None:
    async with trio.open_nursery() as nursery:
        outbox, ours, theirs = outbox_and_reader(nursery)
        making, over = Making(100_000, 10), trio.Event()
        payload, feeding = growing(making), trio.CancelScope()
        outbox.put(payload)

        async def feed() -> None:
            with feeding:
                await outbox.feed([payload])
            over.set()

        nursery.start_soon(feed)
        await trio.testing.wait_all_tasks_blocked()
        {"close": outbox.close, "reset": theirs.reset, "cancel": feeding.cancel}[end]()
        await over.wait()
        await outbox.ended()
        assert outbox.closed
        assert ours.closed == (end != "close")  # who closes an outbox sees to the stream
        await outbox.feed([payload])
        await outbox.flushed()


async def test_a_payload_that_fails_before_the_stream_is_open_resets_it_then(autojump_clock: Clock) -> None:
    ours, theirs = local_pair(ONE, OTHER, "/peerd/t/1")
    outbox, making = Outbox(), Making()
    making.fail(LocalError("no"))
    payload = growing(making)
    outbox.put(b"head", payload)
    with pytest.raises(LocalError):
        await outbox.feed([payload])
    await outbox.run(ours)
    with pytest.raises(Unreachable):
        await theirs.receive_some(1)


@pytest.mark.parametrize("seed", range(10))
async def test_any_schedule_of_makers_and_readers_delivers_the_same_bytes(seed: int, autojump_clock: Clock) -> None:
    rng = TrioClock().rng(f"schedule {seed}")
    async with trio.open_nursery() as nursery:
        outbox, _, theirs = outbox_and_reader(nursery)
        sent = bytearray()
        for number in range(20):
            size, kind = rng.choice((0, 1, 5000, 40_000, 400_000)), rng.randrange(3)
            making = Making(size, rng.randint(0, size), number)
            message = [f"message {number}".encode(), growing(making)] if kind else [making.final]
            sent += (message[0] if kind else b"") + making.final
            outbox.put(*message)
            nursery.start_soon(outbox.feed, message)
            nursery.start_soon(making.make, seed + number)
        got = bytearray()
        while len(got) < len(sent):
            got += await theirs.receive_some(rng.choice((1000, 1 << 20)))
            for _ in range(rng.randrange(3)):
                await trio.lowlevel.checkpoint()
        assert got == sent, f"seed {seed}"
        assert not outbox.pending
        outbox.end()


async def test_a_part_for_many_calls_is_whole() -> None:
    with pytest.raises(LocalError, match="not complete"):
        Encoded(Text("x"), (Making(ready=1000).frame,))
    assert Encoded(Text("x"), (Making(ready=3 << 20).frame,)).count == 1
