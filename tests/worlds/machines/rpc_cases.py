"""Promises of calls, as cases that hold over any host: fake ones under a virtual clock, and real ones over TCP.

Each case gets a fresh `Pair` of two peers that can reach each other. No case sleeps: it waits for events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import (
    ConfigError,
    LocalError,
    Overloaded,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
    Unreachable,
)
from peerd.messages.encoding import Empty, Message
from peerd.rpc.rpc import Answer, CallStream, Incoming, Rpc
from peerd.rpc.rpc_types import RpcHost
from tests.kit.declared import ANY, declared
from tests.worlds.machines.fakehost import FakeHost, FakeNet, TrioClock, fake_net


class Text(Message, frozen=True):
    text: str


class Number(Message, frozen=True):
    value: int


@dataclass
class Pair:
    """Two peers: `a` calls, `b` serves."""

    a: Rpc
    b: Rpc
    a_host: RpcHost
    b_host: RpcHost
    crashes: list[Any]  # what b's supervisor caught
    cut: Callable[[], None]  # lose the link at once


@dataclass
class Held:
    """A handler that says when it was entered and when it was cancelled, and else waits to be let go."""

    entered: trio.Event = field(default_factory=trio.Event)
    let_go: trio.Event = field(default_factory=trio.Event)
    cancelled: trio.Event = field(default_factory=trio.Event)
    entries: int = 0

    async def __call__(self, call: Incoming[Any]) -> Answer[Empty]:
        self.entries += 1
        self.entered.set()
        try:
            await self.let_go.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        return Answer(Empty())


@asynccontextmanager
async def fake_pair() -> AsyncIterator[tuple[Pair, FakeNet, FakeHost, FakeHost]]:
    async with fake_net() as net:
        a_host, b_host = net.host("a"), net.host("b")
        a, b = Rpc(a_host, TrioClock()), Rpc(b_host, TrioClock())
        await net.nursery.start(a.run)
        await net.nursery.start(b.run)
        pair = Pair(a, b, a_host, b_host, b_host.crashes, lambda: net.cut(a_host.id, b_host.id))
        yield pair, net, a_host, b_host


Case = Callable[[Pair], Awaitable[None]]
CASES: list[Case] = []  # of this module, and of those that join by importing `case`
BIG = TensorFrame("uint8", (1 << 20,), bytes(range(256)) * 4096)
FRAMES = declared(frames=4, frame_bytes=8 << 20)


def case(function: Case) -> Case:
    CASES.append(function)
    return function


async def echo(call: Incoming[Text]) -> Answer[Text]:
    return Answer(call.body, call.frames)


async def ask(pair: Pair, method: str = "t/1/echo", text: str = "hi", timeout_s: float = 5.0) -> str:
    return (await pair.a.call(pair.b_host.id, method, Text(text), Text, timeout_s=timeout_s)).body.text


async def repeat(call: Incoming[Text], parts: CallStream) -> None:
    """Send back every part, after what was asked with."""
    await parts.send(call.body, call.frames)
    while part := await parts.receive(Text):
        await parts.send(part.body, part.frames)


@case
async def a_call_is_answered(pair: Pair) -> None:
    seen: list[Incoming[Text]] = []

    async def shout(call: Incoming[Text]) -> Answer[Text]:
        seen.append(call)
        return Answer(Text(call.body.text.upper()))

    pair.b.serve("t/1/shout", Text, shout, declared=ANY)
    before = trio.current_time()
    assert await ask(pair, "t/1/shout") == "HI"
    assert (seen[0].peer, seen[0].body, seen[0].frames) == (pair.a_host.id, Text("hi"), ())
    assert before < seen[0].deadline <= trio.current_time() + 5.0


@case
async def many_calls_at_once_are_each_answered(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)
    answers: dict[int, str] = {}

    async def one(number: int) -> None:
        answers[number] = await ask(pair, text=str(number))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(one, number)
    assert answers == {number: str(number) for number in range(200)}
    status = pair.a.status()
    assert (status["channels"], status["waiting"], status["made"]["t/1"]) == (1, 0, {"calls": 200, "failed": 0})
    assert pair.b.status()["served"]["t/1/echo"]["calls"] == 200


@case
async def answers_come_in_the_order_they_are_ready(pair: Pair) -> None:
    slow = Held()
    pair.b.serve("t/1/slow", Text, slow, declared=ANY)
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_empty, pair, "t/1/slow")
        await slow.entered.wait()
        assert await ask(pair) == "hi"
        slow.let_go.set()


async def settled(pair: Pair) -> None:
    """Nothing is held, nothing runs, nobody waits; soon: an answer may be here before its call is over there."""
    with trio.fail_after(5):
        for rpc in (pair.a, pair.b):
            while any(rpc.status()[name] for name in ("held_bytes", "running", "waiting")):
                await trio.lowlevel.checkpoint()


async def ask_empty(pair: Pair, method: str, timeout_s: float = 5.0) -> None:
    await pair.a.call(pair.b_host.id, method, Text(""), Empty, timeout_s=timeout_s)


@case
async def frames_travel_both_ways(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    frames = (BIG, TensorFrame("float32", (0, 3), b""), TensorFrame("float64", (2,), b"1234", "bf16"))
    answer = await pair.a.call(pair.b_host.id, "t/1/echo", Text("x"), Text, frames=frames, timeout_s=5)
    assert [(f.dtype, f.shape, f.coding, bytes(f.payload)) for f in answer.frames] == [
        (f.dtype, f.shape, f.coding, bytes(f.payload)) for f in frames
    ]
    assert pair.a.status()["held_bytes"] == 0
    await settled(pair)


@case
async def answers_with_frames_to_small_questions_get_streams_of_their_own(pair: Pair) -> None:
    async def give(call: Incoming[Text]) -> Answer[Empty]:
        return Answer(Empty(), (BIG,))

    pair.b.serve("t/1/give", Text, give, declared=ANY)
    for _ in range(3):
        answer = await pair.a.call(pair.b_host.id, "t/1/give", Text("x"), Empty, timeout_s=5)
        assert bytes(answer.frames[0].payload) == BIG.payload
    assert pair.a.status()["held_bytes"] == 0


@case
async def an_answer_with_more_frames_than_the_caller_takes_is_a_violation(pair: Pair) -> None:
    async def give(call: Incoming[Text]) -> Answer[Empty]:
        return Answer(Empty(), (BIG,))

    pair.b.serve("t/1/give", Text, give, declared=ANY)
    with pytest.raises(ProtocolViolation) as caught:
        await pair.a.call(pair.b_host.id, "t/1/give", Text("x"), Empty, timeout_s=5, reply_frame_bytes=100)
    assert caught.value.peer == pair.b_host.id


@case
async def errors_of_handlers_travel_by_type(pair: Pair) -> None:
    raised: list[Exception] = []

    async def fail(call: Incoming[Text]) -> Answer[Text]:
        raise raised[-1]

    pair.b.serve("t/1/fail", Text, fail, declared=FRAMES)
    for frames in ((), (BIG,)):
        for error, kind in (
            (Refused("not you"), Refused),
            (Overloaded("later", 1.5), Overloaded),
            (TooSlow("it slept"), TooSlow),
            (Unreachable("no third peer", pair.a_host.id), Refused),
            (ConfigError("bad file"), Refused),
            (ExceptionGroup("", [ExceptionGroup("", [Refused("in a nursery")])]), Refused),
        ):
            raised.append(error)
            with pytest.raises(RemoteError) as caught:
                await pair.a.call(pair.b_host.id, "t/1/fail", Text("x"), Text, frames=frames, timeout_s=5)
            assert type(caught.value) is kind
            assert caught.value.peer == pair.b_host.id
            if isinstance(caught.value, Overloaded):
                assert caught.value.retry_after_s == 1.5
    assert not pair.crashes
    assert pair.b.status()["served"]["t/1/fail"]["failed"] == 12


@case
async def a_handler_that_crashes_fails_its_own_call_only(pair: Pair) -> None:
    held = Held()

    async def crash(call: Incoming[Text]) -> Answer[Text]:
        raise {
            "bug": ZeroDivisionError("0"),
            "ours": LocalError("0"),
            "mix": ExceptionGroup("", [KeyError(), Refused("")]),
        }[call.body.text]

    pair.b.serve("t/1/held", Text, held, declared=ANY)
    pair.b.serve("t/1/crash", Text, crash, declared=ANY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_empty, pair, "t/1/held")
        await held.entered.wait()
        for text in ("bug", "ours", "mix"):
            with pytest.raises(Refused, match="the handler failed"):
                await ask(pair, "t/1/crash", text)
        held.let_go.set()
    assert len(pair.crashes) == 4  # two of them in one group


@case
async def methods_that_are_not_served_are_refused(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)
    pair.b.serve_stream("t/1/talk", Text, repeat, declared=ANY)
    for method in ("t/1/other", "t/1/talk", "u/1/echo", "t/2/echo"):
        with pytest.raises(Refused) as caught:
            await ask(pair, method)
        assert caught.value.peer == pair.b_host.id
    with pytest.raises(Refused):
        async with pair.a.stream(pair.b_host.id, "t/1/echo", Text(""), timeout_s=5) as call:
            await call.receive(Text)
    assert await ask(pair) == "hi"
    pair.b.unserve("t/1")
    with pytest.raises(Refused, match="no such method: t/1/echo"):
        await ask(pair)


@case
async def a_body_of_another_type_costs_the_stream_and_not_the_service(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)
    with pytest.raises(Unreachable):
        await pair.a.call(pair.b_host.id, "t/1/echo", Number(3), Text, timeout_s=5)
    assert isinstance(pair.crashes[0][1], ProtocolViolation)
    assert pair.crashes[0][1].peer == pair.a_host.id
    assert await ask(pair) == "hi"
    with pytest.raises(ProtocolViolation):
        await pair.a.call(pair.b_host.id, "t/1/echo", Text("a"), Number, timeout_s=5)


@case
async def a_deadline_ends_the_call_on_both_sides(pair: Pair) -> None:
    for frames in ((), (BIG,)):
        held = Held()
        pair.b.unserve("t/1")
        pair.b.serve("t/1/held", Text, held, declared=FRAMES)
        with pytest.raises(TooSlow) as caught:
            await pair.a.call(pair.b_host.id, "t/1/held", Text(""), Empty, frames=frames, timeout_s=0.2)
        assert caught.value.peer == pair.b_host.id
        with trio.fail_after(2):
            await held.cancelled.wait()
    assert pair.a.status()["waiting"] == 0


@case
async def the_servers_own_deadline_is_kept(pair: Pair) -> None:
    pair.b.serve("t/1/held", Text, Held(), declared=declared(deadline_s=0.1))
    with pytest.raises(TooSlow, match="the deadline passed"):
        await ask(pair, "t/1/held", timeout_s=5)


@case
async def a_cancelled_caller_cancels_the_handler(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)
    for frames in ((), (BIG,)):
        held = Held()
        pair.b.unserve("u/1")
        pair.b.serve("u/1/held", Text, held, declared=FRAMES)
        async with trio.open_nursery() as nursery:

            async def call(frames: tuple[TensorFrame, ...]) -> None:
                await pair.a.call(pair.b_host.id, "u/1/held", Text(""), Empty, frames=frames, timeout_s=60)

            nursery.start_soon(call, frames)
            await held.entered.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(2):
            await held.cancelled.wait()
        assert await ask(pair) == "hi"
    assert pair.a.status()["waiting"] == 0
    assert pair.b.status()["running"] == 0


@case
async def limits_are_checked_before_payloads_are_taken(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=declared(body_bytes=100, frames=1, frame_bytes=1 << 20))
    small = TensorFrame("uint8", (1,), b"x")
    for frames, text in (((small, small), "2 frames"), ((BIG, small), "frames"), ((BIG, BIG, BIG), "3 frames")):
        with pytest.raises(Refused, match=text):
            await pair.a.call(pair.b_host.id, "t/1/echo", Text("x"), Text, frames=frames, timeout_s=5)
    with pytest.raises(Refused, match="a body of"):
        await ask(pair, text="x" * 100)
    await pair.a.call(pair.b_host.id, "t/1/echo", Text("x"), Text, frames=(BIG,), timeout_s=5)
    assert pair.b.status()["served"]["t/1/echo"]["refused"] == 4
    await settled(pair)


@case
async def calls_beyond_the_limit_are_told_to_come_back(pair: Pair) -> None:
    held = Held()
    pair.b.serve("t/1/held", Text, held, declared=declared(calls_per_peer=1, frames=1, frame_bytes=1 << 20))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_empty, pair, "t/1/held")
        await held.entered.wait()
        for frames in ((), (BIG,)):
            with pytest.raises(Overloaded) as caught:
                await pair.a.call(pair.b_host.id, "t/1/held", Text(""), Empty, frames=frames, timeout_s=5)
            assert caught.value.retry_after_s > 0
        held.let_go.set()
    await ask_empty(pair, "t/1/held")


@case
async def a_peer_calls_itself_as_it_calls_others(pair: Pair) -> None:
    held = Held()
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    pair.b.serve("t/1/held", Text, held, declared=ANY)
    pair.b.serve_stream("t/1/talk", Text, repeat, declared=ANY)
    me = pair.b_host.id
    payload = bytearray(b"12345678")
    frames = (TensorFrame("float64", (1,), payload),)
    answer = await pair.b.call(me, "t/1/echo", Text("x"), Text, frames=frames, timeout_s=5)
    payload[:] = bytes(8)
    assert bytes(answer.frames[0].payload) == b"12345678"
    assert (await pair.b.call(me, "t/1/echo", Text("x"), Text, timeout_s=5)).body == Text("x")
    with pytest.raises(TooSlow):
        await pair.b.call(me, "t/1/held", Text("x"), Empty, timeout_s=0.1)
    await held.cancelled.wait()
    with pytest.raises(Refused):
        await pair.b.call(me, "u/1/none", Text("x"), Empty, timeout_s=5)
    async with pair.b.stream(me, "t/1/talk", Text("a"), timeout_s=5) as call:
        call.finish()
        assert await call.receive(Text) == Answer(Text("a"))


@case
async def a_lost_link_fails_callers_and_cancels_handlers_at_once(pair: Pair) -> None:
    held = Held()
    outcomes: list[Exception] = []
    pair.b.serve("t/1/held", Text, held, declared=FRAMES)
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)

    async def call(frames: tuple[TensorFrame, ...]) -> None:
        try:
            await pair.a.call(pair.b_host.id, "t/1/held", Text(""), Empty, frames=frames, timeout_s=60)
        except Unreachable as error:
            outcomes.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, ())
        nursery.start_soon(call, ())
        nursery.start_soon(call, (BIG,))
        while held.entries < 3:
            await trio.lowlevel.checkpoint()
        pair.cut()
    assert len(set(map(id, outcomes))) == 3
    assert all(isinstance(e, Unreachable) and e.peer == pair.b_host.id for e in outcomes)
    with trio.fail_after(2):
        await held.cancelled.wait()
