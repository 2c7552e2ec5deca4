"""A trainer's client of the stages: picks a peer of a stage, calls it, checks its answer, tries another if it fails.

Works on encoded frames: an answer's header is checked, and the frame is passed on without decoding. Calls are repeated
until they succeed or the caller cancels; a repeat counts once, because the stage knows the microbatch's number. A
backward call sends the conductor's newest grant, and its answer has a receipt. If a peer reports its result as not
finite, another peer of its stage is called; if both agree, or there is no other, the call raises MicrobatchNotFinite.
`schedule` has the order of the stages and the inputs kept for repeats. Hostile input: an answer with a wrong shape or
receipt is a protocol violation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import trio

from peerd.core.errors import NotFiniteHere, Overloaded, ProtocolViolation, RemoteError
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.messages.proof import Sign, has_received
from peerd.core.messages.swarm import Grant, Mb, StageAnswer, StageBackward, StageForward, StageLoss
from peerd.core.run.runfile import RunFile, fingerprint
from peerd.machine.batch.trainer_ledger import Holding
from peerd.machine.pipeline.second_opinion import SecondOpinion
from peerd.machine.pipeline.wiring import BACKWARD_COST
from peerd.service.pipeline.not_finite import NotFiniteJudge
from peerd.service.pipeline.stage_peers import StagePeers
from peerd.service.rpc.rpc import Answer, Rpc

log = logging.getLogger("peerd.service.pipeline.stage_client")

FORWARD_TIMEOUT_S, BACKWARD_TIMEOUT_S = 30.0, 75.0  # before the first measured call
_SOON_S, _NOT_SO_SOON_S = 0.05, 5.0  # bounds of the pause before an overloaded peer is called again


@dataclass(frozen=True, slots=True)
class TrainerCredentials:
    """The trainer's peer id (`own`), its newest grants for each microbatch and for evaluation, and its signing
    function.
    """

    own: str
    grant_of: Callable[[int], Grant | None]
    sign: Sign
    evaluation_grant: Callable[[], Grant | None] = lambda: None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call to a stage. The input is the first of `frames`."""

    stage: int
    verb: str
    body: StageForward | StageBackward | StageLoss
    frames: Sequence[TensorFrame]

    @property
    def cost(self) -> float:
        """The cost, in forward passes of one sample."""
        return self.frames[0].shape[0] * (BACKWARD_COST if self.verb == "backward" else 1.0)

    @property
    def step(self) -> int | None:
        """The step that it is for; None for an evaluation."""
        return None if isinstance(self.body, StageLoss) else self.body.step

    @property
    def at_first_s(self) -> float:
        """Seconds that a peer has for its answer before any call was measured."""
        return BACKWARD_TIMEOUT_S if self.verb == "backward" else FORWARD_TIMEOUT_S

    @property
    def onward(self) -> int:
        """The stage that gets the answer; out of range if there is none."""
        return self.stage + 1 if self.verb == "forward" else self.stage - 1


