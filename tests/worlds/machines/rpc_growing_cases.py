"""Promises of calls about payloads that are still being made while they are sent: cases like those of rpc_cases.

What is not final yet is filled with a byte that the final payload has nowhere, so that sending it early is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import LocalError, PeerdError, Refused, TooSlow, Unreachable
from peerd.messages.encoding import encode
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.rpc import Answer, CallStream, Incoming
from peerd.rpc.rpc_types import RpcStream
from tests.kit.declared import ANY
from tests.worlds.machines.rpc_cases import BIG, FRAMES, Held, Pair, Text, ask, case, echo, repeat, settled

UNFINISHED = 0xEE
PATIENCE_S = 20.0  # for a case that is not about time, on a machine that is busy with others: no less than all may take


class Making:
    """A payload of `size` bytes that grows when told to, and its frame: a `codec.format.frame.Ready`."""

    def __init__(self, size: int = 3 << 20, ready: int = 0, seed: int = 1) -> None:
        self.final = random.Random(seed).randbytes(size).replace(bytes([UNFINISHED]), b"\0")
        self.buffer = bytearray([UNFINISHED]) * size
        self.ready_bytes = 0
        self.frame = TensorFrame("uint8", (size,), self.buffer, ready=self)
        self.asked = trio.Event()  # someone waits for more
        self.left = trio.Event()  # someone who waited was cancelled
        self._error: Exception | None = None
        self._changed = trio.lowlevel.ParkingLot()
        self.grow(ready)

    async def more(self, than_bytes: int) -> int:
        while self.ready_bytes <= than_bytes:
            if self._error is not None:
                raise self._error
            self.asked.set()
            try:
                await self._changed.park()
            except trio.Cancelled:
                self.left.set()
                raise
        return self.ready_bytes

    def grow(self, count: int) -> None:
        """Make `count` bytes more."""
        begin, end = self.ready_bytes, min(self.ready_bytes + count, len(self.final))
        self.buffer[begin:end] = self.final[begin:end]
        self.ready_bytes = end
        self._changed.unpark_all()

    def fail(self, error: Exception) -> None:
        """The rest never comes."""
        self._error = error
        self._changed.unpark_all()

    async def make(self, seed: int) -> None:
        """Make the rest in steps of any size, and let others run between them."""
        rng = random.Random(seed)
        while self.ready_bytes < len(self.final):
            self.grow(rng.choice((1, 1000, 40_000, 300_000, 2_000_000)))
            for _ in range(rng.randrange(4)):
                await trio.lowlevel.checkpoint()


async def send(pair: Pair, method: str, *frames: TensorFrame, timeout_s: float = 5.0) -> Answer[Text]:
    return await pair.a.call(pair.b_host.id, method, Text("x"), Text, frames=frames, timeout_s=timeout_s)


def payloads(answer: Answer[Text] | Incoming[Text]) -> list[bytes]:
    return [bytes(frame.payload) for frame in answer.frames]


@case
async def payloads_that_grow_arrive_whole_and_in_order(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    small = TensorFrame("uint8", (3,), b"abc")
    for seed in range(6):
        first, second = Making(2_500_000, 1 << 16, seed), Making(70_000, 0, seed + 1)
        empty = TensorFrame("uint8", (0,), b"", ready=Making(0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second.make, seed)
            nursery.start_soon(first.make, seed)
            frames = small, first.frame, empty, second.frame
            answer = await send(pair, "t/1/echo", *frames, timeout_s=PATIENCE_S)
        assert payloads(answer) == [b"abc", first.final, b"", second.final], f"seed {seed}"
    await settled(pair)


@case
async def answers_grow_too_and_those_behind_them_wait(pair: Pair) -> None:
    made: list[Making] = []

    async def give(call: Incoming[Text]) -> Answer[Text]:
        made.append(Making(1_500_000, seed=len(made)))
        nursery.start_soon(made[-1].make, len(made))
        return Answer(call.body, (made[-1].frame,))

    pair.b.serve("t/1/give", Text, give, declared=FRAMES)
    pair.b.serve("t/1/echo", Text, echo, declared=ANY)
    async with trio.open_nursery() as nursery:
        for _ in range(3):  # the first on the stream that small calls share
            async with trio.open_nursery() as asking:
                asking.start_soon(ask, pair)
                answer = await send(pair, "t/1/give")
            assert payloads(answer) == [made[-1].final]
    await settled(pair)


@case
async def parts_grow_in_both_directions(pair: Pair) -> None:
    async def repeat_slowly(call: Incoming[Text], parts: CallStream) -> None:
        while part := await parts.receive(Text):
            making = Making(len(part.frames[0].payload), seed=int(part.body.text))
            assert payloads(part) == [making.final]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(making.make, 7)
                await parts.send(part.body, (making.frame,))

    pair.b.serve_stream("t/1/talk", Text, repeat_slowly, declared=FRAMES)
    opening = Making(200_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(opening.make, 3)
        stream = pair.a.stream(pair.b_host.id, "t/1/talk", Text(""), frames=(opening.frame,), timeout_s=5)
        async with stream as call:
            for seed in range(4):
                making = Making(1 << 20, seed=seed)
                nursery.start_soon(making.make, seed)
                await call.send(Text(str(seed)), (making.frame,))
                assert making.ready_bytes == 1 << 20
                making.buffer[:] = bytes(1 << 20)  # what was sent may be changed again
                answer = await call.receive(Text)
                assert answer is not None
                assert payloads(answer) == [Making(1 << 20, seed=seed).final]
            call.finish()
            assert await call.receive(Text) is None
    await settled(pair)


@case
async def sending_begins_before_a_payload_is_whole(pair: Pair) -> None:
    got, seen = bytearray(), trio.Event()
    making = Making(3 << 20, 1 << 20)

    async def read(stream: RpcStream) -> None:
        while not got.endswith(making.final):
            got.extend(await stream.receive_some(1 << 20))
            if got.endswith(making.final[: 1 << 20]):
                seen.set()
        await stream.send(wire.encode_message(wire.REPLY, 1, encode(Text("whole"))))
        await stream.receive_some(1)
        await stream.aclose()

    pair.b_host.handle("/peerd/raw/1", read)
    async with trio.open_nursery() as nursery:

        async def go_on() -> None:
            await seen.wait()
            assert making.ready_bytes == 1 << 20
            assert UNFINISHED not in got[-(1 << 20) :]
            making.grow(2 << 20)

        nursery.start_soon(go_on)
        assert (await send(pair, "raw/1/take", making.frame)).body == Text("whole")
    await settled(pair)


@case
async def payloads_grow_in_calls_to_oneself(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    making, broken = Making(), Making(ready=1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(making.make, 1)
        me = pair.b_host.id
        answer = await pair.b.call(me, "t/1/echo", Text(""), Text, frames=(making.frame,), timeout_s=5)
    assert payloads(answer) == [making.final]
    broken.fail(LocalError("no more"))
    with pytest.raises(LocalError, match="no more"):
        await pair.b.call(me, "t/1/echo", Text(""), Text, frames=(broken.frame,), timeout_s=5)
    await settled(pair)


@case
async def an_error_of_the_maker_is_raised_to_the_caller_and_costs_the_stream(pair: Pair) -> None:
    held = Held()
    pair.b.serve("t/1/held", Text, held, declared=FRAMES)
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    for error in (PeerdError("not finite"), Unreachable("no source", pair.a_host.id), ZeroDivisionError("a bug")):
        for ready in (0, 1 << 20):
            making = Making(ready=ready)

            async def fail(making: Making = making, error: Exception = error) -> None:
                await making.asked.wait()
                making.fail(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)
                with pytest.raises(type(error)) as caught:
                    await send(pair, "t/1/held", BIG, making.frame)
            assert caught.value is error
            await settled(pair)
    assert held.entries == 0
    assert (await send(pair, "t/1/echo", BIG)).frames[0].payload == BIG.payload
    assert not pair.crashes


@case
async def a_maker_that_claims_more_and_has_none_is_our_own_error(pair: Pair) -> None:
    class Liar(Making):
        async def more(self, than_bytes: int) -> int:
            await trio.lowlevel.checkpoint()
            return than_bytes

    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    with pytest.raises(LocalError, match="a payload stays at 1000 of"):
        await send(pair, "t/1/echo", Liar(ready=1000).frame)
    await settled(pair)


@case
async def an_error_of_a_maker_that_serves_is_logged_as_our_own(pair: Pair) -> None:
    errors = [PeerdError("not finite"), Refused("not by us", pair.b_host.id), KeyError("a bug")]

    async def give(call: Incoming[Text]) -> Answer[Text]:
        making = Making(ready=100_000)
        making.fail(errors[int(call.body.text)])
        return Answer(call.body, (making.frame,))

    async def talk(call: Incoming[Text], parts: CallStream) -> None:
        making = Making(ready=100_000)
        making.fail(errors[int(call.body.text)])
        await parts.send(call.body, (making.frame,))

    pair.b.serve("t/1/give", Text, give, declared=FRAMES)
    pair.b.serve_stream("t/1/talk", Text, talk, declared=FRAMES)
    for number, error in enumerate(errors):
        with pytest.raises(Unreachable):
            await ask(pair, "t/1/give", str(number))
        await settled(pair)
        assert pair.crashes.pop()[1] is error
        async with pair.a.stream(pair.b_host.id, "t/1/talk", Text(str(number)), timeout_s=5) as call:
            with pytest.raises(Unreachable):
                await call.receive(Text)
        await settled(pair)
        assert pair.crashes.pop()[1] is error


@case
async def an_error_of_the_maker_of_a_part_ends_the_streaming_call(pair: Pair) -> None:
    ended = [trio.Event(), trio.Event()]

    async def talk(call: Incoming[Text], parts: CallStream) -> None:
        try:
            await repeat(call, parts)
        finally:
            ended[int(call.body.text)].set()

    pair.b.serve_stream("t/1/talk", Text, talk, declared=FRAMES)
    making = Making(ready=1 << 20)
    making.fail(PeerdError("not finite"))
    async with pair.a.stream(pair.b_host.id, "t/1/talk", Text("0"), timeout_s=5) as call:
        await call.receive(Text)
        with pytest.raises(PeerdError, match="not finite"):
            await call.send(Text("1"), (making.frame,))
        with pytest.raises(Unreachable):
            await call.receive(Text)
    with trio.fail_after(2):
        await ended[0].wait()
    with pytest.raises(PeerdError, match="not finite"):
        async with pair.a.stream(pair.b_host.id, "t/1/talk", Text("1"), frames=(making.frame,), timeout_s=5):
            raise AssertionError("nothing is opened with half a payload")
    await settled(pair)
    assert not pair.crashes


@case
async def a_deadline_ends_a_call_whose_payload_is_still_being_made(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    pair.b.serve_stream("t/1/talk", Text, repeat, declared=FRAMES)
    making = Making(ready=1 << 20)
    with pytest.raises(TooSlow):
        await send(pair, "t/1/echo", making.frame, timeout_s=0.2)
    assert making.left.is_set()
    making = Making(ready=1 << 20)
    with pytest.raises(TooSlow):
        async with pair.a.stream(pair.b_host.id, "t/1/talk", Text(""), timeout_s=0.2) as call:
            await call.send(Text(""), (making.frame,))
    assert making.left.is_set()
    await settled(pair)


@case
async def a_caller_that_gives_up_ends_an_answer_that_is_still_being_made(pair: Pair) -> None:
    made: list[Making] = []

    async def give(call: Incoming[Text]) -> Answer[Text]:
        made.append(Making(ready=100_000))
        return Answer(call.body, (made[-1].frame,))

    pair.b.serve("t/1/give", Text, give, declared=FRAMES)

    async def give_up(*frames: TensorFrame) -> Making:
        count = len(made)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, pair, "t/1/give", *frames)
            while len(made) == count:
                await trio.lowlevel.checkpoint()
            await made[-1].asked.wait()
            nursery.cancel_scope.cancel()
        return made[-1]

    with trio.fail_after(2):
        await (await give_up(BIG)).left.wait()
    await settled(pair)
    shared = await give_up()  # a stream that small calls share goes on until the answer is made
    shared.grow(len(shared.final))
    await settled(pair)
    assert not shared.left.is_set()


@case
async def a_refusal_comes_while_the_payload_is_still_being_made(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    pair.b.serve_stream("t/1/talk", Text, repeat, declared=FRAMES)
    for method in ("t/1/none", "u/1/none", "t/1/talk"):
        making = Making(ready=1000)
        with pytest.raises(Refused):
            await send(pair, method, making.frame, timeout_s=600)
        assert making.left.is_set()
    making = Making(ready=1000)
    stream = pair.a.stream(pair.b_host.id, "t/1/none", Text(""), frames=(making.frame,), timeout_s=600)
    with pytest.raises(Refused):
        async with stream as call:
            await call.receive(Text)
    assert making.left.is_set()
    await settled(pair)


async def _while_made(pair: Pair, call: Callable[[Making], Awaitable[object]], making: Making) -> None:
    """`call` ends as unreachable when the link is lost while the payload is being made."""
    async with trio.open_nursery() as nursery:

        async def expect() -> None:
            with pytest.raises(Unreachable):
                await call(making)

        nursery.start_soon(expect)
        await making.asked.wait()
        while not pair.a.status()["held_bytes"] + pair.b.status()["held_bytes"]:
            await trio.lowlevel.checkpoint()  # it is on its way
        pair.cut()


@case
async def a_lost_link_ends_a_call_whose_payload_is_still_being_made(pair: Pair) -> None:
    pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
    await _while_made(pair, lambda making: send(pair, "t/1/echo", making.frame, timeout_s=600), Making(ready=1000))
    await settled(pair)


@case
async def a_lost_link_ends_an_answer_that_is_still_being_made(pair: Pair) -> None:
    making = Making(ready=1000)

    async def give(call: Incoming[Text]) -> Answer[Text]:
        return Answer(call.body, (making.frame,))

    pair.b.serve("t/1/give", Text, give, declared=FRAMES)
    await _while_made(pair, lambda _: send(pair, "t/1/give", timeout_s=600), making)
    with trio.fail_after(2):
        await making.left.wait()
    await settled(pair)


@case
async def a_lost_link_ends_a_part_that_nobody_reads_behind(pair: Pair) -> None:
    async def flood(call: Incoming[Text], parts: CallStream) -> None:
        while True:
            await parts.send(Text(""), (BIG,))

    pair.b.serve_stream("t/1/flood", Text, flood, declared=FRAMES)

    async def part(making: Making) -> None:
        async with pair.a.stream(pair.b_host.id, "t/1/flood", Text(""), timeout_s=600) as call:
            while not pair.a.status()["held_bytes"]:
                await trio.lowlevel.checkpoint()  # parts pile up, and so the stream is not read any more
            await call.send(Text(""), (making.frame,))

    making = Making(ready=1000)
    await _while_made(pair, part, making)
    assert making.left.is_set()
    await settled(pair)
