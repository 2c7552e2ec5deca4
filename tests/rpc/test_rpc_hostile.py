"""Callers that want more than their share, or never finish what they began: over fake hosts with little to give."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import LocalError, Overloaded, Refused, RemoteError, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LEAST_BYTES_PER_S, RPC_MESSAGE_S, RPC_STEP_BYTES
from peerd.messages.encoding import Empty, encode
from peerd.rpc.channel import Channel
from peerd.rpc.loopback import LoopbackStream, local_pair
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.method_load import MethodName
from peerd.rpc.outbox import Outbox
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.rpc.rpc_types import RpcStream
from peerd.wire.budget.book import BOUNDS, Book, Bounds, Resource
from tests.kit.declared import ANY, declared
from tests.worlds.machines.fakehost import FakeHost, FakeNet, TrioClock, fake_net
from tests.worlds.machines.rpc_cases import BIG, Held, Text, echo

Clock = trio.testing.MockClock
MB = 1 << 20
LARGE = declared(body_bytes=MB, frames=2, frame_bytes=256 * MB)
SOME = encode(Text("x" * (64 << 10)))


def little(total: int) -> Bounds:
    return Bounds(total=total, peer=total // 4, place=total // 4, region=total // 2, reserved=total // 4)


@dataclass
class Scene:
    """One who serves, and others who are not honest."""

    net: FakeNet
    host: FakeHost
    rpc: Rpc

    @property
    def book(self) -> Book:
        return self.host.book

    def used(self) -> dict[Resource, int]:
        self.book.check()
        return {means: used for means in Resource if (used := self.book.used(means))}

    async def stream(self, name: str) -> LoopbackStream:
        return await self.net.host(name).open_stream(self.host.id, "/peerd/t/1")

    async def honest(self, name: str = "honest") -> Rpc:
        rpc = Rpc(self.net.host(name), TrioClock())
        await self.net.nursery.start(rpc.run)
        return rpc


@asynccontextmanager
async def scene(**bounds: int) -> AsyncIterator[Scene]:
    async with fake_net() as net:
        host = net.host("served")
        host.book = Book({**BOUNDS, **{Resource[name]: little(total) for name, total in bounds.items()}})
        rpc = Rpc(host, TrioClock())
        rpc.serve("t/1/echo", Text, echo, declared=LARGE)
        await net.nursery.start(rpc.run)
        yield Scene(net, host, rpc)


def call(call_id: int, name: str = "echo", body: bytes = b"", timeout_s: float = 3600.0, frames: int = 0) -> bytes:
    """A request; with `frames` so many of 256 MiB are announced."""
    frame = TensorFrame("uint8", (256 * MB,), np.zeros(256 * MB, np.uint8).data)
    headers = b"".join(wire.encode_header(frame) for _ in range(frames))
    return wire.encode_call(wire.REQUEST, call_id, name.encode(), timeout_s, body or encode(Text("")), headers, frames)


async def ask(rpc: Rpc, peer: PeerId, text: str = "hi", frames: Iterable[TensorFrame] = ()) -> Answer[Text]:
    return await rpc.call(peer, "t/1/echo", Text(text), Text, frames=tuple(frames), timeout_s=5)


async def push(stream: LoopbackStream, data: bytes) -> None:
    """Send as much as the other side takes."""
    with suppress(Unreachable):
        await stream.send(data)


def queued_bytes() -> int:
    """Of all messages that wait to be written, whoever counts them or not."""
    gc.collect()
    boxes = [box for box in gc.get_objects() if type(box) is Outbox and not box.closed]
    return sum(len(buffer) for box in boxes for buffer in (*box._queue, box._leaving))


def half_bytes() -> int:
    """Of all messages of which a part has come."""
    gc.collect()
    parsers = [parser for parser in gc.get_objects() if type(parser) is wire.MessageParser]
    return sum(len(parser._rest) for parser in parsers)


@pytest.mark.slow
async def test_answers_that_nobody_reads_are_bounded_and_others_get_theirs(autojump_clock: Clock) -> None:
    async with scene(ANSWERS=4 * MB) as s:
        began = 0

        async def large(incoming: Incoming[Text]) -> Answer[Text]:
            nonlocal began
            began += 1
            return Answer(Text("x" * (64 << 10)))

        s.rpc.serve("t/1/large", Text, large, declared=ANY)
        streams = [await s.stream("greedy") for _ in range(8)]
        for stream in streams:
            await stream.send(b"".join(call(number, "large") for number in range(1, 65)))
        await trio.testing.wait_all_tasks_blocked()
        assert queued_bytes() <= MB + 8 * (20 << 10)  # its share, and what is counted with each stream
        assert s.used() == {Resource.ANSWERS: pytest.approx(MB, rel=0.2)}
        before = began
        with pytest.raises(Overloaded, match="unread"):
            await (await s.honest("greedy")).call(s.host.id, "t/1/large", Text(""), Text, timeout_s=5)
        assert began <= before + 1
        await ask(await s.honest(), s.host.id)
        for stream in streams:
            stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        assert s.used() == {}


async def test_who_reads_again_gets_answers_again(autojump_clock: Clock) -> None:
    async with scene(ANSWERS=4 * MB) as s:
        s.rpc.serve("t/1/large", Text, echo, declared=LARGE)
        stream = await s.stream("slow")
        sent, kinds = 0, []

        async def send() -> None:
            nonlocal sent
            for number in range(1, 100):
                await stream.send(call(number, body=SOME))
                sent = number

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            assert sent < 50
            parser = wire.MessageParser()
            while len(kinds) < 99:
                kinds += [message.kind for message in parser.feed(await stream.receive_some(1 << 20))]
        assert set(kinds) == {wire.REPLY}
        await trio.testing.wait_all_tasks_blocked()
        assert s.used() == {}


async def test_large_answers_to_one_caller_all_come_however_little_room_there_is(autojump_clock: Clock) -> None:
    async with scene(ANSWERS=1 << 16) as s:

        async def give(incoming: Incoming[Text]) -> Answer[Empty]:
            return Answer(Empty(), (BIG, BIG))

        s.rpc.serve("t/1/give", Text, give, declared=ANY)
        rpc, given = await s.honest(), 0

        async def one() -> None:
            nonlocal given
            answer = await rpc.call(s.host.id, "t/1/give", Text(""), Empty, timeout_s=60)
            given += sum(len(frame.payload) for frame in answer.frames)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(one)
        assert given == 16 * MB


@pytest.mark.slow
async def test_half_requests_are_bounded_and_have_their_time(autojump_clock: Clock) -> None:
    async with scene(RECEIVING=8 * MB) as s:
        whole = call(1, body=encode(Text("x" * (900 << 10))))
        streams = [await s.stream("lazy") for _ in range(20)]
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(push, stream, whole[:-1])
            await trio.sleep(1)
            assert half_bytes() <= 2 * MB + 20 * (32 << 10)
            await ask(await s.honest(), s.host.id, frames=[BIG])
            await trio.sleep(RPC_MESSAGE_S + MB / RPC_LEAST_BYTES_PER_S)
            nursery.cancel_scope.cancel()
        assert all(stream.closed for stream in streams)
        assert (s.used(), half_bytes()) == ({}, 0)
        assert not s.host.crashes


async def test_a_message_that_comes_byte_by_byte_is_given_up_and_one_that_keeps_moving_is_not(
    autojump_clock: Clock,
) -> None:
    async with scene() as s:
        slow, drip = await s.stream("slow"), await s.stream("drip")
        whole = call(1, body=encode(Text("x" * (512 << 10))))

        async def trickle(stream: LoopbackStream, bytes_per_s: int) -> None:
            for at in range(0, len(whole), bytes_per_s):
                await stream.send(whole[at : at + bytes_per_s])
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle, slow, RPC_LEAST_BYTES_PER_S)
            with pytest.raises(Unreachable):
                await trickle(drip, 1000)
        assert (await slow.receive_some(100))[4] == wire.REPLY


@dataclass
class Gatekeeper:
    """A gate as in runs with tokens."""

    open: bool = False
    asked: int = 0
    token: bytes = b""

    def objection(self, caller: PeerId, method: MethodName) -> Refused | None:
        self.asked += 1
        return None if self.open else Refused("not for you")

    def closed(self, caller: PeerId, methods: Iterable[MethodName]) -> bool:
        return not self.open

    def knows(self, peer: PeerId, method: MethodName) -> bool:
        return True

    async def introduce(self, peer: PeerId, method: MethodName) -> None:
        raise NotImplementedError

    def forgotten(self, peer: PeerId, refusal: Refused) -> bool:
        return False

    def allows(self, peer: PeerId, role: str) -> bool:
        return self.open

    def named(self, peer: PeerId, token: bytes, *roles: str) -> str | None:
        return None


async def error_of(stream: LoopbackStream) -> tuple[int, str]:
    """The call that the next message answers, and how it failed."""
    parser = wire.MessageParser()
    while not (messages := parser.feed(await stream.receive_some(1 << 20))):
        pass
    return messages[0].id, str(wire.decode_failure(messages[0].body, stream.peer).args[0])


@pytest.mark.slow
async def test_behind_a_closed_gate_nothing_but_the_heads_of_calls_is_read(autojump_clock: Clock) -> None:
    async with scene() as s:
        gate = Gatekeeper()
        s.rpc.guard(gate)
        streams = [await s.stream("stranger") for _ in range(10)]
        whole = call(3, body=encode(Text("x" * (900 << 10))))
        async with trio.open_nursery() as nursery:
            for stream in streams:
                await stream.send(whole[: wire.HEAD_BYTES])
                assert await error_of(stream) == (3, "not for you")  # before any of its body came
                nursery.start_soon(push, stream, whole[wire.HEAD_BYTES : -1])
            await trio.testing.wait_all_tasks_blocked()
            assert (half_bytes(), s.used(), gate.asked) == (0, {}, 10)
            with pytest.raises(Refused, match="not for you"):
                await ask(await s.honest(), s.host.id, frames=[BIG])
            await trio.sleep(RPC_MESSAGE_S + MB / RPC_LEAST_BYTES_PER_S)
        assert all(stream.closed for stream in streams)


async def test_a_gate_that_opens_lets_in_the_next_call_of_the_same_stream(autojump_clock: Clock) -> None:
    async with scene() as s:
        gate = Gatekeeper()
        s.rpc.guard(gate)
        rpc = await s.honest()
        for _ in range(3):
            with pytest.raises(Refused):
                await ask(rpc, s.host.id, "x" * 1000)
        gate.open = True
        assert (await ask(rpc, s.host.id)).body.text == "hi"
        gate.open = False
        with pytest.raises(Refused):
            await ask(rpc, s.host.id)
        assert len(s.net.streams) == 1


async def test_what_is_announced_takes_no_room_and_an_honest_callers_frames_come(autojump_clock: Clock) -> None:
    async with scene(RECEIVING=64 * MB) as s:
        for name in ("one", "two"):
            stream = await s.stream(name)
            await stream.send(call(1, frames=1) + bytes(100))
        await trio.testing.wait_all_tasks_blocked()
        assert s.used()[Resource.RECEIVING] == 2 * RPC_STEP_BYTES
        answer = await ask(await s.honest(), s.host.id, frames=[BIG])
        assert bytes(answer.frames[0].payload) == BIG.payload


async def test_strangers_leave_room_for_members(autojump_clock: Clock) -> None:
    async with scene(RECEIVING=16 * MB) as s:
        s.book.members_by(lambda peer: peer == s.net.host("member").id.text)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                stream = await s.stream(f"stranger {number}")
                nursery.start_soon(push, stream, call(1, frames=1) + bytes(4 * MB - 1))
            await trio.sleep(1)
            assert s.used()[Resource.RECEIVING] == 12 * MB
            with pytest.raises(Overloaded) as caught:
                await ask(await s.honest("another stranger"), s.host.id, frames=[BIG])
            assert caught.value.retry_after_s > 0
            answer = await ask(await s.honest("member"), s.host.id, frames=[BIG])
            assert bytes(answer.frames[0].payload) == BIG.payload
            nursery.cancel_scope.cancel()


async def test_running_calls_are_bounded_by_peer_over_all_methods_and_streams(autojump_clock: Clock) -> None:
    async with scene(CALLS=32) as s:
        held = [Held() for _ in range(3)]
        for number, handler in enumerate(held):
            s.rpc.serve(f"t/1/held{number}", Text, handler, declared=ANY)
        streams = [await s.stream("busy") for _ in range(3)]
        for stream in streams:
            await stream.send(b"".join(call(number + 1, f"held{number}") for number in range(3)))
        await trio.testing.wait_all_tasks_blocked()
        assert sum(handler.entries for handler in held) == 8
        assert s.used() == {Resource.CALLS: 8}
        assert "too many calls are running: this peer has 8" in (await error_of(streams[2]))[1]
        await ask(await s.honest(), s.host.id)
        for stream in streams:
            stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        assert s.used() == {}


class Broken(LoopbackStream):
    """A stream that fails by an error of ours, in whatever does what `fails` names."""

    fails = ""

    def send_nowait(self, data: bytes) -> bool:
        if self.fails in ("send_nowait", "both"):
            raise LocalError("a stream was written to after its end")
        return False

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        if self.fails in ("send", "both"):
            raise LocalError("a stream was written to after its end")
        await super().send(data)

    async def wait_gone(self) -> None:
        if self.fails == "wait_gone":
            raise LocalError("nobody can wait")
        await super().wait_gone()


@pytest.mark.parametrize("fails", ["send", "send_nowait", "both", "wait_gone"])
async def test_an_error_of_ours_ends_one_stream_and_no_other_call(fails: str, autojump_clock: Clock) -> None:
    async with scene() as s:
        held = Held()

        async def crash(incoming: Incoming[Text]) -> Answer[Empty]:
            raise KeyError

        async def listen(incoming: Incoming[Text], parts: object) -> None:
            await trio.sleep_forever()

        s.rpc.serve("t/1/held", Text, held, declared=ANY)
        s.rpc.serve("t/1/crash", Text, crash, declared=ANY)
        s.rpc.serve_stream("t/1/listen", Text, listen, declared=ANY)
        honest = await s.honest()
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                await honest.call(s.host.id, "t/1/held", Text(""), Empty, timeout_s=50)

            nursery.start_soon(wait)
            await held.entered.wait()
            theirs = await s.stream("unlucky")
            for name in ("echo", "crash", "held", "listen"):
                ours, theirs = local_pair(s.net.host("unlucky").id, s.host.id, "/peerd/t/1")
                broken = Broken(theirs.peer, theirs.protocol)
                broken.fails = fails
                broken._other, ours._other = ours, broken
                nursery.start_soon(s.host._accept, broken)
                kind = wire.OPEN if name == "listen" else wire.REQUEST
                await ours.send(wire.encode_call(kind, 1, name.encode(), 2.0, encode(Text(""))))
                await trio.sleep(3)
                with pytest.raises(RemoteError):
                    await read_to_the_end(ours)
            assert (await ask(honest, s.host.id)).body.text == "hi"
            held.let_go.set()
        await trio.testing.wait_all_tasks_blocked()
        assert s.used() == {}
        assert s.rpc.status()["running"] == 0
        assert any(isinstance(error, LocalError) for _, error in s.host.crashes)


async def read_to_the_end(stream: LoopbackStream) -> None:
    stream.reset()
    while await stream.receive_some(1000):
        pass


async def test_an_error_of_ours_while_watching_deadlines_ends_nothing(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene() as s:
        rpc = await s.honest()
        s.host.handle("/peerd/u/1", silent)
        expire = Channel.expire
        failed = 0

        def once(channel: Channel, now: float) -> None:
            nonlocal failed
            failed += 1
            if failed == 1:
                raise LocalError("our clock is broken")
            expire(channel, now)

        monkeypatch.setattr(Channel, "expire", once)
        with pytest.raises(TooSlow):
            await rpc.call(s.host.id, "u/1/held", Text(""), Empty, timeout_s=1)
        assert failed == 2
        assert (await ask(rpc, s.host.id)).body.text == "hi"


async def silent(stream: RpcStream) -> None:
    """Take everything, and answer nothing."""
    while await stream.receive_some(1000):
        pass


async def test_a_refused_call_before_one_with_frames_takes_nothing_of_these(autojump_clock: Clock) -> None:
    """Both come in one piece, while so much is unread that neither begins at once."""
    async with scene() as s:

        async def large(incoming: Incoming[Text]) -> Answer[Text]:
            return Answer(Text("x" * (128 << 10)))

        s.rpc.serve("t/1/large", Text, large, declared=ANY)
        headers, payloads = wire.encode_frames([TensorFrame("uint8", (1000,), bytes(1000))])
        last = wire.encode_call(wire.REQUEST, 9, b"echo", 50.0, encode(Text("")), headers, 1)
        stream, parser = await s.stream("a"), wire.MessageParser()
        await stream.send(b"".join(call(number, "large") for number in range(1, 8)))
        await trio.testing.wait_all_tasks_blocked()
        await stream.send(b"".join((call(8, "none"), last, *payloads)))
        kinds: list[tuple[int, int]] = []
        with trio.fail_after(100):
            while len(kinds) < 9:
                messages = parser.feed(await stream.receive_some(1 << 20))
                kinds += [(message.id, message.kind) for message in messages]
        assert sorted(kinds)[-2:] == [(8, wire.ERROR), (9, wire.REPLY)]
        assert not s.host.crashes
