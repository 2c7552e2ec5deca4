"""A trainer as relay: forwards one hop of its own microbatch between two stage peers that cannot connect to each other.

The calling stage peer sends the trainer's own ticket and names the peer of the next stage; the trainer calls that peer
and returns its answer. Hostile input: only tickets of attempts running here count, and only calls from a serving peer
to a peer that serves the call's stage; one call at a time for each hop of an attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, Final

import trio

from peerd.core.errors import Overloaded, PeerdError, Refused
from peerd.core.ids import PeerId
from peerd.core.limits import STREAMS_INBOUND
from peerd.messages.handover import PassAnswer, RelayRequest, Ticket
from peerd.pipeline.next_stage import PASS, RELAY
from peerd.pipeline.routes.microbatch_shapes import MicrobatchShapes
from peerd.rpc.methods.declaration import Declaration, Needs, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc

_AGAIN_S: Final = 0.3
_LEAST_S: Final = 0.01  # least timeout of a forwarded call, so that a call past its deadline times out as usual
DECLARED: Final = {
    RELAY: Declaration(
        shows=Shows.TICKET,
        rows=Needs.MICROBATCH,
        memory_bytes=Needs.MICROBATCH,
        device_s=0.0,
        frames=2,
        frame_bytes=256 << 20,
        calls_per_peer=STREAMS_INBOUND - 32,
        calls=2048,
    )
}


class TrainerRelay:
    """The relay of one trainer. `serves`: the pairs of peer and stage that serve; `shapes`: tensor shapes of the
    run.
    """

    def __init__(self, rpc: Rpc, serves: Set[tuple[str, int]], shapes: MicrobatchShapes) -> None:
        self._rpc, self._serves, self._shapes = rpc, serves, shapes
        self._open: dict[bytes, Ticket] = {}  # by signature
        self._relayed: set[tuple[bytes, int]] = set()  # hops being relayed: (ticket, stage)
        self.relayed_bytes = 0
        self.relayed = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Relay calls until the block ends."""
        declared, shapes = self._shapes.bound(DECLARED[RELAY]), self._shapes.objection
        self._rpc.serve(
            RELAY, RelayRequest, self._relay, declared=declared, objection=self._objection, frames_objection=shapes
        )
        try:
            yield
        finally:
            self._rpc.unserve("handover/2", {"relay"})

    @contextmanager
    def open(self, ticket: Ticket) -> Iterator[None]:
        """Relay the calls of this ticket's attempt until the block ends."""
        self._open[ticket.signature] = ticket
        try:
            yield
        finally:
            del self._open[ticket.signature]

    def _objection(self, caller: PeerId, body: RelayRequest) -> PeerdError | None:
        passed = body.passed
        if self._open.get(passed.ticket.signature) != passed.ticket:
            return Refused("no such attempt is under way here")
        if (caller.text, passed.stage - 1) not in self._serves:
            return Refused(f"you are not known to serve stage {passed.stage - 1}")
        if (body.to, passed.stage) not in self._serves:
            return Refused(f"that peer is not known to serve stage {passed.stage}")
        return _busy() if _hop_of(body) in self._relayed else None

    async def _relay(self, call: Incoming[RelayRequest]) -> Answer[Any]:
        body, hop = call.body, _hop_of(call.body)
        if hop in self._relayed:
            raise _busy()
        self._relayed.add(hop)
        try:
            return await self._carry(call, body)
        finally:
            self._relayed.remove(hop)

    async def _carry(self, call: Incoming[RelayRequest], body: RelayRequest) -> Answer[Any]:
        left_s = max(_LEAST_S, call.deadline - trio.current_time())
        peer = PeerId.parse(body.to)
        answer = await self._rpc.call(peer, PASS, body.passed, PassAnswer, frames=call.frames, timeout_s=left_s)
        self.relayed += 1
        self.relayed_bytes += sum(len(frame.payload) for frame in (*call.frames, *answer.frames))
        return answer


def _hop_of(body: RelayRequest) -> tuple[bytes, int]:
    return body.passed.ticket.signature, body.passed.stage


def _busy() -> Overloaded:
    return Overloaded("a call of this hop is being relayed already", _AGAIN_S)
