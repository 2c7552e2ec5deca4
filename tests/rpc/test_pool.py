"""Streaming calls use the streams of those before them again, and none that may not be: over fake hosts."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from peerd.core.errors import Refused
from peerd.core.limits import RPC_IDLE_S, RPC_LANES
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.outbox import Outbox
from peerd.rpc.room import Room, Share
from peerd.rpc.rpc import CallStream, Encoded
from peerd.wire.budget.book import Book, User
from tests.kit.declared import ANY
from tests.worlds.machines.rpc_cases import BIG, FRAMES, Pair, Text, fake_pair, repeat
from tests.worlds.machines.rpc_stream_cases import Early

Clock = trio.testing.MockClock
METHOD = "t/1/talk"


async def talk(pair: Pair, text: str = "hi") -> None:
    """One call that comes to its end."""
    async with pair.a.stream(pair.b_host.id, METHOD, Text(text), frames=(BIG,), timeout_s=5) as call:
        call.finish()
        part = await call.receive(Text)
        assert part is not None
        assert (part.body.text, bytes(part.frames[0].payload)) == (text, BIG.payload)
        assert await call.receive(Text) is None


async def test_calls_one_after_the_other_share_a_stream_until_nobody_needs_it(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, net, a_host, _):
        pair.b.serve_stream(METHOD, Text, repeat, declared=FRAMES)
        for number in range(5):
            await talk(pair, str(number))
        assert len(a_host.opened) == 1
        await trio.sleep(RPC_IDLE_S * 0.9)
        await talk(pair)
        assert len(a_host.opened) == 1
        assert pair.a.status()["channels"] == 1
        await trio.sleep(RPC_IDLE_S * 2.5)
        assert pair.a.status()["channels"] == 0
        assert all(stream.closed for _, stream in net.streams)
        await talk(pair)
        assert len(a_host.opened) == 2


async def test_calls_at_one_time_never_share_a_stream_and_few_are_kept(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        pair.b.serve_stream(METHOD, Text, repeat, declared=FRAMES)
        async with AsyncExitStack() as stack:
            many = RPC_LANES + 3
            for _ in range(many):
                call = await stack.enter_async_context(pair.a.stream(b_host.id, METHOD, Text("x"), timeout_s=5))
                assert await call.receive(Text) is not None
                call.finish()
                assert await call.receive(Text) is None
        assert len(a_host.opened) == many
        await trio.testing.wait_all_tasks_blocked()
        assert pair.a.status()["channels"] == RPC_LANES
        await talk(pair)
        assert len(a_host.opened) == many


async def test_a_call_that_was_left_or_failed_takes_its_stream_with_it(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, net, a_host, b_host):
        pair.b.serve_stream(METHOD, Text, repeat, declared=FRAMES)
        await talk(pair)
        async with pair.a.stream(b_host.id, METHOD, Text("left"), timeout_s=5) as call:
            assert await call.receive(Text) is not None
        await talk(pair)
        assert len(a_host.opened) == 2
        with pytest.raises(Refused):
            async with pair.a.stream(b_host.id, "t/1/none", Text(""), timeout_s=5) as call:
                await call.receive(Text)
        await talk(pair)
        assert len(a_host.opened) == 3
        net.cut(a_host.id, b_host.id)
        net.heal(a_host.id, b_host.id)
        await trio.testing.wait_all_tasks_blocked()
        await talk(pair)
        assert len(a_host.opened) == 4
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["running"] == pair.b.status()["held_bytes"] == 0


async def test_a_handler_that_has_said_all_hears_that_its_caller_has_left(autojump_clock: Clock) -> None:
    early = Early()
    async with fake_pair() as (pair, _, a_host, b_host):
        pair.b.serve_stream(METHOD, Text, early, declared=ANY)
        for number in range(2):
            async with pair.a.stream(b_host.id, METHOD, Text(""), timeout_s=5) as call:
                await call.send(Text(str(number)))
                assert await call.receive(Text) is None
        await trio.testing.wait_all_tasks_blocked()
        assert early.heard == [["0"], ["1"]]
        assert len(a_host.opened) == 1


async def test_calls_on_one_stream_each_hear_of_room(autojump_clock: Clock) -> None:
    """The handler of a call that is over for its caller may still run beside that of the next."""
    told: list[str] = []

    async def read(stream: object) -> None:
        while await stream.receive_some(1 << 20):
            pass

    async with fake_pair() as (_, _, a_host, b_host), trio.open_nursery() as nursery:
        b_host.handle("/peerd/t/1", read)
        stream = await a_host.open_stream(b_host.id, "/peerd/t/1")
        outbox = Outbox()
        share = Share(Room(Book()), User("b", "", ""), demanding=False)
        first, second = (CallStream(b_host.id, number, outbox, share) for number in (1, 2))
        first.on_room(lambda: told.append("first"))
        second.on_room(lambda: told.append("second"))
        first.put(Encoded(Text("x")))
        nursery.start_soon(outbox.run, stream)
        await trio.testing.wait_all_tasks_blocked()
        assert told == ["first", "second"]
        first.on_room(None)
        told.clear()
        outbox.put(b"more than leaves", b"at once" * (30 << 10))
        await trio.testing.wait_all_tasks_blocked()
        assert set(told) == {"second"}
        nursery.cancel_scope.cancel()


LATE = {
    "a further end": wire.encode_message(wire.END, 1),
    "a part": wire.encode_message(wire.PART, 1),
    "an answer to the next call": wire.encode_message(wire.END, 2),
    "rubbish": b"\xaa" * 20,
    "nothing": b"",
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE.keys())
async def test_who_speaks_or_ends_while_no_call_is_under_way_loses_its_stream(
    late: bytes, autojump_clock: Clock
) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):

        async def answer(stream: object) -> None:
            await stream.receive_some(1 << 20)
            await stream.send(wire.encode_message(wire.END, 1))
            await trio.sleep(1)
            await stream.send(late)
            await stream.close_write()

        b_host.handle("/peerd/t/1", answer)
        for opened in (1, 2):
            async with pair.a.stream(b_host.id, METHOD, Text(""), timeout_s=5) as call:
                call.finish()
                assert await call.receive(Text) is None
            assert len(a_host.opened) == opened
            await trio.sleep(2)
            assert pair.a.status()["held_bytes"] == 0
        await trio.sleep(RPC_IDLE_S * 2.5)
        assert pair.a.status()["channels"] == 0


async def test_a_part_right_behind_the_end_costs_the_stream_and_not_the_call(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):

        async def answer(stream: object) -> None:
            await stream.receive_some(1 << 20)
            await stream.send(wire.encode_message(wire.END, 1) + wire.encode_message(wire.PART, 1))
            await trio.sleep_forever()

        b_host.handle("/peerd/t/1", answer)
        for opened in (1, 2):
            async with pair.a.stream(b_host.id, METHOD, Text(""), timeout_s=5) as call:
                assert await call.receive(Text) is None
                assert await call.receive(Text) is None
            assert len(a_host.opened) == opened
        assert pair.a.status()["channels"] == 0
