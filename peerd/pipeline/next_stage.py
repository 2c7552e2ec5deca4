"""A stage peer's calls to the next stage: pass a microbatch on, or request a gradient that is kept there.

The ticket names the peer to call. If it cannot be reached, another peer of its stage is called instead, provided that
the stage is still to be computed, and the answer says so. If no link can be established, the ticket's trainer relays
the call. Only if that fails too must the trainer choose another route (`Broken`). Hostile input: a peer that answers
with wrong tensors, hops or receipts violates the protocol, and another peer is called. Each peer checks all hops that
it passes back, so a bad hop is the fault of the peer that delivers it. A successor that never answers costs the time of
one call, which ends before our caller's. A trainer may name any peer for the next stage, but only peers that the
conductor lists are called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from peerd.codec.format.frame import TensorFrame
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
from peerd.core.ids import PeerId, is_peer_text
from peerd.core.limits import BROKEN_CHARS
from peerd.messages.handover import Broken, Hop, NotFiniteAt, PassAnswer, PassRequest, RelayRequest, Ticket, Way
from peerd.messages.proof import has_received
from peerd.messages.swarm import Mb
from peerd.pipeline.routes.wiring import BACKWARD_COST
from peerd.pipeline.stage_peers import StageLinks, StagePeers
from peerd.rpc.rpc import Answer, Rpc
from peerd.run.runfile import RunFile

log = logging.getLogger("peerd.pipeline.next_stage")

PASS = "handover/2/pass"
RELAY = "handover/2/relay"
PASS_TIMEOUT_S = 600.0  # before the first measured call, as devices may be slow; silent peers are given up in seconds
_TOLD_AGAIN_S = 30.0
_PEERS_TRIED = 3  # of one stage, for one microbatch; then the trainer chooses another route
_PATIENCE_S = 3.0  # time to wait for peers that are full
_SOON_S, _NOT_SO_SOON_S = 0.05, 2.0  # bounds of the pause before an overloaded peer is called again
_RESERVE_S = 2.0  # part of the caller's time kept to report that the next stage did not answer
_LEAST_S = 0.1  # least time for a call


@dataclass(frozen=True, slots=True)
class HandOnResult:
    """The outcome of passing a microbatch on. `gradient`: the gradient of our output, if we requested it."""

    passed: PassAnswer
    gradient: TensorFrame | None
    took_s: float
    by: str  # the peer that answered, or the trainer that relayed the call
    way: Way
    instead_of: str  # the ticket's peer, if another one replaced it


class NextStage:
    """Calls from a peer of `stage` to the stage after it. `way_of` returns the kind of link to a peer."""

    def __init__(
        self, run: RunFile, stage: int, rpc: Rpc, clock: Clock, ways: StageLinks, way_of: Callable[[PeerId], Way]
    ) -> None:
        self.stage = stage + 1
        self.peers = StagePeers(run.pipeline.stages, clock, ways)
        self._rpc, self._way_of = rpc, way_of
        self._dtype, self._width = run.model.dtype, run.model.d_model
        self._arrival: dict[str, float] = {}  # peer -> reported bytes/s of our frames
        self._told_at: dict[str, float] = {}  # when the kind of path to a peer was last logged
        self.ways: dict[str, Way] = {}  # peer -> kind of path of the last microbatch
        self.in_flight = 0  # calls that wait for an answer

    @property
    def line_bytes_per_s(self) -> float:
        """Rate of the slowest line of the next stage's peers that may receive an output; 0 if unknown."""
        return min(self._arrival.values(), default=0.0)

    def forget_gone(self, serving: Sequence[str]) -> None:
        """Drop data about peers that no longer serve."""
        self._arrival = {name: rate for name, rate in self._arrival.items() if name in serving}
        self.ways = {name: way for name, way in self.ways.items() if name in serving}
        self._told_at = {name: at for name, at in self._told_at.items() if name in serving}

    async def hand_on(
        self, body: PassRequest, frames: Sequence[TensorFrame], shape: tuple[int, int], deadline: float
    ) -> HandOnResult:
        """Have the next stage, and all later ones, do their parts until `deadline`. `shape`: samples and tokens.

        Without `frames`, the next stage returns the gradient that it keeps.
        """
        started = trio.current_time()
        left_s = deadline - started
        task = _Task(self.stage, body, frames, shape, deadline - min(_RESERVE_S, left_s / 8))
        self.in_flight += 1
        try:
            return await self._hand_on(task, started)
        finally:
            self.in_flight -= 1

    def spoilt(self, onward: HandOnResult, error: ProtocolViolation) -> PassAnswer:
        """The answer if a returned gradient is unusable: the trainer chooses another route."""
        log.info("the gradient from …%s of stage %d is unusable: %s", onward.by[-8:], self.stage, error.args[0])
        return _broken(self.stage, onward.by, str(error.args[0])).body

    async def _hand_on(self, task: _Task, started: float) -> HandOnResult:
        named, tried, reason, cut = task.named, set[str](), "", False
        while task.left_s > _LEAST_S:
            is_patient = trio.current_time() - started <= _PATIENCE_S
            name = self._choose(task, tried)
            if name is None:
                if not (is_patient and self._some_are_full(tried)):
                    break
                await trio.sleep(_SOON_S)  # full peers rest for a moment
                continue
            try:
                by, answer = await self._ask_or_hedge(name, task, tried)
            except Overloaded as error:  # full, not failed
                reason = str(error)
                if not is_patient:
                    break  # the trainer may have a newer grant by now, or know peers with room
                pause_s = min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S)
                self.peers.wiring(self.stage).rest(name, trio.current_time() + pause_s)
                if not task.is_to_be_done:
                    await trio.sleep(pause_s)
            except NotFiniteHere as error:  # the trainer decides which peer computes it again
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
                reason = f"{reason or 'it was not called'}; over the trainer: {error}"
        reason = reason or ("no peer serves it" if task.left_s > _LEAST_S else "no time is left to call it")
        return self._onward(_broken(self.stage, named, reason), started, "", "", "")

    def _some_are_full(self, tried: set[str]) -> bool:
        wiring, now = self.peers.wiring(self.stage), trio.current_time()
        return any(wiring.is_full(name, now) for name in wiring if name not in tried)

    def _choose(self, task: _Task, tried: set[str]) -> str | None:
        """The peer to call: the ticket's, unless it failed recently; else another one that can do the same.

        If only the ticket's peer can do it, that is called even after a recent failure, unless it cannot be reached.
        """
        wiring, now, named = self.peers.wiring(self.stage), trio.current_time(), task.named
        serves = named in wiring and named not in tried and not self.peers.is_cut_off(named)
        if serves and not (task.is_to_be_done and wiring.rests(named, now)):
            return named
        if not task.is_to_be_done or len(tried) >= _PEERS_TRIED:
            return None
        return wiring.pick(now, task.cost, avoid=(), never=tried | self.peers.away())

    async def _ask_or_hedge(self, name: str, task: _Task, tried: set[str]) -> tuple[str, Answer[PassAnswer]]:
        """Call a peer and, if it is late, another one that can do the same; returns the peer of the first good
        answer.
        """

        async def ask(peer: str) -> Answer[PassAnswer]:
            answer = await self._ask(peer, task)
            if peer != name and answer.body.broken is not None:
                raise Refused("its own hand-over failed", PeerId.parse(peer))
            return answer

        alone = not task.is_to_be_done
        return await self.peers.first_answer(self.stage, name, task.cost, ask, tried, alone=alone)

    async def _ask(self, name: str, task: _Task) -> Answer[PassAnswer]:
        peer, started = PeerId.parse(name), trio.current_time()
        within_s = self.peers.given_up_after_s(self.stage, name, PASS_TIMEOUT_S)
        body = task.body_for(self._rpc.arrival_rate(peer) or 0.0)
        with self.peers.call_to(name, within_s) as limit_s:
            limit_s = min(task.left_s, limit_s)
            answer = await self._rpc.call(peer, PASS, body, PassAnswer, frames=task.frames, timeout_s=limit_s)
            self._check(peer, peer, task, answer)
        if answer.body.broken is None:
            self.peers.answered(self.stage, name, task.cost, started)
        else:
            self.peers.heard(name)
        if answer.body.arrival_bytes_per_s > 0:
            self._arrival[name] = answer.body.arrival_bytes_per_s
        return answer

    async def _over_the_trainer(self, task: _Task) -> Answer[PassAnswer]:
        trainer = PeerId.parse(task.body.trainer)
        body = RelayRequest(task.named, task.body_for(0.0))
        answer = await self._rpc.call(trainer, RELAY, body, PassAnswer, frames=task.frames, timeout_s=task.left_s)
        self._check(trainer, PeerId.parse(task.named), task, answer)
        return answer

    def _note_way(self, name: str, way: Way) -> Way:
        """Record by which kind of path a microbatch reached a peer; log changes."""
        if name not in self.peers.wiring(self.stage):
            return way  # it does not serve; a ticket may name any number of peers
        before, self.ways[name] = self.ways.get(name, ""), way
        if way != before and (before or way == "trainer"):
            now = trio.current_time()
            level = logging.INFO if now - self._told_at.get(name, -math.inf) > _TOLD_AGAIN_S else logging.DEBUG
            self._told_at[name] = now
            told = {"trainer": "over the trainer", "relay": "over a relay"}.get(way, "over a link")
            log.log(level, "microbatches now go to …%s of stage %d %s", name[-8:], self.stage, told)
        return way

    def _failed(self, name: str, started: float, error: RemoteError) -> None:
        """Avoid a peer for a while that did not answer, or answered wrongly.

        Not after a refusal, for which the microbatch may be at fault.
        """
        if isinstance(error, Refused):
            log.debug("…%s of stage %d refused a microbatch: %s", name[-8:], self.stage, error)
            return
        times = self.peers.failed(self.stage, name, started, error)
        level = self.peers.level(name, times)
        log.log(level, "a microbatch could not be passed to …%s of stage %d: %s", name[-8:], self.stage, error)

    def _onward(self, answer: Answer[PassAnswer], started: float, by: str, way: Way, instead_of: str) -> HandOnResult:
        gradient = answer.frames[0] if answer.frames else None
        return HandOnResult(answer.body, gradient, trio.current_time() - started, by, way, instead_of)

    # --- answers ----------------------------------------------------------------------------------------------

    def _check(self, peer: PeerId, holder: PeerId, task: _Task, answer: Answer[PassAnswer]) -> None:
        """Raise ProtocolViolation, which names `peer`, unless the answer has what was requested.

        That is the gradient, and receipts of `holder` and of the peers of all later stages.
        """
        passed, ticket = answer.body, task.body.ticket
        if passed.broken is not None:
            if passed.hops or answer.frames or not self.stage < passed.broken.stage <= ticket.last:
                raise ProtocolViolation("a broken route was reported with further results, or for a wrong stage", peer)
            return
        if len(answer.frames) != int(task.wants_gradient):
            found, wanted = len(answer.frames), int(task.wants_gradient)
            raise ProtocolViolation(f"a microbatch was answered with {found} tensors; expected {wanted}", peer)
        if task.wants_gradient:
            shape, frame = (*task.shape, self._width), answer.frames[0]
            if frame.shape != shape or frame.dtype != self._dtype:
                raise ProtocolViolation(f"a microbatch was answered with {frame.dtype} {list(frame.shape)}", peer)
        low = self.stage if task.is_to_be_done else ticket.high + 1
        if task.is_to_be_done and (not passed.hops or passed.hops[0].peer != holder.text):
            raise ProtocolViolation("a microbatch was answered without the peer's own hop", peer)
        if fault := fault_of_hops(task.body.run, task.body.trainer, ticket, low, passed.hops):
            raise ProtocolViolation(fault, peer)


