"""Serving calls: reads requests from incoming streams and starts their handlers.

The gate, if there is one, and the limits are asked before payloads are received. A handler is cancelled when its
caller cancels, resets the stream or is lost, and fails its own call only. A caller that breaks the grammar loses the
whole stream: ProtocolViolation leaves `serve`, and the host's supervisor logs it and resets.

What is bounded: calls per method, peer and stream; payload bytes held (one budget for all, from their arrival to the
end of their call); unsent answers (above RPC_OUTBOX_BYTES the stream is not read on); parts read ahead.
"""

from __future__ import annotations

import trio

from peerd.core.errors import LocalError, Overloaded, PeerdError, ProtocolViolation, Refused, TooSlow, Unreachable
from peerd.core.limits import RPC_CALLS_PER_STREAM
from peerd.core.messages import decode
from peerd.machine import rpc as wire
from peerd.machine.linkrate import LineRates
from peerd.machine.rpc import Message, encode_failure
from peerd.service.rpc_crew import Crew
from peerd.service.rpc_io import Inbound, SharedBudget
from peerd.service.rpc_outbox import Outbox
from peerd.service.rpc_parts import CallStream
from peerd.service.rpc_served import Method, ServedCall
from peerd.service.rpc_types import Gate, RpcStream

_BATCHES_A_TURN = 16  # of messages, read before others have their turn


class Server:
    """All methods that this peer serves, and what their callers share."""

    def __init__(self, crew: Crew, budget: SharedBudget, rates: LineRates) -> None:
        self.crew = crew
        self.budget = budget
        self.rates = rates
        self.protocols: dict[str, dict[bytes, Method]] = {}
        self.gate: Gate | None = None

    def add(self, method: Method) -> None:
        """Serve `method`; LocalError when its name is taken."""
        methods = self.protocols.setdefault(method.name.protocol, {})
        if method.name.name in methods:
            raise LocalError(f"{method.name.full} is served already")
        methods[method.name.name] = method

    async def serve(self, stream: RpcStream) -> None:
        """Serve one incoming stream to its end."""
        if self.crew.nursery is None:
            stream.reset()
        else:
            await ServedStream(self, stream, self.crew.nursery).run()


