"""Serving calls: reads requests from incoming streams and starts their handlers.

The gate, if there is one, is checked when a stream opens and again at each call. From a caller that may use none of a
service's methods, only the heads of messages are read. Gate and declaration are checked before payloads are received. A
handler is cancelled if its caller cancels, resets the stream or is lost; it can fail only its own call. A peer that
breaks the message grammar loses the whole stream: ProtocolViolation leaves `serve`, and the host's supervisor logs it
and resets the stream. If a method has no free slot for a call, a call whose caller has made no progress for long is
ended. Calls whose proofs are invalid are counted against their caller (`wire/budget/tab`).

Besides each method's own limits, the host's book limits: running calls; bytes of messages, from their arrival to the
end of their call; unread answers (above RPC_OUTBOX_BYTES a stream is not read further, and calls of a peer that has
used up its share of unread answers do not begin). Parts read ahead are limited as well.
"""

from __future__ import annotations

import logging

import msgspec
import trio

from peerd.core.errors import (
    LocalError,
    Overloaded,
    PeerdError,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
    Unreachable,
)
from peerd.core.limits import (
    RPC_CALLS_PER_STREAM,
    RPC_DEFAULT_BODY_BYTES,
    RPC_FREE_BODY_BYTES,
    RPC_LEAST_BYTES_PER_S,
    RPC_MESSAGE_S,
    RPC_STALL_S,
)
from peerd.messages.encoding import decode
from peerd.rpc.call_stream import CallStream
from peerd.rpc.inbound import Inbound
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.declaration import Shows
from peerd.rpc.methods.message_codec import RpcMessage, encode_failure
from peerd.rpc.methods.method_load import Crowd
from peerd.rpc.outbox import Outbox
from peerd.rpc.room import Room, Share, user_of
from peerd.rpc.rpc_types import AccessGuard, RpcStream
from peerd.rpc.served_call import Method, ServedCall
from peerd.rpc.task_pool import TaskPool, Tasks
from peerd.wire.budget.book import EVERYBODY, Resource
from peerd.wire.budget.tab import UnprovenCalls, UsageTab
from peerd.wire.rate.arrival_rate import LineRates

_log = logging.getLogger("peerd.rpc")
_BATCHES_A_TURN = 16  # of messages, read before other tasks run
_ANSWER_BYTES = RPC_DEFAULT_BODY_BYTES  # a call begins only if an answer of this size would find room
_CALLS_STEP = 16  # calls that a stream reserves in the book at once
_UNPROVEN_S = 5.0  # retry delay for a caller whose proofs are invalid
_UNREAD_STEP_BYTES = 64 << 10  # unread answers that a stream reserves in the book at once


class Server:
    """All methods that this peer serves, and the resources that their callers share."""

    def __init__(self, crew: TaskPool, room: Room, rates: LineRates) -> None:
        self.crew = crew
        self.room = room
        self.rates = rates
        self.unproven = UnprovenCalls(room.book)
        self.protocols: dict[str, dict[bytes, Method]] = {}
        self.gate: AccessGuard | None = None

    def add(self, method: Method) -> None:
        """Serve `method`. Raises LocalError if its name is taken."""
        methods = self.protocols.setdefault(method.name.protocol, {})
        if method.name.name in methods:
            raise LocalError(f"{method.name.full} is served already")
        methods[method.name.name] = method

    async def serve(self, stream: RpcStream) -> None:
        """Serve one incoming stream until it ends."""
        if self.crew.tasks is None:
            stream.reset()
        else:
            await ServedStream(self, stream, self.crew.tasks).run()


