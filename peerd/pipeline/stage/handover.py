"""Hand-over of microbatches between stage peers: executes a ticket at one post and calls the next stage.

A microbatch arrives with its ticket from the trainer or from a peer of the previous stage. This peer computes the
output, sends it to a peer of the next stage, which answers with the output's gradient, adds its own gradient to the sum
and answers with the gradient of the input. While there is room, the output's autograd graph is kept meanwhile, so that
the backward pass need not recompute it.

Results of a microbatch are kept until the end of the step. A repeated call gets them. If the previous or the next stage
has lost its part, this peer sends the kept gradient, or recomputes the output. Invariants: a microbatch counts once
here, however many attempts there are; of two attempts the later one continues. Hostile input: tickets and the
conductor's grants are checked before their frames are received (`pipeline/routes/tickets`). All frames of a caller,
including targets for later stages, are checked before anything is sent on, so that an objection of the next stage is
never blamed on the wrong peer.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import trio
from msgspec import structs

from peerd.codec.format.frame import TensorFrame
from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Overloaded, PeerdError, ProtocolViolation, Refused
from peerd.core.ids import PeerId
from peerd.core.limits import MICROBATCHES
from peerd.messages.handover import Hop, PassAnswer, PassRequest
from peerd.messages.swarm import Mb, MemberInfo, Receipt
from peerd.model.stage.footprint import room_for_activations
from peerd.model.stage.kept_graph import KeptGraph
from peerd.pipeline.next_stage import HandOnResult, NextStage
from peerd.pipeline.routes.tickets import Tickets
from peerd.pipeline.stage.admissions import Admissions
from peerd.pipeline.stage.serving import ServingCalls, StageResult
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile
from peerd.swarm.kept_links import KeptLinks

_LOOK_S: Final = 1.0  # between updates of the links to neighbours
_LINKED: Final = 8  # linked peers of each neighbouring stage
_FULL_S: Final = 0.08  # retry delay for callers while there is no room


class HandOverPlace(Protocol):
    """What `HandOver` needs from its post."""

    stage: int
    admissions: Admissions

    @property
    def step(self) -> int: ...

    def receipt(self, step: int, mb: Mb) -> Receipt: ...


@dataclass(frozen=True, slots=True)
class _Above:
    """Results of the stages after this one, kept from an earlier attempt: their hops and the loss."""

    hops: Sequence[Hop]
    loss_sum: float


@dataclass(slots=True, eq=False)
class _UnderWay:
    """One microbatch that is computed here or waits for the next stage."""

    attempt: int
    bytes: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    over: trio.Event = field(default_factory=trio.Event)


class HandOver:
    """Hands microbatches of one post over to the next stage.

    `room_bytes` limits the tensors that are kept or in flight; microbatches beyond it are refused. `room_for` computes
    that limit from the bytes kept now.
    """

    def __init__(self, ctx: RoleContext, services: RunServices, place: HandOverPlace, serving: ServingCalls) -> None:
        assert ctx.run is not None
        self._run: RunFile = ctx.run
        self._place, self._serving = place, serving
        self._log = ctx.log
        self._own, self._mark = ctx.host.id, services.fingerprint
        self._is_last = place.stage == self._run.pipeline.stages - 1
        self._tickets = Tickets(self._mark, self._own.text, place.stage, self._run.pipeline.stages)
        self._arrival_rate = ctx.rpc.arrival_rate
        self._links = KeptLinks(ctx.host, "a neighbouring stage's peer")
        self._takes_inbound: Callable[[], bool] = lambda: ctx.host.takes_inbound
        self.next: NextStage | None = None
        if not self._is_last:
            self.next = NextStage(self._run, place.stage, ctx.rpc, ctx.clock, services.links, services.links.way)
        self._before = frozenset({self._own.text})
        self._under_way: dict[tuple[int, Mb], _UnderWay] = {}
        self._above = BoundedDict[tuple[int, Mb], _Above](MICROBATCHES)
        self._linked_of: tuple[list[str], list[str]] = [], []  # the peers from which `_linked` was chosen
        self._linked: list[str] = []
        self.room_bytes = 0
        self.room_for: Callable[[int], int] = partial(room_for_activations, self._run)
        self.refused_full = 0
        self._full_at = -1  # the step at which the log last reported a lack of room

    async def run(self) -> None:
        """Keep links to neighbours; check overdue calls to the next stage and probe unreachable peers there; until
        cancelled.
        """
        async with trio.open_nursery() as nursery:
            if self.next is not None:
                nursery.start_soon(self.next.peers.run)
            while True:
                self._links.tend(nursery, self._neighbours())
                await trio.sleep(_LOOK_S)

    def _neighbours(self) -> list[str]:
        """Peers to connect to before microbatches arrive: some of the next stage, and of the previous stage if it
        cannot dial us.

        Each peer of a stage selects other neighbours.
        """
        after = list(self.next.peers.wiring(self.next.stage)) if self.next is not None else []
        before = [] if self._takes_inbound() else sorted(self._before - {self._own.text})
        if (after, before) != self._linked_of:
            self._linked_of = after, before
            self._linked = [name for names in (after, before) for name in self._chosen(names)]
        return self._linked

    def _chosen(self, names: Sequence[str]) -> list[str]:
        def rank(name: str) -> bytes:
            return hashlib.sha256(f"{self._own.text} {name}".encode()).digest()

        return heapq.nsmallest(_LINKED, names, key=rank)

    def note_members(self, members: Sequence[MemberInfo]) -> None:
        """Process the conductor's list: the peers that may hand over to us, and those that we may hand over to."""
        before = {m.peer for m in members if m.stage == self._place.stage - 1 and m.since}
        self._before = frozenset(before | {self._own.text})
        if self.next is not None:
            # `update` ends calls to peers that are not ready, but this list may lag behind; unready peers refuse calls.
            after = [structs.replace(m, ready=True) for m in members if m.stage == self.next.stage and m.since]
            self.next.peers.update(after)
            self.next.forget_gone([m.peer for m in after])

    def arrived(self, step: int) -> None:
        """Discard data of steps before `step`."""
        self._tickets.arrive(step)
        for key in [key for key in self._above if key[0] < step]:
            del self._above[key]

    def look_for_room(self) -> None:
        """Set `room_bytes` from the memory that is free now, between two steps, when almost nothing is kept.

        Measured again at each step, because the first step allocates moments, sums and averaging buffers, and other
        programs may use memory.
        """
        self.room_bytes = self.room_for(self.bytes)

    @property
    def in_flight(self) -> int:
        """Number of microbatches that are computed here or wait for the next stage."""
        return len(self._under_way)

    @property
    def bytes(self) -> int:
        """Bytes of tensors that are kept or in flight."""
        return self._serving.kept_bytes + sum(one.bytes for one in self._under_way.values())

    def status(self) -> dict[str, object]:
        """Plain data: waiting, running and kept microbatches, and how calls to each peer of the next stage travel."""
        return {
            "queue": self._serving.boundary.room.waiting,
            "in_flight": self.in_flight,
            "kept_bytes": self.bytes,
            "room_bytes": self.room_bytes,
            "refused_full": self.refused_full,
            "next": dict(sorted(self.next.ways.items())) if self.next is not None else {},
        }

    # --- acceptance -------------------------------------------------------------------------------------------

    def objection(self, caller: PeerId, body: PassRequest) -> PeerdError | None:
        """Reason to reject a microbatch, from the call's body alone, or None if it is accepted."""
        ticket = body.ticket
        try:
            self._serving.stage_at(ticket.step)
            if ticket.is_done_at(self._place.stage):
                self._serving.refuse_when_closing(ticket.step)
                self._serving.refuse_when_leaving()
        except (Refused, Overloaded) as refused:
            return refused
        if (bad := self._tickets.objection(caller.text, body, self._before)) is not None:
            return bad
        trainer = PeerId.parse(body.trainer)
        return self._place.admissions.objection(trainer, ticket.step, ticket.seq, body.grant) or self._full(body)

    def _full(self, body: PassRequest) -> PeerdError | None:
        """Overloaded if there is no room for another microbatch, else None. Microbatches already known here are
        accepted, and all those of a replica, which keeps tokens only.
        """
        if self._run.pipeline.stages == 1:
            return None
        ticket, mb = body.ticket, Mb(body.trainer, body.ticket.seq)
        known = (ticket.step, mb) in self._under_way or self._serving.stage_at(ticket.step).found(ticket.step, mb)
        if known or not self.bytes or self.bytes < self.room_bytes:
            return None
        self.refused_full += 1
        if not self._under_way and self._full_at != ticket.step:
            self._full_at = ticket.step
            told = f"{self.bytes >> 20} MiB of {self.room_bytes >> 20} are kept for this step (limits.activations_mb)"
            self._log.event("stage.full", level="warning", stage=self._place.stage, step=ticket.step, reason=told)
        return Overloaded("no room for another microbatch", _FULL_S)

    async def passes(self, call: Incoming[PassRequest]) -> Answer[PassAnswer]:
        """Do this stage's part of a microbatch, and have the later stages do theirs."""
        body, ticket, stage = call.body, call.body.ticket, self._place.stage
        mb = Mb(body.trainer, ticket.seq)
        targets = int(ticket.high == self._run.pipeline.stages - 1 and stage <= ticket.high)
        due = int(ticket.is_done_at(stage)) + targets
        if len(call.frames) != due:
            raise ProtocolViolation(f"a microbatch of {len(call.frames)} frames; expected {due}", call.peer)
        self._serving.need_a_microbatch(call.peer, call.frames)
        if targets and not self._is_last:
            await self._serving.check_targets(call.peer, ticket.step, call.frames[-1])
        if stage > ticket.high:
            made = await self._serving.kept_gradient(ticket.step, mb, body.line_bytes_per_s)
            return self._answer(call, PassAnswer(), made.frames)
        if stage < ticket.low:
            return await self._give_input(call, mb)
        if (full := self._full(body)) is not None:  # others were accepted while these frames arrived
            raise full
        async with self._attempt(call, mb) as mine:
            return await self._do(call, mb, mine)

    # --- computation ------------------------------------------------------------------------------------------

    async def _give_input(self, call: Incoming[PassRequest], mb: Mb) -> Answer[PassAnswer]:
        """Recompute our output for the next stage, which lost its part. The gradient it returns is already counted
        here.
        """
        return self._answer(call, (await self._hand_on_again(call, mb, call.frames)).passed, ())

    async def _hand_on_again(self, call: Incoming[PassRequest], mb: Mb, targets: Sequence[TensorFrame]) -> HandOnResult:
        assert self.next is not None
        made = await self._serving.output_again(call.body.ticket.step, mb, self.next.line_bytes_per_s)
        (output,) = made.frames
        shape = (output.shape[0], output.shape[1])
        return await self.next.hand_on(call.body, (output, *targets), shape, call.deadline)

    async def _do(self, call: Incoming[PassRequest], mb: Mb, mine: _UnderWay) -> Answer[PassAnswer]:
        """Compute the output, get its gradient, and compute our own gradient; parts done in an earlier attempt are
        reused.
        """
        ticket = call.body.ticket
        x, targets = call.frames[0], call.frames[1:]
        found = self._serving.stage_at(ticket.step).found(ticket.step, mb) is not None
        above = self._above.get((ticket.step, mb), _Above((), 0.0))
        started, spent_s, onward, graph = trio.current_time(), 0.0, None, None
        beyond = ticket.high - self._place.stage  # number of stages to compute after this one
        if not self._is_last and (not found or len(above.hops) < beyond):
            if found:
                onward = await self._hand_on_again(call, mb, targets)
            else:
                output = await self._output(call, mine, x)
                spent_s, graph = output.service_s, output.graph
                onward = await self._hand_on(call, output, targets)
            if onward.passed.broken is not None:
                return self._answer(call, onward.passed, ())
            if beyond:
                above = self._above[ticket.step, mb] = _Above(onward.passed.hops, onward.passed.loss_sum)
        if found:
            made = await self._serving.kept_gradient(ticket.step, mb, call.body.line_bytes_per_s)
        else:
            try:
                made = await self._backward(call, mb, x, targets, onward, graph)
            except ProtocolViolation as error:
                if onward is None or self.next is None:
                    raise  # all data came from the caller
                return self._answer(call, self.next.spoilt(onward, error), ())
        spent_s += made.service_s
        hop = self._hop(ticket.step, mb, spent_s, trio.current_time() - started, onward)
        passed = PassAnswer([hop, *above.hops[:beyond]], made.loss_sum if self._is_last else above.loss_sum)
        return self._answer(call, passed, made.frames if ticket.is_done_at(self._place.stage - 1) else ())

    async def _output(self, call: Incoming[PassRequest], mine: _UnderWay, x: TensorFrame) -> StageResult:
        """Compute the output, and keep its graph for the backward pass while that leaves enough memory for other
        microbatches.
        """
        assert self.next is not None
        step = call.body.ticket.step
        size = self._room_for_graph(step)
        mine.bytes += size  # reserved before the computation, since other calls check the room meanwhile
        rate, trainer = self.next.line_bytes_per_s, call.body.trainer
        made = await self._serving.output(call.peer, step, x, rate, size > 0, trainer)
        mine.bytes += (made.graph.bytes if made.graph is not None else 0) - size
        return made

    def _room_for_graph(self, step: int) -> int:
        """Bytes to reserve for a graph; 0 if it is not kept. At most two graphs are kept before the size of one is
        known.
        """
        size = self._serving.stage_at(step).graph_bytes
        if size is None:
            return 0
        size = size or self.room_bytes // 4
        return size if self.bytes + size <= self.room_bytes // 2 else 0

    async def _hand_on(
        self, call: Incoming[PassRequest], output: StageResult, targets: Sequence[TensorFrame]
    ) -> HandOnResult:
        """Send the output to the next stage and return the result."""
        assert self.next is not None
        (y,) = output.frames
        frames = (y, *targets) if call.body.ticket.is_done_at(self.next.stage) else ()
        return await self.next.hand_on(call.body, frames, (y.shape[0], y.shape[1]), call.deadline)

    async def _backward(
        self,
        call: Incoming[PassRequest],
        mb: Mb,
        x: TensorFrame,
        targets: Sequence[TensorFrame],
        onward: HandOnResult | None,
        graph: KeptGraph | None,
    ) -> StageResult:
        target = targets[0] if onward is None else onward.gradient
        assert target is not None, "NextStage checks that the answer has a gradient"
        body = call.body
        admitted = body.grant.seqs if body.grant is not None else ()
        return await self._serving.gradient(
            call.peer, body.ticket.step, mb, (x, target), admitted, body.line_bytes_per_s, graph
        )

    def _hop(self, step: int, mb: Mb, service_s: float, whole_s: float, onward: HandOnResult | None) -> Hop:
        onward_s = onward.took_s if onward is not None else 0.0
        return Hop(
            self._own.text,
            self._place.receipt(step, mb),
            service_s,
            max(0.0, whole_s - onward_s - service_s),
            onward_s,
            onward.way if onward is not None else "",
            onward.instead_of if onward is not None else "",
        )

    def _answer(
        self, call: Incoming[PassRequest], passed: PassAnswer, frames: Sequence[TensorFrame]
    ) -> Answer[PassAnswer]:
        rate = self._arrival_rate(call.peer) or 0.0
        return Answer(PassAnswer(passed.hops, passed.loss_sum, passed.broken, rate), tuple(frames))

    @asynccontextmanager
    async def _attempt(self, call: Incoming[PassRequest], mb: Mb) -> AsyncIterator[_UnderWay]:
        """Context manager around an attempt, which a later attempt of the same microbatch cancels.

        A second call with the same attempt waits for the first one to end and then uses its result. So a peer that has
        seen a ticket cannot cancel the work of the peer that sent it first.
        """
        key, number = (call.body.ticket.step, mb), call.body.ticket.attempt
        while (before := self._under_way.get(key)) is not None and before.attempt == number:
            await before.over.wait()
        self._tickets.begin(call.body)
        if before is not None:
            before.scope.cancel()
        size = 2 * sum(len(frame.payload) for frame in call.frames)  # the input and its gradient
        mine = self._under_way[key] = _UnderWay(number, size)
        try:
            with mine.scope:
                yield mine
        finally:
            mine.over.set()
            if self._under_way.get(key) is mine:
                del self._under_way[key]
        if mine.scope.cancelled_caught:
            raise Refused("a later attempt of this microbatch is under way")