class ServedStream:
    """The calls of one incoming stream."""

    def __init__(self, server: Server, stream: RpcStream, nursery: trio.Nursery) -> None:
        self.peer = stream.peer
        self.outbox = Outbox()
        self._server = server
        self._stream = stream
        self._nursery = nursery
        self._methods = server.protocols.get(stream.protocol, {})
        self._inbound = Inbound(stream, self._quick, server.rates)
        self._calls: dict[int, ServedCall] = {}
        self._last_id = 0
        self._idle: trio.Event | None = None  # set once the caller has finished: no call runs any more
        self._watch: trio.CancelScope | None = None

    async def run(self) -> None:
        """Read requests until the caller closes its side, then let what runs end."""
        self._nursery.start_soon(self.outbox.run, self._stream)
        try:
            handled = 0
            while messages := await self._inbound.batch():
                for message in messages:
                    if message.headers or not self._quick(message):
                        await self._handle(message)
                handled += 1
                if handled % _BATCHES_A_TURN == 0:  # it waits for most of them, but need not
                    await trio.lowlevel.checkpoint()
            await self._finish()
        except ProtocolViolation as error:
            raise error.blame(self.peer) from None
        except Unreachable:
            self._stream.reset()  # the caller reset it, or is gone
        finally:
            for call in list(self._calls.values()):
                call.cancel()
            if self._watch is not None:
                self._watch.cancel()
            self.outbox.close()

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
        """Cancel calls when the stream is lost, from now on also while nobody reads it."""
        if self._watch is None:
            self._watch = trio.CancelScope()
            self._nursery.start_soon(self._cancel_when_gone, self._watch)

    async def _cancel_when_gone(self, watch: trio.CancelScope) -> None:
        with watch:
            await self._stream.wait_gone()
            for call in list(self._calls.values()):
                call.cancel()

    def call_over(self, call_id: int) -> None:
        """Nothing more will be sent for this call."""
        self._calls.pop(call_id, None)
        if self._idle is not None and not self._calls:
            self._idle.set()

    def give_back(self, held_bytes: int) -> None:
        """A call has ended, and lets go of so many payload bytes."""
        self._server.budget.give(self.peer, held_bytes)

    def reset(self) -> None:
        """The caller does not take its answers: the stream ends."""
        self._stream.reset()

    def _quick(self, message: Message) -> bool:
        """A message without frames that needs no waiting; False when it does."""
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

    async def _handle(self, message: Message) -> None:
        if message.kind <= wire.OPEN:
            await self.outbox.room()
            call = self._begin(message)
            if call is None:
                await self._inbound.skip()
            elif await self._receive(call, message):
                self._server.crew.start(call)
        elif message.kind in (wire.PART, wire.END):
            await self._part(message)
        else:
            raise ProtocolViolation(f"a message of kind {message.kind} from a caller")

    def _known(self, message: Message) -> ServedCall | None:
        """The call that a message belongs to; None when it is over, which the caller may not know yet."""
        if not 0 < message.id <= self._last_id:
            raise ProtocolViolation("a message for a call that was never made")
        return self._calls.get(message.id)

    def _begin(self, message: Message) -> ServedCall | None:
        """Take up a call, or say why not."""
        if message.id <= self._last_id:
            raise ProtocolViolation("call ids must rise")
        self._last_id = message.id
        method = self._methods.get(message.name)
        if method is None:
            name = message.name.decode("ascii", "replace")
            refusal = Refused(f"no such method: {self._stream.protocol.removeprefix('/peerd/')}/{name}")
            self.outbox.put(encode_failure(message.id, refusal))
            return None
        error = self._objection(message, method)
        if error is not None:
            method.load.counters.refused += 1
            self.outbox.put(encode_failure(message.id, error))
            return None
        try:
            body = decode(method.request, message.body)
        except ProtocolViolation:
            method.load.leave(self.peer, 0.0)
            raise
        if method.objection is not None and (error := method.objection(self.peer, body)) is not None:
            method.load.leave(self.peer, 0.0)
            method.load.counters.refused += 1
            self.outbox.put(encode_failure(message.id, error))
            return None
        deadline = trio.current_time() + min(message.timeout_ms / 1000, method.load.limits.deadline_s)
        call = self._calls[message.id] = ServedCall(self, message.id, method, body, deadline)
        if method.streaming is not None:
            call.parts = CallStream(self.peer, message.id, self.outbox, self._server.budget)
            self._watch_for_loss()
        return call

    def _objection(self, message: Message, method: Method) -> PeerdError | None:
        """Why a call does not start; None: it is counted in the load now."""
        gate = self._server.gate
        if gate is not None and (closed := gate.objection(self.peer, method.name)):
            return Refused(closed)
        if (message.kind == wire.OPEN) != (method.streaming is not None):
            return Refused(f"{method.name.full} is a {'unary' if method.unary else 'streaming'} call")
        limits = method.load.limits
        fault = limits.objection(len(message.body), len(message.headers), message.frame_bytes)
        if fault is not None:
            return Refused(fault)
        if len(self._calls) >= RPC_CALLS_PER_STREAM:
            return Overloaded(f"{len(self._calls)} calls of yours are running", method.load.retry_after_s())
        busy = method.load.enter(self.peer)
        return Overloaded(busy, method.load.retry_after_s()) if busy else None

    async def _receive(self, call: ServedCall, message: Message) -> bool:
        """Receive the frames of a call; False when there was no room or no time for them."""
        if not message.headers:
            return True
        try:
            call.frames = await self._inbound.frames(message, self._server.budget, call.deadline)
        except (Overloaded, TooSlow) as error:
            call.cancel(error)
            await self._inbound.skip()
            return False
        call.held_bytes = message.frame_bytes
        return True

    async def _part(self, message: Message) -> None:
        call = self._known(message)
        if call is None:
            if message.headers:
                await self._inbound.skip()
        elif call.parts is None or not call.parts.receiving:
            raise ProtocolViolation("a part that nobody asked for")
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
