"""Promises of streaming calls: cases like those of rpc_cases."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peerd.core.errors import LocalError, Overloaded, Refused, TooSlow
from peerd.rpc.rpc import Answer, CallStream, Encoded, Incoming
from tests.kit.declared import ANY
from tests.worlds.machines.rpc_cases import BIG, FRAMES, Pair, Text, case, repeat, settled


class Early:
    """A handler that says all, and then listens."""

    def __init__(self) -> None:
        self.heard: list[list[str]] = []  # by call
        self.finished = trio.Event()  # of the first call

    async def __call__(self, call: Incoming[Text], parts: CallStream) -> None:
        parts.finish()
        texts = []
        while part := await parts.receive(Text):
            texts.append(part.body.text)
        self.heard.append(texts)
        self.finished.set()


@case
async def a_streaming_call_carries_parts_both_ways(pair: Pair) -> None:
    pair.b.serve_stream("t/1/talk", Text, repeat, declared=FRAMES)
    async with pair.a.stream(pair.b_host.id, "t/1/talk", Text("0"), frames=(BIG,), timeout_s=5) as call:
        for number in range(1, 20):
            await call.send(Text(str(number)), (BIG,) if number % 5 == 0 else ())
            part = await call.receive(Text)
            assert part is not None
            assert part.body.text == str(number - 1)
            assert [bytes(frame.payload) for frame in part.frames] == [BIG.payload] * ((number - 1) % 5 == 0)
        call.finish()
        last = await call.receive(Text)
        assert last is not None
        assert last.body.text == "19"
        assert await call.receive(Text) is None
        assert await call.receive(Text) is None
    assert pair.a.status()["held_bytes"] == pair.a.status()["waiting"] == 0
    await settled(pair)


@case
async def each_side_of_a_streaming_call_may_finish_first(pair: Pair) -> None:
    early = Early()
    pair.b.serve_stream("t/1/early", Text, early, declared=ANY)
    async with pair.a.stream(pair.b_host.id, "t/1/early", Text(""), timeout_s=5) as call:
        await call.send(Text("a"))
        await call.send(Text("b"))
        call.finish()
        await early.finished.wait()
        assert await call.receive(Text) is None
    assert early.heard == [["a", "b"]]
    with pytest.raises(LocalError):
        await call.send(Text("c"))


@case
async def a_side_that_does_not_receive_stops_the_other_from_sending(pair: Pair) -> None:
    sent: list[int] = []

    async def flood(call: Incoming[Text], parts: CallStream) -> None:
        for number in range(100):
            await parts.send(Text(""), (BIG,))
            sent.append(number)

    pair.b.serve_stream("t/1/flood", Text, flood, declared=ANY)
    async with pair.a.stream(pair.b_host.id, "t/1/flood", Text(""), timeout_s=30) as call:
        await call.receive(Text)
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(sent) < 30
        held = pair.a.status()["held_bytes"]
        assert 0 < held <= 4 << 20
        count = 1
        while await call.receive(Text):
            count += 1
    assert count == 100


@case
async def leaving_a_streaming_call_cancels_its_handler(pair: Pair) -> None:
    cancelled = trio.Event()

    async def wait(call: Incoming[Text], parts: CallStream) -> None:
        try:
            await parts.send(Text("ready"))
            await trio.sleep_forever()
        finally:
            cancelled.set()

    pair.b.serve_stream("t/1/wait", Text, wait, declared=ANY)
    async with pair.a.stream(pair.b_host.id, "t/1/wait", Text(""), timeout_s=30) as call:
        await call.receive(Text)
    with trio.fail_after(2):
        await cancelled.wait()


@case
async def a_reset_reaches_a_handler_that_neither_sends_nor_receives(pair: Pair) -> None:
    cancelled, ready = trio.Event(), trio.Event()

    async def ignore(call: Incoming[Text], parts: CallStream) -> None:
        ready.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    pair.b.serve_stream("t/1/ignore", Text, ignore, declared=FRAMES)
    stream = pair.a.stream(pair.b_host.id, "t/1/ignore", Text(""), timeout_s=30)
    async with stream as call, trio.open_nursery() as nursery:
        nursery.start_soon(flood, call)
        await ready.wait()
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    with trio.fail_after(2):
        await cancelled.wait()
    while pair.b.status()["held_bytes"]:
        await trio.lowlevel.checkpoint()


@case
async def a_caller_that_leaves_lets_go_of_all_that_came(pair: Pair) -> None:
    """More parts than are read ahead: one is in the reader's hands."""
    part = Encoded(Text(""), (BIG,))

    async def many(call: Incoming[Text], parts: CallStream) -> None:
        for _ in range(8):
            parts.put(part)

    pair.b.serve_stream("t/1/many", Text, many, declared=FRAMES)
    async with pair.a.stream(pair.b_host.id, "t/1/many", Text(""), timeout_s=30) as call:
        assert await call.receive(Text) is not None
        while pair.a.status()["held_bytes"] < 3 << 20:
            await trio.testing.wait_all_tasks_blocked(0.01)
    while pair.a.status()["held_bytes"]:
        await trio.testing.wait_all_tasks_blocked(0.01)


@case
async def a_streaming_call_has_a_deadline(pair: Pair) -> None:
    async def wait(call: Incoming[Text], parts: CallStream) -> None:
        await trio.sleep_forever()

    pair.b.serve_stream("t/1/wait", Text, wait, declared=ANY)
    with pytest.raises(TooSlow):
        async with pair.a.stream(pair.b_host.id, "t/1/wait", Text(""), timeout_s=0.2) as call:
            await call.receive(Text)


@case
async def an_error_of_a_streaming_handler_comes_after_its_parts(pair: Pair) -> None:
    async def fail(call: Incoming[Text], parts: CallStream) -> None:
        await parts.send(Text("first"))
        if call.body.text == "crash":
            raise ZeroDivisionError
        raise Overloaded("enough", 2.0)

    pair.b.serve_stream("t/1/fail", Text, fail, declared=FRAMES)
    for text, kind in (("", Overloaded), ("crash", Refused)):
        async with pair.a.stream(pair.b_host.id, "t/1/fail", Text(text), timeout_s=5) as call:
            assert (await call.receive(Text)) == Answer(Text("first"))
            with pytest.raises(kind):
                await call.receive(Text)
    async with pair.a.stream(pair.b_host.id, "t/1/fail", Text(""), timeout_s=5) as call:
        with pytest.raises(Overloaded):
            await flood(call)


async def flood(call: CallStream) -> None:
    while True:
        await call.send(Text(""), (BIG,))


@case
async def an_error_in_the_callers_block_is_the_callers(pair: Pair) -> None:
    pair.b.serve_stream("t/1/talk", Text, repeat, declared=ANY)
    with pytest.raises(KeyError):
        async with pair.a.stream(pair.b_host.id, "t/1/talk", Text(""), timeout_s=5):
            raise KeyError
