"""A stage peer's calls to the stage after its own: hand a microbatch on, or ask for a gradient that is kept there.

The ticket says who takes it. Where that peer cannot be had another of its stage takes its place, if the stage is still
to be done, and the answer says so; where no link comes about, the ticket's trainer carries the call. Only then the
trainer has to choose anew (`Broken`). Hostile input: answers with wrong tensors, hops or receipts are violations of
whoever gave them, and another peer is asked; a successor that never answers costs the time of one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from peerd.core.clock import Clock
from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, TooSlow, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import BROKEN_CHARS
from peerd.core.messages.handover import Broken, CarryOn, Hop, Pass, Passed, Way
from peerd.core.messages.proof import has_received
from peerd.core.messages.swarm import Mb
from peerd.core.run.runfile import RunFile
from peerd.machine.pipeline.wiring import BACKWARD_COST
from peerd.service.pipeline.stage_peers import StagePeers, Ways
from peerd.service.rpc.rpc import Answer, Rpc

log = logging.getLogger("peerd.service.pipeline.next_stage")

PASS = "handover/1/pass"
RELAY = "handover/1/relay"
PASS_TIMEOUT_S = 150.0
_PEERS_TRIED = 3  # of one stage, for one microbatch: then the trainer chooses anew
_PATIENCE_S = 3.0  # with peers that cannot take a microbatch now
_SOON_S, _NOT_SO_SOON_S = 0.05, 2.0  # before a peer is asked again that says it cannot take a call now


@dataclass(frozen=True, slots=True)
class Onward:
    """The outcome of handing a microbatch on. `gradient`: of our output, where we asked for it."""

    passed: Passed
    gradient: TensorFrame | None
    took_s: float
    way: Way
    instead_of: str  # the ticket's peer, where another took its place


class NextStage:
    """The stage after `stage`, as one of its peers calls it. `way_of`: the kind of the link to a peer."""

    def __init__(
        self, run: RunFile, stage: int, rpc: Rpc, clock: Clock, ways: Ways, way_of: Callable[[PeerId], Way]
    ) -> None:
        self.stage = stage + 1
        self.peers = StagePeers(run.pipeline.stages, clock, ways)
        self._rpc, self._way_of = rpc, way_of
        self._dtype, self._width = run.model.dtype, run.model.d_model
        self._arrival: dict[str, float] = {}  # peer -> bytes/s that it says our frames arrive at
        self.in_flight = 0  # calls that wait for an answer

    @property
    def line_bytes_per_s(self) -> float:
        """The slowest line that an output may have to pass; 0: unknown."""
        return min(self._arrival.values(), default=0.0)

    def forget_gone(self, serving: Sequence[str]) -> None:
        """Forget what we know of peers other than those that serve."""
        self._arrival = {name: rate for name, rate in self._arrival.items() if name in serving}

    async def hand_on(
        self, body: Pass, frames: Sequence[TensorFrame], shape: tuple[int, int], deadline: float
    ) -> Onward:
        """Have the next stage do its part, and all after it; `shape`: samples and tokens. Until `deadline`.

        Of `frames` none: the next stage gives the gradient that it keeps.
        """
        started = trio.current_time()
        self.in_flight += 1
        try:
            return await self._hand_on(_Task(self.stage, body, frames, shape, deadline), started)
        finally:
            self.in_flight -= 1

    async def _hand_on(self, task: _Task, started: float) -> Onward:
        named, tried, reason, cut = task.named, set[str](), "", False
        while (name := self._choose(task, tried)) is not None:
            try:
                answer = await self._ask(name, task)
            except Overloaded as error:  # not yet, it says: it has not failed
                reason = str(error)
                if trio.current_time() - started > _PATIENCE_S:
                    break  # the trainer may know better by now: a newer grant, peers that have room
                pause_s = min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S)
                self.peers.wiring(self.stage).rest(name, trio.current_time() + pause_s)
                await trio.sleep(pause_s if self._choose(task, tried) in (None, name) else 0.0)
                continue
            except RemoteError as error:
                self._failed(name, started, error)
                tried.add(name)
                cut |= isinstance(error, Unreachable | TooSlow)
                reason = str(error)
                continue
            return self._onward(answer, started, self._way_of(PeerId.parse(name)), "" if name == named else named)
        if cut or not (tried or reason):
            try:
                return self._onward(await self._over_the_trainer(task), started, "trainer", "")
            except RemoteError as error:
                reason = f"{reason or 'it rests'}; over the trainer: {error}"
        return self._onward(_broken(self.stage, named, reason or "nobody serves it"), started, "", "")

    def _choose(self, task: _Task, tried: set[str]) -> str | None:
        """The peer to ask: the ticket's, unless it failed lately; else another that can do the same.

        Where only the ticket's peer can do it, that is asked though it failed lately.
        """
        wiring, now = self.peers.wiring(self.stage), trio.current_time()
        if task.named not in tried and not (task.is_to_be_done and wiring.rests(task.named, now)):
            return task.named
        if not task.is_to_be_done or len(tried) >= _PEERS_TRIED:
            return None
        return wiring.pick(now, task.cost, avoid=(), never=tried | self.peers.away())

    async def _ask(self, name: str, task: _Task) -> Answer[Passed]:
        peer, started = PeerId.parse(name), trio.current_time()
        body = task.body_for(self._rpc.arrival_rate(peer) or 0.0)
        with self.peers.call_to(name):
            left_s = max(0.01, min(PASS_TIMEOUT_S, task.deadline - started))
            answer = await self._rpc.call(peer, PASS, body, Passed, frames=task.frames, timeout_s=left_s)
            self._check(peer, task, answer)
        if answer.body.broken is None:
            self.peers.wiring(self.stage).answered(name, task.cost, started, trio.current_time())
        if answer.body.arrival_bytes_per_s > 0:
            self._arrival[name] = answer.body.arrival_bytes_per_s
        return answer

    async def _over_the_trainer(self, task: _Task) -> Answer[Passed]:
        trainer = PeerId.parse(task.body.trainer)
        left_s = max(0.01, min(PASS_TIMEOUT_S, task.deadline - trio.current_time()))
        body = CarryOn(task.named, task.body_for(0.0))
        answer = await self._rpc.call(trainer, RELAY, body, Passed, frames=task.frames, timeout_s=left_s)
        self._check(PeerId.parse(task.named), task, answer)
        return answer

    def _failed(self, name: str, started: float, error: RemoteError) -> None:
        now = trio.current_time()
        times = self.peers.wiring(self.stage).failed(name, now, now - started)
        level = logging.INFO if times == 1 else logging.DEBUG  # the first failure tells it all
        log.log(level, "a microbatch could not be handed on to …%s of stage %d: %s", name[-8:], self.stage, error)

    def _onward(self, answer: Answer[Passed], started: float, way: Way, instead_of: str) -> Onward:
        gradient = answer.frames[0] if answer.frames else None
        return Onward(answer.body, gradient, trio.current_time() - started, way, instead_of)

    # --- answers ----------------------------------------------------------------------------------------------

    def _check(self, peer: PeerId, task: _Task, answer: Answer[Passed]) -> None:
        """Raise ProtocolViolation unless the answer has what was asked for: the gradient, and a receipt."""
        passed = answer.body
        if passed.broken is not None:
            if passed.hops or answer.frames:
                raise ProtocolViolation("a way that is broken was answered with hops or frames", peer)
            return
        if len(answer.frames) != int(task.wants_gradient):
            raise ProtocolViolation(f"a microbatch was answered with {len(answer.frames)} frames", peer)
        if task.wants_gradient:
            shape, frame = (*task.shape, self._width), answer.frames[0]
            if frame.shape != shape or frame.dtype != self._dtype:
                raise ProtocolViolation(f"a microbatch was answered with {frame.dtype} {list(frame.shape)}", peer)
        if task.is_to_be_done:
            self._check_hop(peer, task.body, passed.hops[0] if passed.hops else None)

    def _check_hop(self, peer: PeerId, body: Pass, hop: Hop | None) -> None:
        ticket, mb = body.ticket, Mb(body.trainer, body.ticket.seq)
        if hop is None or hop.peer != peer.text:
            raise ProtocolViolation("a microbatch was answered without a hop of the peer's own", peer)
        if not has_received(peer, body.run, self.stage, ticket.step, mb, hop.receipt):
            raise ProtocolViolation("a microbatch was answered without a receipt that is good", peer)


@dataclass(frozen=True, slots=True)
class _Task:
    """One microbatch that is handed on to `stage`."""

    stage: int
    body: Pass
    frames: Sequence[TensorFrame]
    shape: tuple[int, int]
    deadline: float

    @property
    def named(self) -> str:
        """The peer that the ticket names."""
        name = self.body.ticket.peer_of(self.stage)
        assert name is not None, "the route ends with the stage that hands on"
        return name

    @property
    def is_to_be_done(self) -> bool:
        return self.body.ticket.is_done_at(self.stage)

    @property
    def wants_gradient(self) -> bool:
        return self.body.ticket.is_done_at(self.stage - 1)

    @property
    def cost(self) -> float:
        """The cost in forwards of one sample."""
        return self.shape[0] * (1.0 + BACKWARD_COST)

    def body_for(self, line_bytes_per_s: float) -> Pass:
        """The call's body. `line_bytes_per_s`: how fast the called peer's frames arrive here; 0: unknown."""
        return Pass(self.body.run, self.stage, self.body.trainer, self.body.ticket, self.body.grant, line_bytes_per_s)


def _broken(stage: int, named: str, reason: str) -> Answer[Passed]:
    return Answer(Passed(broken=Broken(stage, named, reason[:BROKEN_CHARS])))
