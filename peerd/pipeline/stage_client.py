"""A trainer's evaluations: sends samples through the stages, each call to a peer of a stage, and returns the loss.

Works on encoded frames: an answer's header is checked, and the frame is passed on without decoding. If a peer fails,
another one is called, until one succeeds or the caller cancels. If a peer reports its result as not finite, another
peer of its stage is called; if both agree, or there is no other, the call raises MicrobatchNotFinite. Microbatches take
another route (`direct`). Hostile input: an answer with a wrong shape is a protocol violation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import NotFiniteHere, Overloaded, ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.messages.proof import Sign
from peerd.messages.swarm import Grant, StageAnswer, StageForward, StageLoss
from peerd.pipeline.not_finite import NotFiniteJudge
from peerd.pipeline.routes.second_opinion import SecondOpinion
from peerd.pipeline.stage_peers import StagePeers
from peerd.rpc.rpc import Answer, Rpc
from peerd.run.runfile import RunFile, fingerprint

log = logging.getLogger("peerd.pipeline.stage_client")

_TIMEOUT_S = 30.0  # before the first measured call
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
    """One call to a stage: `forward`, or `loss` at the last one. The input is the first of `frames`."""

    stage: int
    verb: str
    frames: Sequence[TensorFrame]

    @property
    def cost(self) -> float:
        """The cost, in forward passes of one sample."""
        return float(self.frames[0].shape[0])


class StageClient:
    """Evaluation calls to the stages of one run, each to one of `peers`."""

    def __init__(self, run: RunFile, rpc: Rpc, peers: StagePeers, papers: TrainerCredentials) -> None:
        self._rpc, self._peers, self._papers = rpc, peers, papers
        self._fingerprint = fingerprint(run)
        self._dtype, self._width, self._last = run.model.dtype, run.model.d_model, run.pipeline.stages - 1
        self._judge = NotFiniteJudge(run, peers)
        self.retries = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    async def evaluate(self, tokens: TensorFrame, targets: TensorFrame) -> float:
        """The loss summed over the samples, with the current parameters of the stages. Raises MicrobatchNotFinite."""
        x = tokens
        for stage in range(self._last):
            x = (await self._call(_Call(stage, "forward", [x]))).frames[0]
        return (await self._call(_Call(self._last, "loss", [x, targets]))).body.loss_sum

    async def _call(self, call: _Call) -> Answer[StageAnswer]:
        """Call peers of the stage one after another until one gives a valid answer. Raises MicrobatchNotFinite."""
        wiring, failed, opinion = self._peers.wiring(call.stage), set[str](), SecondOpinion()
        while True:
            name = await self._peers.pick(call.stage, call.cost, failed)
            started = trio.current_time()
            ask = partial(self._ask, call)
            try:
                _, answer = await self._peers.first_answer(call.stage, name, call.cost, ask, failed)
                self._judge.computed(opinion, started)
                return answer
            except Overloaded as error:  # full, not failed
                wiring.rest(name, trio.current_time() + min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S))
                log.debug("stage %d %s, another peer is asked: %s", call.stage, call.verb, error)
            except NotFiniteHere as error:
                opinion.say(call.stage, name)
                self._judge.hear(opinion, call.stage, failed, None, error, started)
            except RemoteError as error:
                times = self._peers.failed(call.stage, name, started, error)
                level = self._peers.level(name, times)
                log.log(level, "stage %d %s failed, another peer is asked: %s", call.stage, call.verb, error)
            failed.add(name)
            self.retries += 1

    async def _ask(self, call: _Call, name: str) -> Answer[StageAnswer]:
        """Call one peer; returns its checked answer."""
        peer, started = PeerId.parse(name), trio.current_time()
        within_s = self._peers.times(call.stage).given_up_after_s(name, _TIMEOUT_S)
        with self._peers.call_to(name, within_s) as limit_s:
            answer = await self._rpc.call(
                peer,
                f"stage/6/{call.verb}",
                self._body(call, peer),
                StageAnswer,
                frames=call.frames,
                timeout_s=limit_s,
            )
            self._check(call, answer)
        self._peers.answered(call.stage, name, call.cost, started)
        self._peers.note_arrival_rate(call.stage, name, answer.body.arrival_bytes_per_s)
        self.sent_bytes += sum(len(frame.payload) for frame in call.frames)
        self.received_bytes += sum(len(frame.payload) for frame in answer.frames)
        return answer

    def _body(self, call: _Call, peer: PeerId) -> StageForward | StageLoss:
        grant = self._papers.evaluation_grant()
        if call.verb == "loss":
            return StageLoss(self._fingerprint, call.stage, grant)
        return StageForward(self._fingerprint, call.stage, line_bytes_per_s=self._line(call, peer), grant=grant)

    def _line(self, call: _Call, peer: PeerId) -> float:
        """The lowest rate, in bytes/s, at which an answer reaches us or is sent on to the next stage; 0 if unknown."""
        onward = self._peers.arrival_rates(call.stage + 1)
        return min((rate for rate in [self._rpc.arrival_rate(peer), *onward] if rate), default=0.0)

    def _check(self, call: _Call, answer: Answer[StageAnswer]) -> None:
        """Raise ProtocolViolation unless the answer's frames fit the next stage."""
        due = call.verb == "forward"
        if len(answer.frames) != int(due):
            raise ProtocolViolation(f"{call.verb} was answered with {len(answer.frames)} frames")
        if due:
            shape, frame = (*call.frames[0].shape[:2], self._width), answer.frames[0]
            if frame.shape != shape or frame.dtype != self._dtype:
                raise ProtocolViolation(f"{call.verb} was answered with {frame.dtype} {list(frame.shape)}")
