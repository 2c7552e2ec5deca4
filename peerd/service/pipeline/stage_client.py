"""A microbatch's way through the stages, from the trainer's side: pick a peer, call it, try another when it fails.

Works on frames as they travel: an output of one stage is checked for its header and sent on, never decoded here.
For each microbatch the inputs and output gradients of every stage are kept until the step is averaged, so that a
stage whose peer died can be done again alone. Calls are repeated until they succeed or the caller cancels:
a repeat counts once, since the stage knows the microbatch's number. With a backward goes the conductor's newest grant,
and what comes back is a receipt. A peer may answer with a wrong shape or receipt: refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import trio

from peerd.core.clock import Clock
from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.messages.proof import has_received
from peerd.core.messages.swarm import Grant, Mb, MemberInfo, StageAnswer, StageBackward, StageForward, StageLoss
from peerd.core.runfile import RunFile, fingerprint
from peerd.machine.batch.trainer_ledger import Holding
from peerd.machine.pipeline.wiring import BACKWARD_COST, Wiring
from peerd.net.signal import Signal
from peerd.service.rpc.rpc import Answer, Rpc

log = logging.getLogger("peerd.service.pipeline.stage_client")

FORWARD_TIMEOUT_S = 30.0
BACKWARD_TIMEOUT_S = 75.0
_SOON_S, _NOT_SO_SOON_S = 0.05, 5.0  # before a peer is asked again that says it cannot take a call now
_OVERDUE_S = 5.0  # that an answer takes before one looks whether its peer lives
_AWAY_S = 0.5  # between looks whether one of those that can only dial is connected


@dataclass(slots=True)
class Load:
    """One microbatch on its way. Frames: tokens int64 [B, L]; inputs and gradients [B, L, D] between stages."""

    tokens: TensorFrame
    targets: TensorFrame
    inputs: dict[int, TensorFrame] = field(default_factory=dict)  # of each stage, as sent
    gradients: dict[int, TensorFrame] = field(default_factory=dict)  # of each stage's output (targets in the last)
    loss_sum: float = 0.0  # over the samples

    def forget(self) -> None:
        """Begin again from the tokens."""
        self.inputs.clear()
        self.gradients.clear()


class Ways(Protocol):
    """What the pipeline knows of the ways to stage peers."""

    def linked(self, peer: PeerId) -> bool:
        """Whether calls get through to `peer` though it cannot be dialed."""
        ...

    def doubt(self, peer: PeerId) -> None:
        """An answer is overdue: see whether the peer is still there."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerPapers:
    """Who the trainer is, and what shows that the conductor has admitted a microbatch of its."""

    own: str
    grant_of: Callable[[int], Grant | None]


