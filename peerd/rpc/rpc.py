"""Calls between peers: `call` and `stream` make them, `serve` and `serve_stream` answer them.

A method is named "service/version/name"; all methods of a service and version share the libp2p protocol
"/peerd/service/version". Bodies are `messages.encoding.Message` structs; tensors are sent after them as
TensorFrames. Every failure has a type: Refused, Overloaded, TooSlow (also if the caller's own time has passed),
Unreachable, ProtocolViolation; each names the peer. Repeating a call after Unreachable or TooSlow may run the handler
twice, so a call that may be repeated has an id in its body, by which the handler recognizes it.

A call to oneself takes the same path over a stream in memory. Calls need a running `run`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.clock import Clock
from peerd.core.errors import LocalError, NotFiniteHere, Overloaded, PeerdError, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_IDLE_S, RPC_MESSAGE_FRAME_BYTES
from peerd.messages.encoding import Empty, decode, encode
from peerd.rpc.call_stream import CallStream, Encoded
from peerd.rpc.channel import Channel, Reply, Request
from peerd.rpc.loopback import local_pair
from peerd.rpc.methods.declaration import CHECKED_BEFORE_FRAMES, Declaration
from peerd.rpc.methods.method_load import Counters, MethodLoad, MethodName, method_name
from peerd.rpc.room import Room
from peerd.rpc.rpc_types import AccessGuard, Answer, Incoming, RpcHost, RpcStream
from peerd.rpc.served_call import FramesObjection, Method
from peerd.rpc.server import Server
from peerd.rpc.stream_channel import StreamChannel
from peerd.rpc.stream_pool import StreamPool
from peerd.rpc.task_pool import TaskPool, Tasks
from peerd.wire.rate.arrival_rate import LineRates

__all__ = ["Answer", "CallStream", "Encoded", "Incoming", "Rpc"]

_AGAIN_S = 1.0  # before deadlines are checked again if a check fails
B = TypeVar("B", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class Rpc:
    """All calls that this peer makes and serves."""

    def __init__(self, host: RpcHost, clock: Clock) -> None:
        self._host = host
        self._now = clock.now
        self._names: dict[str, MethodName] = {}
        self._channels: dict[tuple[PeerId, str], Channel] = {}  # shared by small calls
        self._retired: list[Channel] = []  # superseded, with calls still in progress
        self._lanes, self._stream_lanes = (
            StreamPool[Channel](),
            StreamPool[StreamChannel](),
        )  # for large calls, for streaming ones
        self._counters: dict[str, Counters] = {}  # of calls made, by service
        self._calls_alone = 0
        self._room = Room(host.book)  # holds requests until their handlers end, and replies while they arrive
        self._rates = LineRates()
        self._crew = TaskPool(host.supervise)
        self._server = Server(self._crew, self._room, self._rates)
        self._due = math.inf  # time of the next check by the timer
        self._timer = trio.CancelScope()
        host.when_moved(self._move)
        host.book.members_by(lambda peer: peer == host.id.text)  # calls to ourselves count as a member's

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Process calls until cancelled."""
        async with trio.open_nursery() as nursery:
            self._crew.open(nursery)
            try:
                task_status.started()
                await self._keep_time()
            finally:
                self._crew.close()

    @property
    def gate(self) -> AccessGuard | None:
        """The guard of this peer's calls in both directions, or None."""
        return self._server.gate

    def guard(self, gate: AccessGuard) -> None:
        """Make and accept calls only as `gate` allows. Must precede the first call."""
        self._server.gate = gate

    # Serving.

    def serve(
        self,
        method: str,
        request: type[B],
        handler: Callable[[Incoming[B]], Awaitable[Answer[Any]]],
        *,
        declared: Declaration,
        objection: Callable[[PeerId, B], PeerdError | None] | None = None,
        frames_objection: FramesObjection | None = None,
    ) -> None:
        """Answer calls of `method` that are within the limits `declared`.

        The handler runs until the caller's deadline; PeerdErrors that it raises are sent to the caller. `objection`
        checks a call's body before its frames are received, then `frames_objection` checks the frames' headers; the
        caller gets the error that they return. Raises LocalError if callers must show a proof and there is no
        `objection` to check it.
        """
        if declared.shows in CHECKED_BEFORE_FRAMES and objection is None:
            raise LocalError(f"{method}: callers must show {declared.shows}, and nothing checks it")
        served = Method(method_name(method), request, MethodLoad(declared), handler, None, objection, frames_objection)
        self._serve(served)

    def serve_stream(
        self,
        method: str,
        request: type[B],
        handler: Callable[[Incoming[B], CallStream], Awaitable[None]],
        *,
        declared: Declaration,
    ) -> None:
        """Answer streaming calls of `method`. The `declared` bytes and rows limit the request and each part."""
        self._serve(Method(method_name(method), request, MethodLoad(declared), streaming=handler))

    def _serve(self, method: Method) -> None:
        protocol = method.name.protocol
        if protocol not in self._server.protocols:
            self._host.handle(protocol, self._server.serve)
        self._server.add(method)

    @property
    def served(self) -> dict[str, Declaration]:
        """The methods that are served now, with their declarations."""
        methods = [method for methods in self._server.protocols.values() for method in methods.values()]
        return {method.name.full: method.load.declared for method in methods}

    def unserve(self, service: str, names: Collection[str] = ()) -> None:
        """Refuse further calls to "service/version", or only to its methods `names`. Running calls continue."""
        methods = self._server.protocols.get(f"/peerd/{service}", {})
        for name in [name for name in methods if not names or name.decode() in names]:
            del methods[name]

    # Calling.

    async def call(
        self,
        peer: PeerId,
        method: str,
        body: msgspec.Struct,
        reply: type[R],
        *,
        frames: Sequence[TensorFrame] = (),
        timeout_s: float,
        reply_frame_bytes: int = RPC_MESSAGE_FRAME_BYTES,
    ) -> Answer[R]:
        """Send one request and return its answer. `reply_frame_bytes` limits the answer's frames.

        The payloads of `frames` must not change before the call returns. Payloads that are still being produced are
        sent as far as they are ready; an error of their producer ends the call.
        """
        name = self._names.get(method) or self._name(method)
        request = self._request(name, body, frames, timeout_s, reply_frame_bytes)
        counters = self._counters[name.service]
        counters.calls += 1
        try:
            send = self._send if self._server.gate is None else self._send_as_member
            data, answered = await send(peer, name, request)
            return Answer(decode(reply, data), answered)
        except RemoteError as error:
            counters.failed += 1
            error.blame(peer)
            raise

    def tell(self, peer: PeerId, method: str, body: msgspec.Struct, *, timeout_s: float) -> None:
        """Make a call without waiting for its answer. It may fail, so use it only for what merely helps the peer."""

        async def call() -> None:
            await trio.lowlevel.checkpoint()  # everything may have ended before this starts
            with suppress(RemoteError):
                await self.call(peer, method, body, Empty, timeout_s=timeout_s)

        self._tasks().start(call, lambda: f"telling {peer.short} {method}")

    @asynccontextmanager
    async def stream(
        self,
        peer: PeerId,
        method: str,
        body: msgspec.Struct,
        *,
        frames: Sequence[TensorFrame] = (),
        timeout_s: float,
    ) -> AsyncIterator[CallStream]:
        """Make a streaming call: send parts, receive parts until None. Raises TooSlow once `timeout_s` has passed.

        Leaving the block before `receive` has returned None cancels the handler.
        """
        name = self._names.get(method) or self._name(method)
        request = self._request(name, body, frames, timeout_s, RPC_MESSAGE_FRAME_BYTES)
        counters = self._counters[name.service]
        counters.calls += 1
        try:
            with trio.CancelScope(deadline=request.deadline):
                await self._pass_gate(peer, name, request)
                async with self._streaming_call(peer, name, request) as parts:
                    yield parts
                return
            raise request.too_slow(peer)
        except RemoteError as error:
            counters.failed += 1
            self._is_forgotten(peer, error)
            raise

    async def _send(self, peer: PeerId, name: MethodName, request: Request) -> Reply:
        channel = self._shared_channel(peer, name.protocol) if not request.frames else None
        if channel is None or name.name in channel.answers_with_frames:
            return await self._call_alone(peer, name, request)
        self._wake_at(request.deadline)
        return await channel.request(request)

    async def _send_as_member(self, peer: PeerId, name: MethodName, request: Request) -> Reply:
        """Send a call after passing the gate; once more if the peer has forgotten us and the call has no frames."""
        await self._pass_gate(peer, name, request)
        try:
            return await self._send(peer, name, request)
        except Refused as error:
            if not self._is_forgotten(peer, error) or request.frames:
                raise
        await self._pass_gate(peer, name, request)
        return await self._send(peer, name, request)

    async def _pass_gate(self, peer: PeerId, name: MethodName, request: Request) -> None:
        gate = self._server.gate
        if gate is None or gate.knows(peer, name):
            return
        with trio.CancelScope(deadline=request.deadline):
            await gate.introduce(peer, name)
            return
        raise request.too_slow(peer)

    def _is_forgotten(self, peer: PeerId, error: RemoteError) -> bool:
        gate = self._server.gate
        return gate is not None and isinstance(error, Refused) and gate.forgotten(peer, error)

    def _name(self, method: str) -> MethodName:
        name = self._names[method] = method_name(method)
        self._counters.setdefault(name.service, Counters())
        return name

    def _request(
        self, name: MethodName, body: msgspec.Struct, frames: Sequence[TensorFrame], timeout_s: float, most: int
    ) -> Request:
        return Request(name.name, encode(body), frames, timeout_s, self._now() + timeout_s, most)

    async def _call_alone(self, peer: PeerId, name: MethodName, request: Request) -> Reply:
        """Make a call on a channel of its own, which is kept for the next such call if the peer has answered."""
        lane = self._lanes.take(peer, name.protocol) or self._start_channel(peer, name.protocol)
        self._calls_alone += 1
        keep = False
        try:
            with trio.CancelScope(deadline=request.deadline):
                reply = await lane.request(request)
                keep = True
                return reply
            lane.doubt()
            raise request.too_slow(peer)
        except (Refused, Overloaded, NotFiniteHere):
            keep = True
            raise
        finally:
            self._calls_alone -= 1
            if not keep or lane.busy or not self._lanes.keep(peer, name.protocol, lane):
                lane.drop()
            self._wake_at(self._now() + RPC_IDLE_S)

    @asynccontextmanager
    async def _streaming_call(self, peer: PeerId, name: MethodName, request: Request) -> AsyncIterator[CallStream]:
        """Make a call on a stream of its own, which is kept for the next such call if this one ended regularly."""
        self._calls_alone += 1
        try:
            tasks, lane = self._tasks(), self._stream_lanes.take(peer, name.protocol)
            if lane is None:
                stream = await self._open_stream(peer, name.protocol)
                lane = StreamChannel(stream, self._room, self._rates, tasks)
            try:
                yield await lane.call(request)
            finally:
                lane.leave()
                if not self._stream_lanes.keep(peer, name.protocol, lane):
                    lane.close()
                self._wake_at(self._now() + RPC_IDLE_S)
        finally:
            self._calls_alone -= 1

    def _tasks(self) -> Tasks:
        if self._crew.tasks is None:
            raise LocalError("no call can be made before Rpc.run has started, nor after it has ended")
        return self._crew.tasks

    def _shared_channel(self, peer: PeerId, protocol: str) -> Channel:
        channel = self._channels.get((peer, protocol))
        if channel is not None and channel.superseded:
            self._retire(channel)
            channel = None
        if channel is None or channel.over:
            channel = self._channels[peer, protocol] = self._start_channel(peer, protocol)
        return channel

    def _start_channel(self, peer: PeerId, protocol: str) -> Channel:
        tasks = self._tasks()
        channel = Channel(peer, self._room, self._rates)
        self._wake_at(self._now() + RPC_IDLE_S)
        run = partial(channel.run, partial(self._open_stream, peer, protocol), tasks)
        tasks.start(run, lambda: f"calls of {protocol} to {peer.short}")
        return channel

    def _move(self, peer: PeerId) -> None:
        """Use a better path to `peer`: close idle channels at once; calls in progress end on the old path."""
        for key, channel in list(self._channels.items()):
            if key[0] == peer and channel.superseded:
                del self._channels[key]
                self._retire(channel)
        self._lanes.move(peer)
        self._stream_lanes.move(peer)

    def _retire(self, channel: Channel) -> None:
        channel.retire()
        self._retired = [other for other in (*self._retired, channel) if not other.over]

    async def _open_stream(self, peer: PeerId, protocol: str) -> RpcStream:
        if peer != self._host.id:
            try:
                return await self._host.open_stream(peer, protocol)
            except RemoteError as error:
                error.blame(peer)
                raise
        ours, theirs = local_pair(peer, peer, protocol)
        self._tasks().start(lambda: self._server.serve(theirs), lambda: f"{protocol} to myself", theirs.reset)
        return ours

    # Deadlines of calls on shared streams: one timer for all, so that a call answered in time costs none.

    def _wake_at(self, due: float) -> None:
        if due < self._due:
            self._due = self._timer.deadline = due

    async def _keep_time(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._due) as self._timer:
                await trio.sleep_forever()
            self._due = self._now() + _AGAIN_S
            await self._host.supervise(self._look, lambda: "the deadlines of calls")

    async def _look(self) -> None:
        now = self._now()
        for channel in (*self._channels.values(), *self._retired):
            if channel.calls.due <= now:
                channel.expire(now)
        self._close_idle(now - RPC_IDLE_S)
        self._retired = [channel for channel in self._retired if not channel.over]
        waiting = (*self._channels.values(), *self._retired)
        self._due = min((channel.calls.due for channel in waiting), default=math.inf)
        if self._channels or self._lanes or self._stream_lanes:
            self._due = min(self._due, now + RPC_IDLE_S)

    def _close_idle(self, since: float) -> None:
        """Close channels that were not used after `since`, and drop lost ones."""
        for key, channel in list(self._channels.items()):
            if not channel.calls and channel.used <= since:
                channel.close()
            if channel.over:
                del self._channels[key]
        self._lanes.close_idle(since)
        self._stream_lanes.close_idle(since)

    def arrival_rate(self, peer: PeerId) -> float | None:
        """Bytes per second at which payloads arrive from `peer`; None before the first large one."""
        return self._rates.rate(peer)

    def came_bytes(self, peer: PeerId) -> int:
        """Payload bytes received from `peer` in calls and answers. Restarts at zero if the peer was forgotten."""
        return self._rates.total_bytes(peer)

    def status(self) -> dict[str, Any]:
        """Calls in flight, counters by service and rates by peer, as plain data."""
        served: dict[str, Any] = {}
        running = 0
        for methods in self._server.protocols.values():
            for method in methods.values():
                running += method.load.running
                served[method.name.full] = {"running": method.load.running, **dataclasses.asdict(method.load.counters)}
        channels = [channel for channel in (*self._channels.values(), *self._retired) if not channel.over]
        waiting = sum(len(channel.calls) for channel in channels) + self._calls_alone
        return {
            "waiting": waiting,
            "running": running,
            "channels": len(channels) + len(self._lanes) + len(self._stream_lanes),
            "held_bytes": self._room.held,
            "made": {
                service: {"calls": counters.calls, "failed": counters.failed}
                for service, counters in self._counters.items()
            },
            "served": served,
            "arrival_bytes_per_s": {peer.short: rate for peer, rate in self._rates.known().items()},
        }
