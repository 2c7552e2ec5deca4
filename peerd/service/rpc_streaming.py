"""Making streaming calls: each has a stream of its own, so that its parts wait for nobody else's.

Reads what the handler sends and delivers it to the CallStream that the caller holds. A call that the caller leaves
before its end is reset, which cancels the handler.
"""

from __future__ import annotations

import trio

from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.machine import rpc as wire
from peerd.machine.linkrate import LineRates
from peerd.machine.rpc import Message, decode_failure
from peerd.service.rpc_client import Request, encode_request
from peerd.service.rpc_io import Inbound, SharedBudget
from peerd.service.rpc_outbox import Outbox
from peerd.service.rpc_parts import CallStream
from peerd.service.rpc_types import RpcStream

_ID = 1  # the only call on its stream


class StreamingCall:
    """The caller's end of one streaming call."""

    def __init__(self, stream: RpcStream, budget: SharedBudget, rates: LineRates, request: Request) -> None:
        self._stream = stream
        self._rates = rates
        self._request = request
        self._outbox = Outbox()
        self._running = trio.CancelScope()
        self._complete = False  # the other side has said all
        self.parts = CallStream(stream.peer, _ID, self._outbox, budget)

    async def start(self, nursery: trio.Nursery) -> None:
        """Send the request, and read what comes, in tasks of `nursery` that `close` ends.

        Returns once the payloads of the request are made; raises what their maker does.
        """
        message = encode_request(wire.OPEN, _ID, self._request)
        self._outbox.put(*message)
        nursery.start_soon(self._outbox.run, self._stream)
        nursery.start_soon(self._read)
        await self._outbox.feed(message)

    def close(self) -> None:
        """The caller wants nothing more: a call that is not complete is cancelled on the other side."""
        self._running.cancel()
        if self._complete and not self._outbox.pending and not self._outbox.closed:
            self._outbox.end()
        else:
            self._outbox.close()
            self._stream.reset()
        self.parts.discard()

    async def _read(self) -> None:
        inbound = Inbound(self._stream, self._settle, self._rates)
        try:
            with self._running:
                while messages := await inbound.batch():
                    for message in messages:
                        if message.headers or not self._settle(message):
                            await self._take(message, inbound)
                if not self._complete:
                    raise Unreachable("the stream was closed before the call had ended")
        except RemoteError as error:
            if not self._complete:
                self._fail(error.blame(self._stream.peer))

    def _settle(self, message: Message) -> bool:
        """What ends the call; False for a part."""
        if message.id != _ID or self._complete:
            raise ProtocolViolation("an answer that nobody asked for")
        if message.kind == wire.ERROR:
            self._fail(decode_failure(message.body, self._stream.peer))
        elif message.kind == wire.END:
            self.parts.no_more_parts()
        elif message.kind == wire.PART:
            return False
        else:
            raise ProtocolViolation(f"a message of kind {message.kind} for a streaming call")
        self._complete = True
        return True

    async def _take(self, message: Message, inbound: Inbound) -> None:
        if message.id != _ID or self._complete or message.kind != wire.PART:
            raise ProtocolViolation("a message with frames that nobody asked for")
        self._request.check(message)
        await self.parts.take(message, inbound, self._request.deadline)

    def _fail(self, error: RemoteError) -> None:
        self.parts.fail(error)
        self._outbox.close()  # wakes a sender, who then sees the failure