class ServedStream:
    """The calls of one incoming stream."""

    def __init__(self, server: Server, stream: RpcStream, tasks: Tasks) -> None:
        book, user = server.room.book, user_of(stream)
        unread = UsageTab(book, Resource.ANSWERS, user, step=_UNREAD_STEP_BYTES)
        self.peer = stream.peer
        self.outbox = Outbox(unread)
        self._server, self.user = server, user
        self._stream = stream
        self._tasks = tasks
        self._methods = server.protocols.get(stream.protocol, {})
        self.share = Share(server.room, user, demanding=True)
        self._inbound = Inbound(stream, self._quick, server.rates, self.share)
        self._running = UsageTab(book, Resource.CALLS, user, step=_CALLS_STEP)
        self._calls: dict[int, ServedCall] = {}
        self._last_id = 0
        self._idle: trio.Event | None = None  # created once the caller has finished; set when no call runs
        self._watch: trio.CancelScope | None = None

    async def run(self) -> None:
        """Read requests until the caller closes its side, then wait for running calls to end."""
        self._tasks.start(lambda: self.outbox.run(self._stream), self._about, self._stream.reset)
        try:
            handled = 0
            if self._closed() and not await self._turn_away():
                self.outbox.end()
                await self.outbox.ended()
                return
            while messages := await self._inbound.batch():
                for message in messages:
                    if message.headers or not self._quick(message):
                        await self._handle(message)
                handled += 1
                if handled % _BATCHES_A_TURN == 0:  # batches may arrive without waiting
                    await trio.lowlevel.checkpoint()
            await self._finish()
        except ProtocolViolation as error:
            raise error.blame(self.peer) from None
        except (Unreachable, TooSlow, Overloaded):
            self._stream.reset()  # the caller reset it, is gone, or stopped within a message
        finally:
            for call in list(self._calls.values()):
                call.cancel()
            if self._watch is not None:
                self._watch.cancel()
            self.outbox.close()
            self._inbound.close()

    def _about(self) -> str:
        return f"calls of {self._stream.protocol} by {self.peer.short}"

    def _closed(self) -> bool:
        """True if this caller may use none of these methods."""
        gate = self._server.gate
        return gate is not None and gate.closed(self.peer, [method.name for method in self._methods.values()])

    def _objected(self) -> Refused:
        """The error for a call on this stream while the gate is closed to the caller: the gate's reason for the first
        of the protocol's methods, which the gate counts as a refused call.
        """
        gate, first = self._server.gate, next(iter(self._methods.values()))
        found = gate.objection(self.peer, first.name) if gate is not None else None
        return found or Refused("this service is not for you")

    async def _turn_away(self) -> bool:
        """Refuse calls by their heads alone while the gate is closed.

        Returns True if it opened, so that the next call may be accepted.
        """
        while head := await self._pass(wire.HEAD_BYTES):
            size, kind, frames, call_id = wire.read_head(head)
            if not self._closed():
                self._inbound.begin(head)
                return True
            if kind <= wire.OPEN:
                self._refuse(call_id, self._objected())
            if frames:
                break
            await self._pass(size)
            await self.outbox.room()
        return False

    async def _pass(self, size: int) -> bytes:
        """Receive `size` bytes and return the first of them, up to a head's length; empty at the end of the stream."""
        kept, left = b"", size
        with trio.move_on_after(RPC_MESSAGE_S + size / RPC_LEAST_BYTES_PER_S):
            while left:
                data = await self._stream.receive_some(left)
                if not data and left < size:
                    raise ProtocolViolation("the stream ended in the middle of a message", self.peer)
                if not data:
                    return b""
                left -= len(data)
                kept = (kept + data)[: wire.HEAD_BYTES]
            return kept
        raise TooSlow("a refused call did not arrive completely in time", self.peer)

    async def _finish(self) -> None:
        for call in self._calls.values():
            if call.parts is not None:
                call.parts.no_more_parts()
        if self._calls:
            self._idle = trio.Event()
            self._watch_for_loss()
            await self._idle.wait()
        self.outbox.end()
        await self.outbox.ended()

    def _watch_for_loss(self) -> None:
        """Cancel calls when the stream is lost, even while no task reads it."""
        if self._watch is None:
            watch = self._watch = trio.CancelScope()
            self._tasks.start(lambda: self._cancel_when_gone(watch), self._about, self._stream.reset)

    async def _cancel_when_gone(self, watch: trio.CancelScope) -> None:
        with watch:
            await self._stream.wait_gone()
            for call in list(self._calls.values()):
                call.cancel()

    def call_over(self, call_id: int) -> None:
        """Record that nothing more will be sent for this call."""
        self._calls.pop(call_id, None)
        if self._idle is not None and not self._calls:
            self._idle.set()

    def note_failure(self, error: PeerdError) -> None:
        """Record a failed call of this stream: an invalid proof counts against its caller."""
        if isinstance(error, RemoteError) and error.unproven:
            why = self._server.unproven.count(trio.current_time(), self.user)
            if why is not None:
                _log.warning("peer %s sends invalid proofs; its calls are refused without reading: %s", self.peer, why)

    def moved_bytes(self) -> int:
        """Payload bytes that the peer has sent us, plus bytes of this stream's answers that it has accepted."""
        return self._server.rates.total_bytes(self.peer) + self.outbox.sent_bytes

    def give_back(self, held_bytes: int) -> None:
        """Release the slot and the memory of a call that has ended."""
        self._running.give()
        if held_bytes:
            self.share.give(held_bytes)

    def reset(self) -> None:
        """End the stream, because the caller does not read its answers."""
        self._stream.reset()

    def _quick(self, message: RpcMessage) -> bool:
        """Handle a message without frames if that needs no waiting. Returns False otherwise."""
        if message.kind <= wire.OPEN:
            if self.outbox.full:
                return False
            call = self._begin(message)
            if call is not None:
                self._server.crew.start(call)
            return True
        if message.kind == wire.CANCEL:
            call = self._known(message)
            if call is not None:
                call.cancel()
            return True
        return False

    async def _handle(self, message: RpcMessage) -> None:
        if message.kind <= wire.OPEN:
            await self.outbox.room()
            call = self._begin(message)
            if call is None:
                if message.headers:  # without headers, waiting payloads belong to a later message
                    await self._inbound.skip()
            elif await self._receive(call, message):
                self._server.crew.start(call)
        elif message.kind in (wire.PART, wire.END):
            await self._part(message)
        else:
            raise ProtocolViolation(f"a message of kind {message.kind} from a caller")

    def _known(self, message: RpcMessage) -> ServedCall | None:
        """The call that a message belongs to, or None if it is over, which the caller may not know yet."""
        if not 0 < message.id <= self._last_id:
            raise ProtocolViolation("a message for a call that was never made")
        return self._calls.get(message.id)

    def _begin(self, message: RpcMessage) -> ServedCall | None:
        """Accept a call, or refuse it with the reason."""
        if message.id <= self._last_id:
            raise ProtocolViolation("call ids must increase")
        self._last_id = message.id
        if not self._methods:  # our own call may arrive before the first method is served
            self._methods = self._server.protocols.get(self._stream.protocol, self._methods)
        method = self._methods.get(message.name)
        if method is None:
            name = message.name.decode("ascii", "replace")
            refusal = Refused(f"no such method: {self._stream.protocol.removeprefix('/peerd/')}/{name}")
            self._refuse(message.id, refusal)
            return None
        held_bytes = len(message.body) if len(message.body) > RPC_FREE_BODY_BYTES else 0
        error = self._objection(message, method) or self._crowd(method, held_bytes)
        if error is not None:
            method.load.counters.refused += 1
            self._refuse(message.id, error)
            return None
        call: ServedCall | None = None
        try:
            body = decode(method.request, message.body)
            error = method.objection(self.peer, body) if method.objection is not None else None
            if error is None and method.frames_objection is not None:
                error = method.frames_objection(self.peer, message.headers)
            if error is not None:
                method.load.counters.refused += 1
                self.note_failure(error)
                self._refuse(message.id, error)
                return None
            call = self._take_up(message, method, body, held_bytes)
        finally:
            if call is None:  # without a call, release what was reserved
                method.load.leave(self.user, 0.0)
                self.give_back(held_bytes)
        return call

    def _take_up(self, message: RpcMessage, method: Method, body: msgspec.Struct, held_bytes: int) -> ServedCall:
        """Create a call that is counted and has passed all checks."""
        deadline = trio.current_time() + min(message.timeout_ms / 1000, method.load.declared.deadline_s)
        call = self._calls[message.id] = ServedCall(self, message.id, method, body, deadline)
        call.held_bytes = held_bytes
        if method.streaming is not None:
            call.parts = CallStream(self.peer, message.id, self.outbox, self.share)
            self._watch_for_loss()
        return call

    def _objection(self, message: RpcMessage, method: Method) -> PeerdError | None:
        """Reason to refuse a call even if the server is idle, or None."""
        gate = self._server.gate
        if gate is not None and (closed := gate.objection(self.peer, method.name)) is not None:
            return closed
        if (message.kind == wire.OPEN) != (method.streaming is not None):
            return Refused(f"{method.name.full} is a {'unary' if method.unary else 'streaming'} call")
        declared = method.load.declared
        fault = declared.objection(len(message.body), len(message.headers), message.frame_bytes, message.rows)
        if fault is not None:
            return Refused(fault)
        if declared.shows is Shows.MEMBERSHIP and not self._server.room.book.is_member(self.peer.text):
            return Refused(f"{method.name.full} is only for members, which have helped to make a step")
        if (why := self._server.unproven.objection(trio.current_time(), self.user)) is not None:
            return Overloaded(f"too many calls had an invalid proof: {why}", _UNPROVEN_S)
        if len(self._calls) >= RPC_CALLS_PER_STREAM:
            return Overloaded(f"{len(self._calls)} calls of yours are running", method.load.retry_after_s())
        return None

    def _crowd(self, method: Method, held_bytes: int) -> Overloaded | None:
        """Reason why a limit excludes a call now, or None; then it is counted in the method's load and in the book."""
        book, load = self._server.room.book, method.load
        if (
            book.used(Resource.ANSWERS)
            and (full := book.objection(Resource.ANSWERS, self.user, _ANSWER_BYTES)) is not None
        ):
            return Overloaded(f"too many answers are unread: {full}", load.retry_after_s())
        if (full := self._running.take()) is not None:
            return Overloaded(f"too many calls are running: {full}", load.retry_after_s())
        if held_bytes and (full := self.share.take(held_bytes)) is not None:
            self._running.give()
            return Overloaded(f"too many bytes are being received: {full}", load.retry_after_s())
        if (crowd := load.enter(self.user, book.is_member)) is not None:
            self.give_back(held_bytes)
            self._make_way(method, crowd)
            return Overloaded(f"too many calls of this method are running: {crowd.why}", load.retry_after_s())
        return None

    def _make_way(self, method: Method, crowd: Crowd) -> None:
        """End the call whose caller has stalled longest, of those under the exceeded limit, if that is long enough.

        The caller whose call was refused finds the slot free when it retries.
        """
        now = trio.current_time()
        rivals = [call for call in method.under_way if crowd.scope == EVERYBODY or self._shares(call, crowd.scope)]
        stalled = max(((call.stalled_s(now), -at) for at, call in enumerate(rivals)), default=(0.0, 0))
        if stalled[0] >= RPC_STALL_S:
            call = rivals[-stalled[1]]
            _log.info("ended %s to free its slot: its caller has made no progress for %.0f s", call.about(), stalled[0])
            call.give_way()

    def _shares(self, call: ServedCall, scope: int) -> bool:
        """True if the call's user and ours have the same peer, address or address block, as `scope` selects."""
        return call.user[scope] == self.user[scope]

    def _refuse(self, call_id: int, error: PeerdError) -> None:
        if self.outbox.put(encode_failure(call_id, error)) is not None:
            self._stream.reset()  # the caller does not even read refusals

    async def _receive(self, call: ServedCall, message: RpcMessage) -> bool:
        """Receive the frames of a call. Returns False if there was no memory or no time for them."""
        if not message.headers:
            return True
        try:
            frames = await self._inbound.frames(message, call.deadline, None, call.in_round)
        except (Overloaded, TooSlow) as error:
            call.cancel(error)
            await self._inbound.skip()
            return False
        if call.over:  # its caller left meanwhile; the call's share was already released
            self.share.give(message.frame_bytes)
            return False
        call.frames = frames
        call.held_bytes += message.frame_bytes
        return True

    async def _part(self, message: RpcMessage) -> None:
        call = self._known(message)
        if call is None:
            if message.headers:
                await self._inbound.skip()
        elif call.parts is None or not call.parts.receiving:
            raise ProtocolViolation("a part for a call that expects none")
        elif message.kind == wire.END:
            call.parts.no_more_parts()
        elif fault := call.objection(message):
            call.cancel(Refused(fault))
            if message.headers:
                await self._inbound.skip()
        else:
            try:
                await call.parts.take(message, self._inbound, call.deadline)
            except (Overloaded, TooSlow) as error:
                call.cancel(error)
                await self._inbound.skip()