class Pipeline:
    """Calls to the stages of one run."""

    def __init__(self, run: RunFile, rpc: Rpc, clock: Clock, ways: Ways, papers: TrainerPapers) -> None:
        self._rpc, self._ways, self._papers = rpc, ways, papers
        self._clients: set[str] = set()  # stage peers that only dial: called while they are connected
        self._fingerprint = fingerprint(run)
        self._stages = run.pipeline.stages
        self._dtype, self._width = run.model.dtype, run.model.d_model
        self._wirings = [Wiring(clock.rng(f"wiring {stage}")) for stage in range(self._stages)]
        self._calls: dict[str, dict[trio.CancelScope, float]] = {}  # by peer, and since when
        self._uplinks: list[dict[str, float]] = [{} for _ in range(self._stages)]  # bytes/s to each peer, as it says
        self._changed = Signal()
        self.waits_for: str | None = None
        self.retries = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    def update(self, members: Iterable[MemberInfo]) -> None:
        """These peers serve now."""
        ready = [m for m in members if m.ready]
        self._clients = {m.peer for m in ready if m.client}
        for stage, wiring in enumerate(self._wirings):
            peers = {m.peer for m in ready if m.stage == stage}
            wiring.update(peers)
            self._uplinks[stage] = {peer: rate for peer, rate in self._uplinks[stage].items() if peer in peers}
        for name in self._calls.keys() - {m.peer for m in ready}:
            for scope in self._calls[name]:  # whoever has left will not answer: do not wait for the deadline
                scope.cancel()
        self._changed.notify()

    def look(self) -> None:
        """To be called now and then: of whom an answer is overdue, we see whether it is still there.

        Otherwise one whose answers do not come through would cost us what it may take to compute.
        """
        now = trio.current_time()
        for name, since in self._calls.items():
            if now - min(since.values()) > _OVERDUE_S:
                self._ways.doubt(PeerId.parse(name))

    def peers(self) -> int:
        """Stage peers that may be called."""
        return sum(len(wiring) for wiring in self._wirings)

    async def train(self, step: int, seq: int, load: Load) -> list[Holding]:
        """Send a microbatch through all stages and back; returns who holds its gradient, by stage."""
        load.forget()
        last = self._stages - 1
        load.inputs[0] = load.tokens
        for stage in range(last):
            body = StageForward(self._fingerprint, stage, step)
            _, answer = await self._call(stage, "forward", body, [load.inputs[stage]])
            load.inputs[stage + 1] = answer.frames[0]
        load.gradients[last] = load.targets
        holdings = [Holding("", None)] * self._stages
        for stage in range(last, -1, -1):
            holdings[stage], answer = await self._backward(step, seq, stage, load)
            if stage == last:
                load.loss_sum = answer.body.loss_sum
            if stage > 0:
                load.gradients[stage - 1] = answer.frames[0]
        return holdings

    async def repeat(self, step: int, seq: int, stage: int, load: Load) -> Holding:
        """Do one stage's backward again, from what was kept; returns who holds it now."""
        holding, _ = await self._backward(step, seq, stage, load)
        return holding

    async def evaluate(self, tokens: TensorFrame, targets: TensorFrame) -> float:
        """The loss sum over the samples, with whatever parameters the stages have now."""
        x = tokens
        for stage in range(self._stages - 1):
            _, answer = await self._call(stage, "forward", StageForward(self._fingerprint, stage, None), [x])
            x = answer.frames[0]
        body = StageLoss(self._fingerprint, self._stages - 1)
        _, answer = await self._call(self._stages - 1, "loss", body, [x, targets])
        return answer.body.loss_sum

    async def _backward(self, step: int, seq: int, stage: int, load: Load) -> tuple[Holding, Answer[StageAnswer]]:
        body = StageBackward(self._fingerprint, stage, step, seq)
        name, answer = await self._call(stage, "backward", body, [load.inputs[stage], load.gradients[stage]])
        return Holding(name, answer.body.receipt), answer

    async def _call(
        self, stage: int, verb: str, body: StageForward | StageBackward | StageLoss, frames: Sequence[TensorFrame]
    ) -> tuple[str, Answer[StageAnswer]]:
        """Call one peer of the stage after the other until one answers well."""
        cost = frames[0].shape[0] * (BACKWARD_COST if verb == "backward" else 1.0)
        timeout_s = BACKWARD_TIMEOUT_S if verb == "backward" else FORWARD_TIMEOUT_S
        wiring, failed = self._wirings[stage], set[str]()
        while True:
            name = await self._pick(stage, cost, failed)
            peer, started = PeerId.parse(name), trio.current_time()
            if not isinstance(body, StageLoss):
                body = msgspec.structs.replace(body, line_bytes_per_s=self._line(stage, verb, peer))
            if isinstance(body, StageBackward):
                body = msgspec.structs.replace(body, grant=self._papers.grant_of(body.seq))
            try:
                with self._call_to(name):
                    answer = await self._rpc.call(
                        peer, f"stage/3/{verb}", body, StageAnswer, frames=frames, timeout_s=timeout_s
                    )
                    self._check(stage, verb, answer, frames[0].shape)
                    if isinstance(body, StageBackward):
                        self._check_receipt(peer, body, answer.body)
            except Overloaded as error:  # not yet, it says: it has not failed
                wiring.rest(name, trio.current_time() + min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S))
                log.debug("stage %d %s, another peer is asked: %s", stage, verb, error)
                failed.add(name)
                self.retries += 1
                continue
            except RemoteError as error:
                times = wiring.failed(name, trio.current_time(), trio.current_time() - started)
                level = logging.INFO if times == 1 else logging.DEBUG  # the first failure tells it all
                log.log(level, "stage %d %s failed, another peer is asked: %s", stage, verb, error)
                failed.add(name)
                self.retries += 1
                continue
            wiring.answered(name, cost, started, trio.current_time())
            if answer.body.arrival_bytes_per_s > 0:
                self._uplinks[stage][name] = answer.body.arrival_bytes_per_s
            self.sent_bytes += sum(len(frame.payload) for frame in frames)
            self.received_bytes += sum(len(frame.payload) for frame in answer.frames)
            return name, answer

    def _line(self, stage: int, verb: str, peer: PeerId) -> float:
        """The slowest line, in bytes/s, that the answer passes: to us, and on to whoever takes it; 0: unknown."""
        onward = stage + 1 if verb == "forward" else stage - 1
        rates = [self._rpc.arrival_rate(peer), *(self._uplinks[onward].values() if onward >= 0 else ())]
        return min((rate for rate in rates if rate), default=0.0)

    @contextmanager
    def _call_to(self, name: str) -> Iterator[None]:
        """Raises Unreachable when the peer leaves the swarm meanwhile."""
        scopes = self._calls.setdefault(name, {})
        with trio.CancelScope() as scope:
            scopes[scope] = trio.current_time()
            try:
                yield
            finally:
                del scopes[scope]
                if not scopes:
                    self._calls.pop(name, None)
        if scope.cancelled_caught:
            raise Unreachable("the peer has left the swarm", PeerId.parse(name))

    async def _pick(self, stage: int, cost: float, avoid: set[str]) -> str:
        """The stage's next peer; waits while all rest or none is there."""
        wiring = self._wirings[stage]
        while True:
            now = trio.current_time()
            away = {name for name in self._clients if not self._ways.linked(PeerId.parse(name))}
            name = wiring.pick(now, cost, avoid, away)
            if name is not None:
                self.waits_for = None
                return name
            due = wiring.wakes_at(now)
            self.waits_for = (
                f"stage {stage} has no peers" if due is None else f"the peers of stage {stage} failed just now"
            )
            if due is not None and due <= now:  # who is awake can only dial, and has not yet
                self.waits_for, due = f"the peers of stage {stage} can only dial, and are not connected", now + _AWAY_S
            with trio.move_on_at(due + 0.01 if due is not None else now + 5.0):
                await self._changed.wait()

    def _check_receipt(self, peer: PeerId, body: StageBackward, answer: StageAnswer) -> None:
        """Raise ProtocolViolation unless the peer has signed that it holds the microbatch: nobody would believe us."""
        mb, shown = Mb(self._papers.own, body.seq), answer.receipt
        if shown is None or not has_received(peer, body.run, body.stage, body.step, mb, shown):
            raise ProtocolViolation("backward was answered without a receipt that is good", peer)

    def _check(self, stage: int, verb: str, answer: Answer[StageAnswer], input_shape: tuple[int, ...]) -> None:
        """Raise ProtocolViolation unless the answer's frames are what the next stage takes."""
        due = verb == "forward" or (verb == "backward" and stage > 0)
        if len(answer.frames) != int(due):
            raise ProtocolViolation(f"{verb} was answered with {len(answer.frames)} frames")
        if due:
            shape, frame = (*input_shape[:2], self._width), answer.frames[0]
            if frame.shape != shape or frame.dtype != self._dtype:
                raise ProtocolViolation(f"{verb} was answered with {frame.dtype} {list(frame.shape)}")