class StageClient:
    """Calls to the stages of one run, each to one of `peers`."""

    def __init__(self, run: RunFile, rpc: Rpc, peers: StagePeers, papers: TrainerCredentials) -> None:
        self._rpc, self._peers, self._papers = rpc, peers, papers
        self._fingerprint = fingerprint(run)
        self._dtype, self._width = run.model.dtype, run.model.d_model
        self._judge = NotFiniteJudge(run, peers)
        self.retries = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    # --- calls ------------------------------------------------------------------------------------------------

    async def forward(self, stage: int, step: int | None, seq: int, x: TensorFrame) -> TensorFrame:
        """The stage's output for the input `x` of microbatch `seq`.

        `step` None is an evaluation with the stage's current parameters; `seq` is then ignored.
        """
        body = StageForward(self._fingerprint, stage, step, seq=seq)
        _, answer = await self._call(_Call(stage, "forward", body, [x]))
        return answer.frames[0]

    async def backward(
        self, stage: int, step: int, seq: int, x: TensorFrame, gradient: TensorFrame
    ) -> tuple[Holding, Answer[StageAnswer]]:
        """Compute a backward; returns its holder and the answer: the input's gradient and, from the last stage, the
        loss.
        """
        body = StageBackward(self._fingerprint, stage, step, seq)
        name, answer = await self._call(_Call(stage, "backward", body, [x, gradient]))
        return Holding(name, answer.body.receipt), answer

    async def loss(self, stage: int, x: TensorFrame, targets: TensorFrame) -> float:
        """The last stage's loss, summed over the samples."""
        _, answer = await self._call(_Call(stage, "loss", StageLoss(self._fingerprint, stage), [x, targets]))
        return answer.body.loss_sum

    async def _call(self, call: _Call) -> tuple[str, Answer[StageAnswer]]:
        """Call peers of the stage one after another until one gives a valid answer. Raises MicrobatchNotFinite."""
        wiring, failed, opinion = self._peers.wiring(call.stage), set[str](), SecondOpinion()
        while True:
            name = await self._peers.pick(call.stage, call.cost, failed)
            started = trio.current_time()
            ask = partial(self._ask, call)
            try:
                by, answer = await self._peers.first_answer(call.stage, name, call.cost, ask, failed)
                self._judge.computed(opinion, started)
                return by, answer
            except Overloaded as error:  # full, not failed
                wiring.rest(name, trio.current_time() + min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S))
                log.debug("stage %d %s, another peer is asked: %s", call.stage, call.verb, error)
            except NotFiniteHere as error:
                opinion.say(call.stage, name)
                self._judge.hear(opinion, call.stage, failed, call.step, error, started)
            except RemoteError as error:
                times = self._peers.failed(call.stage, name, started, error)
                level = self._peers.level(name, times)
                log.log(level, "stage %d %s failed, another peer is asked: %s", call.stage, call.verb, error)
            failed.add(name)
            self.retries += 1

    async def _ask(self, call: _Call, name: str) -> Answer[StageAnswer]:
        """Call one peer; returns its checked answer."""
        peer, body, started = PeerId.parse(name), call.body, trio.current_time()
        within_s = self._peers.times(call.stage).given_up_after_s(name, call.at_first_s)
        if isinstance(body, StageLoss):
            body = msgspec.structs.replace(body, grant=self._papers.evaluation_grant())
        else:
            papers = self._papers
            shown = papers.evaluation_grant() if body.step is None else papers.grant_of(body.seq)
            body = msgspec.structs.replace(body, grant=shown, line_bytes_per_s=self._line(call, peer))
        with self._peers.call_to(name, within_s) as limit_s:
            answer = await self._rpc.call(
                peer, f"stage/6/{call.verb}", body, StageAnswer, frames=call.frames, timeout_s=limit_s
            )
            self._check(call, answer)
            if isinstance(body, StageBackward):
                self._check_receipt(peer, body, answer.body)
        self._peers.answered(call.stage, name, call.cost, started)
        self._note(name, call, answer)
        return answer

    def _line(self, call: _Call, peer: PeerId) -> float:
        """The rate, in bytes/s, of the slowest line that the answer passes: to us, and on to the next stage; 0 if
        unknown.
        """
        onward = self._peers.arrival_rates(call.onward)
        return min((rate for rate in [self._rpc.arrival_rate(peer), *onward] if rate), default=0.0)

    def _note(self, name: str, call: _Call, answer: Answer[StageAnswer]) -> None:
        """Record the rate of the line to the peer, and the bytes that a call sent and received."""
        self._peers.note_arrival_rate(call.stage, name, answer.body.arrival_bytes_per_s)
        self.sent_bytes += sum(len(frame.payload) for frame in call.frames)
        self.received_bytes += sum(len(frame.payload) for frame in answer.frames)

    # --- answers ----------------------------------------------------------------------------------------------

    def _check_receipt(self, peer: PeerId, body: StageBackward, answer: StageAnswer) -> None:
        """Raise ProtocolViolation unless the peer signed a valid receipt, which we need to prove that it holds the
        gradient.
        """
        mb, shown = Mb(self._papers.own, body.seq), answer.receipt
        if shown is None or not has_received(peer, body.run, body.stage, body.step, mb, shown):
            raise ProtocolViolation("backward was answered without a valid receipt", peer)

    def _check(self, call: _Call, answer: Answer[StageAnswer]) -> None:
        """Raise ProtocolViolation unless the answer's frames fit the next stage."""
        due = call.verb == "forward" or (call.verb == "backward" and call.stage > 0)
        if len(answer.frames) != int(due):
            raise ProtocolViolation(f"{call.verb} was answered with {len(answer.frames)} frames")
        if due:
            shape, frame = (*call.frames[0].shape[:2], self._width), answer.frames[0]
            if frame.shape != shape or frame.dtype != self._dtype:
                raise ProtocolViolation(f"{call.verb} was answered with {frame.dtype} {list(frame.shape)}")
