"""A stage peer's calls to the stage after its own: hand a microbatch on, or ask for a gradient that is kept there.

The ticket says who takes it. Where that peer cannot be had another of its stage takes its place, if the stage is still
to be done, and the answer says so; where no link comes about, the ticket's trainer carries the call. Only then the
trainer has to choose anew (`Broken`). Hostile input: answers with wrong tensors, hops or receipts are violations of
whoever gave them, and another peer is asked: all hops are checked by each hop that tells of them, so a bad one is the
fault of who brings it. A successor that never answers costs the time of one call, which ends before our caller's. A
trainer may name anybody for the next stage: only those that the conductor lists are called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from peerd.core.clock import Clock
from peerd.core.errors import (
    NotFiniteHere,
    Overloaded,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
    Unreachable,
)
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId, is_peer_text
from peerd.core.limits import BROKEN_CHARS
from peerd.core.messages.handover import Broken, CarryOn, Hop, NotFiniteAt, Pass, Passed, Ticket, Way
from peerd.core.messages.proof import has_received
from peerd.core.messages.swarm import Mb
from peerd.core.run.runfile import RunFile
from peerd.machine.pipeline.wiring import BACKWARD_COST
from peerd.service.pipeline.stage_peers import StageLinks, StagePeers
from peerd.service.rpc.rpc import Answer, Rpc

log = logging.getLogger("peerd.service.pipeline.next_stage")

PASS = "handover/2/pass"
RELAY = "handover/2/relay"
PASS_TIMEOUT_S = 600.0  # while no call was measured: devices may be slow. Who is silent is given up in seconds
_TOLD_AGAIN_S = 30.0
_PEERS_TRIED = 3  # of one stage, for one microbatch: then the trainer chooses anew
_PATIENCE_S = 3.0  # with peers that cannot take a microbatch now
_SOON_S, _NOT_SO_SOON_S = 0.05, 2.0  # before a peer is asked again that says it cannot take a call now
_RESERVE_S = 2.0  # of the time that our caller waits, for telling it that the next stage did not answer
_LEAST_S = 0.1  # to ask anybody


@dataclass(frozen=True, slots=True)
class Onward:
    """The outcome of handing a microbatch on. `gradient`: of our output, where we asked for it."""

    passed: Passed
    gradient: TensorFrame | None
    took_s: float
    by: str  # the peer that answered, or the trainer that carried the call
    way: Way
    instead_of: str  # the ticket's peer, where another took its place


class NextStage:
    """The stage after `stage`, as one of its peers calls it. `way_of`: the kind of the link to a peer."""

    def __init__(
        self, run: RunFile, stage: int, rpc: Rpc, clock: Clock, ways: StageLinks, way_of: Callable[[PeerId], Way]
    ) -> None:
        self.stage = stage + 1
        self.peers = StagePeers(run.pipeline.stages, clock, ways)
        self._rpc, self._way_of = rpc, way_of
        self._dtype, self._width = run.model.dtype, run.model.d_model
        self._arrival: dict[str, float] = {}  # peer -> bytes/s that it says our frames arrive at
        self._told_at: dict[str, float] = {}  # when the log said how microbatches go to a peer
        self.ways: dict[str, Way] = {}  # by peer that a microbatch was handed on to, how it went last
        self.in_flight = 0  # calls that wait for an answer

    @property
    def line_bytes_per_s(self) -> float:
        """The slowest line that an output may have to pass; 0: unknown."""
        return min(self._arrival.values(), default=0.0)

    def forget_gone(self, serving: Sequence[str]) -> None:
        """Forget what we know of peers other than those that serve."""
        self._arrival = {name: rate for name, rate in self._arrival.items() if name in serving}
        self.ways = {name: way for name, way in self.ways.items() if name in serving}
        self._told_at = {name: at for name, at in self._told_at.items() if name in serving}

    async def hand_on(
        self, body: Pass, frames: Sequence[TensorFrame], shape: tuple[int, int], deadline: float
    ) -> Onward:
        """Have the next stage do its part, and all after it; `shape`: samples and tokens. Until `deadline`.

        Of `frames` none: the next stage gives the gradient that it keeps.
        """
        started = trio.current_time()
        left_s = deadline - started
        task = _Task(self.stage, body, frames, shape, deadline - min(_RESERVE_S, left_s / 8))
        self.in_flight += 1
        try:
            return await self._hand_on(task, started)
        finally:
            self.in_flight -= 1

    def spoilt(self, onward: Onward, error: ProtocolViolation) -> Passed:
        """The answer where a gradient that came back is of no use: the trainer chooses another way."""
        log.info("the gradient of …%s of stage %d is of no use: %s", onward.by[-8:], self.stage, error.args[0])
        return _broken(self.stage, onward.by, str(error.args[0])).body

    async def _hand_on(self, task: _Task, started: float) -> Onward:
        named, tried, reason, cut = task.named, set[str](), "", False
        while task.left_s > _LEAST_S:
            is_patient = trio.current_time() - started <= _PATIENCE_S
            name = self._choose(task, tried)
            if name is None:
                if not (is_patient and self._some_are_full(tried)):
                    break
                await trio.sleep(_SOON_S)  # those that have no room rest a moment
                continue
            try:
                by, answer = await self._ask_or_hedge(name, task, tried)
            except Overloaded as error:  # not yet, it says: it has not failed
                reason = str(error)
                if not is_patient:
                    break  # the trainer may know better by now: a newer grant, peers that have room
                pause_s = min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S)
                self.peers.wiring(self.stage).rest(name, trio.current_time() + pause_s)
                if not task.is_to_be_done:
                    await trio.sleep(pause_s)
            except NotFiniteHere as error:  # its trainer decides who computes it again
                return self._onward(_not_finite(self.stage, name, error), started, name, "", "")
            except RemoteError as error:
                self._failed(name, started, error)
                tried.add(name)
                cut |= isinstance(error, Unreachable | TooSlow) and name in self.peers.wiring(self.stage)
                reason = str(error)
            else:
                way = self._note_way(by, self._way_of(PeerId.parse(by)))
                instead = by != named and not self.peers.wiring(self.stage).is_full(named, trio.current_time())
                return self._onward(answer, started, by, way, named if instead else "")
        if (cut or not (tried or reason)) and task.left_s > _LEAST_S:
            try:
                answer = await self._over_the_trainer(task)
                return self._onward(answer, started, task.body.trainer, self._note_way(named, "trainer"), "")
            except NotFiniteHere as error:
                return self._onward(_not_finite(self.stage, named, error), started, "", "", "")
            except RemoteError as error:
                reason = f"{reason or 'it is not called'}; over the trainer: {error}"
        reason = reason or ("nobody serves it" if task.left_s > _LEAST_S else "no time is left to ask it")
        return self._onward(_broken(self.stage, named, reason), started, "", "", "")

    def _some_are_full(self, tried: set[str]) -> bool:
        wiring, now = self.peers.wiring(self.stage), trio.current_time()
        return any(wiring.is_full(name, now) for name in wiring if name not in tried)

    def _choose(self, task: _Task, tried: set[str]) -> str | None:
        """The peer to ask: the ticket's, unless it failed lately; else another that can do the same.

        Where only the ticket's peer can do it, that is asked though it failed lately, unless it cannot be reached.
        """
        wiring, now, named = self.peers.wiring(self.stage), trio.current_time(), task.named
        serves = named in wiring and named not in tried and not self.peers.is_cut_off(named)
        if serves and not (task.is_to_be_done and wiring.rests(named, now)):
            return named
        if not task.is_to_be_done or len(tried) >= _PEERS_TRIED:
            return None
        return wiring.pick(now, task.cost, avoid=(), never=tried | self.peers.away())

    async def _ask_or_hedge(self, name: str, task: _Task, tried: set[str]) -> tuple[str, Answer[Passed]]:
        """Ask a peer, and where it is late another one that can do the same; returns who gave the first good answer."""

        async def ask(peer: str) -> Answer[Passed]:
            answer = await self._ask(peer, task)
            if peer != name and answer.body.broken is not None:
                raise Refused("its own way broke", PeerId.parse(peer))
            return answer

        alone = not task.is_to_be_done
        return await self.peers.first_answer(self.stage, name, task.cost, ask, tried, alone=alone)

    async def _ask(self, name: str, task: _Task) -> Answer[Passed]:
        peer, started = PeerId.parse(name), trio.current_time()
        within_s = self.peers.given_up_after_s(self.stage, name, PASS_TIMEOUT_S)
        body = task.body_for(self._rpc.arrival_rate(peer) or 0.0)
        with self.peers.call_to(name, within_s) as limit_s:
            limit_s = min(task.left_s, limit_s)
            answer = await self._rpc.call(peer, PASS, body, Passed, frames=task.frames, timeout_s=limit_s)
            self._check(peer, peer, task, answer)
        if answer.body.broken is None:
            self.peers.answered(self.stage, name, task.cost, started)
        else:
            self.peers.heard(name)
        if answer.body.arrival_bytes_per_s > 0:
            self._arrival[name] = answer.body.arrival_bytes_per_s
        return answer

    async def _over_the_trainer(self, task: _Task) -> Answer[Passed]:
        trainer = PeerId.parse(task.body.trainer)
        body = CarryOn(task.named, task.body_for(0.0))
        answer = await self._rpc.call(trainer, RELAY, body, Passed, frames=task.frames, timeout_s=task.left_s)
        self._check(trainer, PeerId.parse(task.named), task, answer)
        return answer

    def _note_way(self, name: str, way: Way) -> Way:
        """Note how a microbatch went to a peer; a line of the log when that has changed."""
        if name not in self.peers.wiring(self.stage):
            return way  # it has left, or never was there: whoever names it may name many
        before, self.ways[name] = self.ways.get(name, ""), way
        if way != before and (before or way == "trainer"):
            now = trio.current_time()
            level = logging.INFO if now - self._told_at.get(name, -math.inf) > _TOLD_AGAIN_S else logging.DEBUG
            self._told_at[name] = now
            told = {"trainer": "over the trainer", "relay": "over a relay"}.get(way, "over a link")
            log.log(level, "microbatches go to …%s of stage %d %s now", name[-8:], self.stage, told)
        return way

    def _failed(self, name: str, started: float, error: RemoteError) -> None:
        """Let a peer rest that did not answer, or wrongly; a refusal may be the microbatch's fault, whoever sent it."""
        if isinstance(error, Refused):
            log.debug("…%s of stage %d did not take a microbatch: %s", name[-8:], self.stage, error)
            return
        times = self.peers.failed(self.stage, name, started, error)
        level = self.peers.level(name, times)
        log.log(level, "a microbatch could not be handed on to …%s of stage %d: %s", name[-8:], self.stage, error)

    def _onward(self, answer: Answer[Passed], started: float, by: str, way: Way, instead_of: str) -> Onward:
        gradient = answer.frames[0] if answer.frames else None
        return Onward(answer.body, gradient, trio.current_time() - started, by, way, instead_of)

    # --- answers ----------------------------------------------------------------------------------------------

    def _check(self, peer: PeerId, holder: PeerId, task: _Task, answer: Answer[Passed]) -> None:
        """Raise ProtocolViolation of `peer` unless the answer has what was asked for: the gradient, and receipts of
        `holder` and all after it.
        """
        passed, ticket = answer.body, task.body.ticket
        if passed.broken is not None:
            if passed.hops or answer.frames or not self.stage < passed.broken.stage <= ticket.last:
                raise ProtocolViolation("a way that is broken was answered with more, or does not lead there", peer)
            return
        if len(answer.frames) != int(task.wants_gradient):
            raise ProtocolViolation(f"a microbatch was answered with {len(answer.frames)} frames", peer)
        if task.wants_gradient:
            shape, frame = (*task.shape, self._width), answer.frames[0]
            if frame.shape != shape or frame.dtype != self._dtype:
                raise ProtocolViolation(f"a microbatch was answered with {frame.dtype} {list(frame.shape)}", peer)
        low = self.stage if task.is_to_be_done else ticket.high + 1
        if task.is_to_be_done and (not passed.hops or passed.hops[0].peer != holder.text):
            raise ProtocolViolation("a microbatch was answered without a hop of the peer's own", peer)
        if fault := fault_of_hops(task.body.run, task.body.trainer, ticket, low, passed.hops):
            raise ProtocolViolation(fault, peer)


def fault_of_hops(run: bytes, trainer: str, ticket: Ticket, low: int, hops: Sequence[Hop]) -> str:
    """What is wrong with the hops of stages `low` to the ticket's highest, their receipts last; "": nothing."""
    if len(hops) != ticket.high - low + 1:
        return f"{len(hops)} hops for stages {low} to {ticket.high}"
    mb = Mb(trainer, ticket.seq)
    for stage, hop in enumerate(hops, low):
        named = is_peer_text(hop.peer)
        if not named or not has_received(PeerId.parse(hop.peer), run, stage, ticket.step, mb, hop.receipt):
            return f"the hop of stage {stage} has no receipt that is good"
    return ""


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
    def left_s(self) -> float:
        """The time that is left for an answer; 0 or less: none."""
        return self.deadline - trio.current_time()

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


def _not_finite(stage: int, name: str, error: NotFiniteHere) -> Answer[Passed]:
    """The answer where a peer of the next stage, `name`, says that its own result is not finite."""
    return Answer(Passed(broken=NotFiniteAt(stage, name, str(error.args[0])[:BROKEN_CHARS])))
