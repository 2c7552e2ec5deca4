"""Pipeline schedule of a microbatch: forward through all stages, backward from the last, repeat of a lost stage.

The inputs and output gradients of every stage are kept for each microbatch until the step is averaged, so that a stage
whose peer died can be repeated alone. `StagePeers` chooses the peer of a stage; `StageClient` calls it and checks its
answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from peerd.core.clock import Clock
from peerd.core.frame import TensorFrame
from peerd.core.messages.swarm import MemberInfo, StageAnswer
from peerd.core.run.runfile import RunFile
from peerd.machine.batch.trainer_ledger import Holding
from peerd.service.pipeline.microbatch import Microbatch
from peerd.service.pipeline.stage_client import StageClient, TrainerCredentials
from peerd.service.pipeline.stage_peers import StageLinks, StagePeers
from peerd.service.rpc.rpc import Answer, Rpc


class MicrobatchSchedule:
    """A run's stages in order, for one trainer."""

    def __init__(self, run: RunFile, rpc: Rpc, clock: Clock, ways: StageLinks, papers: TrainerCredentials) -> None:
        self._peers = StagePeers(run.pipeline.stages, clock, ways)
        self._stages = StageClient(run, rpc, self._peers, papers)
        self._last = run.pipeline.stages - 1

    async def train(self, step: int, seq: int, load: Microbatch) -> list[Holding]:
        """Send a microbatch through all stages and back; returns the holder of its gradient in each stage."""
        load.forget()
        load.inputs[0] = load.tokens
        for stage in range(self._last):
            load.inputs[stage + 1] = await self._stages.forward(stage, step, seq, load.inputs[stage])
        load.gradients[self._last] = load.targets
        holdings = [Holding("", None)] * (self._last + 1)
        for stage in range(self._last, -1, -1):
            holdings[stage], answer = await self._backward(step, seq, stage, load)
            if stage == self._last:
                load.loss_sum = answer.body.loss_sum
            if stage > 0:
                load.gradients[stage - 1] = answer.frames[0]
        return holdings

    async def repeat(self, step: int, seq: int, stage: int, load: Microbatch) -> Holding:
        """Repeat one stage's backward from the kept input and gradient; returns the new holder."""
        holding, _ = await self._backward(step, seq, stage, load)
        return holding

    async def evaluate(self, tokens: TensorFrame, targets: TensorFrame) -> float:
        """The loss summed over the samples, with the current parameters of the stages."""
        x = tokens
        for stage in range(self._last):
            x = await self._stages.forward(stage, None, 0, x)
        return await self._stages.loss(self._last, x, targets)

    async def _backward(self, step: int, seq: int, stage: int, load: Microbatch) -> tuple[Holding, Answer[StageAnswer]]:
        return await self._stages.backward(stage, step, seq, load.inputs[stage], load.gradients[stage])

    # --- the stages' peers ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check overdue answers and probe unreachable peers, until cancelled."""
        await self._peers.run()

    def update(self, members: Iterable[MemberInfo]) -> None:
        """Replace the serving peers."""
        self._peers.update(members)

    def peers(self) -> int:
        """Number of stage peers that may be called."""
        return len(self._peers)

    @property
    def waits_for(self) -> str | None:
        """Why no peer of a stage is called, as text, or None."""
        return self._peers.waits_for

    @property
    def retries(self) -> int:
        """Number of calls repeated to another peer."""
        return self._stages.retries

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames sent to stages."""
        return self._stages.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of frames received from stages."""
        return self._stages.received_bytes
