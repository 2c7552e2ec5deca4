"""Sessions of calls with a hostile caller: it speaks correctly up to a random point, and then says anything.

Half of the callers are members. Over fake hosts under a virtual clock. A session follows from its seed alone. After
each, an honest caller is answered, and nothing is left behind: no call, no byte in the book, no fault of ours.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import PeerdError, RemoteError, Unreachable
from peerd.core.limits import RPC_BUDGET_WAIT_S
from peerd.messages.encoding import Empty, encode
from peerd.rpc.loopback import LoopbackStream
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.declaration import Shows
from peerd.rpc.rpc import Answer, CallStream, Incoming, Rpc
from peerd.wire.budget.book import BOUNDS, Book, Bounds, Resource
from tests.kit.declared import declared
from tests.worlds.machines.fakehost import FakeHost, TrioClock, fake_net
from tests.worlds.machines.rpc_cases import Text, echo, repeat

_STEPS: Final = 16  # of one session, at most
_LARGE: Final = declared(body_bytes=256 << 10, frames=4, frame_bytes=4 << 20, calls_per_peer=32)
_LITTLE: Final = Bounds(total=2 << 20, peer=1 << 20, place=1 << 20, region=1 << 20, reserved=1 << 19)
_END_S: Final = 4000.0  # the longest that a caller may ask for, and what a stalled message may take


_ANSWERERS: Final = (b"echo", b"large", b"give", b"wait")
_TALKERS: Final = (b"repeat", b"on")


async def _large(call: Incoming[Text]) -> Answer[Text]:
    return Answer(Text("x" * (200 << 10)))


async def _give(call: Incoming[Text]) -> Answer[Empty]:
    return Answer(Empty(), (TensorFrame("uint8", (1 << 20,), bytes(1 << 20)),))


async def _wait(call: Incoming[Text]) -> Answer[Empty]:
    await trio.sleep_forever()
    raise AssertionError


async def _stream_on(call: Incoming[Text], parts: CallStream) -> None:
    while True:
        await parts.send(Text("x" * 1000))


def _serve(rpc: Rpc) -> None:
    for name, handler in (("echo", echo), ("large", _large), ("give", _give), ("wait", _wait)):
        rpc.serve(f"t/1/{name}", Text, handler, declared=_LARGE)
    rpc.serve("t/1/granted", Text, echo, declared=replace(_LARGE, shows=Shows.GRANT), objection=lambda peer, body: None)
    for name, talker in (("repeat", repeat), ("on", _stream_on)):
        rpc.serve_stream(f"t/1/{name}", Text, talker, declared=_LARGE)


@dataclass
class Hostile:
    """One caller with some streams, each with its own calls; what it sends is built from `rng` alone."""

    host: FakeHost
    served: FakeHost
    rng: random.Random
    streams: list[LoopbackStream] = field(default_factory=list)
    last_ids: list[int] = field(default_factory=list)  # of the calls on each
    last_names: list[bytes] = field(default_factory=list)  # of their methods
    correct: bool = True

    async def step(self) -> None:
        """Anything that a caller can do."""
        if not self.streams or self.rng.random() < 0.2:
            self.streams.append(await self.host.open_stream(self.served.id, "/peerd/t/1"))
            self.last_ids.append(0)
            self.last_names.append(b"")
        number = self.rng.randrange(len(self.streams))
        stream = self.streams[number]
        acts: list[Callable[[LoopbackStream, int], Awaitable[None]]] = [
            *(self._speak, self._flood, self._cancel, self._read, self._pause),
        ]
        if not self.correct:
            acts += [self._mutate, self._half, self._unfinished, self._finish, self._reset]
        try:
            with trio.move_on_after(self.rng.choice((0.01, 1.0, 100.0))):
                await self.rng.choice(acts)(stream, number)
        except (Unreachable, PeerdError):
            stream.reset()
            del self.streams[number], self.last_ids[number], self.last_names[number]

    def _message(self, number: int) -> bytes:
        rng = self.rng
        body = encode(Text("x" * rng.choice((0, 10, 5000, 200_000))))
        sizes = [rng.choice((0, 100, 70_000, 1 << 20)) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
        headers, payloads = wire.encode_frames([TensorFrame("uint8", (size,), bytes(size)) for size in sizes])
        talking = self.last_names[number] in _TALKERS
        kind = rng.choice((wire.REQUEST, wire.OPEN, wire.PART, wire.END, wire.CANCEL))
        if self.correct or rng.random() < 0.7:
            kind = wire.PART if talking and rng.random() < 0.8 else rng.choice((*[wire.REQUEST] * 5, wire.OPEN))
        if kind in (wire.REQUEST, wire.OPEN):
            self.last_ids[number] += 1
            name = rng.choice(_TALKERS if kind == wire.OPEN else _ANSWERERS)
            self.last_names[number] = name = name if self.correct or rng.random() < 0.9 else b"none"
            timeout_s = rng.choice((0.01, 5.0, 3600.0))
            start = wire.encode_call(kind, self.last_ids[number], name, timeout_s, body, headers, len(payloads))
        elif kind == wire.PART:
            start = wire.encode_message(kind, self.last_ids[number], body, headers, len(payloads))
        else:
            return wire.encode_message(kind, rng.randint(0, self.last_ids[number] + 1))
        return start + b"".join(payloads)

    async def _speak(self, stream: LoopbackStream, number: int) -> None:
        await stream.send(self._message(number))

    async def _mutate(self, stream: LoopbackStream, number: int) -> None:
        data = bytearray(self._message(number))
        for _ in range(self.rng.randrange(1, 4)):
            data[self.rng.randrange(min(len(data), 80))] = self.rng.randrange(256)
        await stream.send(data)

    async def _half(self, stream: LoopbackStream, number: int) -> None:
        data = self._message(number)
        await stream.send(data[: self.rng.randrange(len(data))])

    async def _unfinished(self, stream: LoopbackStream, number: int) -> None:
        """All but the end of a large message, on a stream of its own: nothing else can follow."""
        payload = bytes(self.rng.choice((5000, 1 << 20, 4 << 20)))
        headers, _ = wire.encode_frames([TensorFrame("uint8", (len(payload),), payload)])
        name, body = self.rng.choice((b"echo", b"granted")), encode(Text(""))
        other = await self.host.open_stream(self.served.id, "/peerd/t/1")
        self.streams.append(other)
        self.last_ids.append(1)
        self.last_names.append(name)
        await other.send(wire.encode_call(wire.REQUEST, 1, name, 3600.0, body, headers, 1) + payload[1:])

    async def _flood(self, stream: LoopbackStream, number: int) -> None:
        for _ in range(self.rng.choice((10, 100))):
            await stream.send(self._message(number))

    async def _cancel(self, stream: LoopbackStream, number: int) -> None:
        every = range(1, self.last_ids[number] + 1)
        await stream.send(b"".join(wire.encode_message(wire.CANCEL, call_id) for call_id in every))

    async def _read(self, stream: LoopbackStream, number: int) -> None:
        for _ in range(self.rng.choice((1, 50))):
            await stream.receive_some(1 << 16)

    async def _finish(self, stream: LoopbackStream, number: int) -> None:
        await stream.close_write()

    async def _reset(self, stream: LoopbackStream, number: int) -> None:
        stream.reset()

    async def _pause(self, stream: LoopbackStream, number: int) -> None:
        await trio.sleep(self.rng.choice((1.0, 40.0, 200.0)))


async def session(seed: int) -> None:
    """One session; AssertionError tells what it left behind."""
    rng = random.Random(seed)
    async with fake_net() as net:
        served = net.host("served")
        calls = Bounds(total=64, peer=32, place=32, region=48, reserved=16)
        served.book = Book({**BOUNDS, Resource.RECEIVING: _LITTLE, Resource.ANSWERS: _LITTLE, Resource.CALLS: calls})
        rpc, honest = Rpc(served, TrioClock()), Rpc(net.host("honest"), TrioClock())
        _serve(rpc)
        await net.nursery.start(rpc.run)
        await net.nursery.start(honest.run)
        hostile = Hostile(net.host("hostile"), served, rng)
        if rng.random() < 0.5:  # members are not trusted more
            served.book.members_by(lambda peer: peer == hostile.host.id.text)
        correct = rng.randrange(_STEPS)
        for number in range(rng.randrange(1, _STEPS)):
            hostile.correct = number < correct
            await hostile.step()
            served.book.check()
        frames = (TensorFrame("uint8", (1000,), bytes(1000)),)
        answer = await honest.call(served.id, "t/1/echo", Text("hi"), Text, frames=frames, timeout_s=5)
        assert answer.body.text == "hi", f"seed {seed}"
        if rng.random() < 0.5:
            await trio.sleep(_END_S)
        for stream in hostile.streams:  # a streaming call may last as long as its stream
            stream.reset()
        await trio.sleep(2 * RPC_BUDGET_WAIT_S)  # someone may still wait for room
        left = {means.name: used for means in Resource if (used := served.book.used(means))}
        status = rpc.status()
        assert (left, status["running"], status["held_bytes"]) == ({}, 0, 0), f"seed {seed}: {left} {status}"
        faults = [error for _, error in served.crashes if not isinstance(error, RemoteError)]
        assert not faults, f"seed {seed}: {faults}"