def fault_of_hops(run: bytes, trainer: str, ticket: Ticket, low: int, hops: Sequence[Hop]) -> str:
    """The fault in the hops of stages `low` to the ticket's highest, or "". Receipts are checked last."""
    if len(hops) != ticket.high - low + 1:
        return f"{len(hops)} hops for stages {low} to {ticket.high}"
    mb = Mb(trainer, ticket.seq)
    for stage, hop in enumerate(hops, low):
        named = is_peer_text(hop.peer)
        if not named or not has_received(PeerId.parse(hop.peer), run, stage, ticket.step, mb, hop.receipt):
            return f"the hop of stage {stage} has no valid receipt"
    return ""


@dataclass(frozen=True, slots=True)
class _Task:
    """One microbatch that is passed on to `stage`."""

    stage: int
    body: PassRequest
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
        """Seconds left for an answer; 0 or less if none."""
        return self.deadline - trio.current_time()

    @property
    def is_to_be_done(self) -> bool:
        return self.body.ticket.is_done_at(self.stage)

    @property
    def wants_gradient(self) -> bool:
        return self.body.ticket.is_done_at(self.stage - 1)

    @property
    def cost(self) -> float:
        """The cost, in forward passes of one sample."""
        return self.shape[0] * (1.0 + BACKWARD_COST)

    def body_for(self, line_bytes_per_s: float) -> PassRequest:
        """The call's body. `line_bytes_per_s`: the rate at which the called peer's frames arrive here; 0 if unknown."""
        return PassRequest(
            self.body.run, self.stage, self.body.trainer, self.body.ticket, self.body.grant, line_bytes_per_s
        )


def _broken(stage: int, named: str, reason: str) -> Answer[PassAnswer]:
    return Answer(PassAnswer(broken=Broken(stage, named, reason[:BROKEN_CHARS])))


def _not_finite(stage: int, name: str, error: NotFiniteHere) -> Answer[PassAnswer]:
    """The answer if peer `name` of the next stage reports that its own result is not finite."""
    return Answer(PassAnswer(broken=NotFiniteAt(stage, name, str(error.args[0])[:BROKEN_CHARS])))
