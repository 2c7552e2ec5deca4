"""The schedule of a microbatch: each stage in turn, forward and back, and one stage alone where it is repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.messages.proof import receipt
from peerd.core.messages.swarm import Mb, MemberInfo, StageAnswer, StageBackward, StageForward
from peerd.core.run.runfile import ModelSection, PipelineSection, RunFile, fingerprint
from peerd.service.pipeline.microbatch import Microbatch
from peerd.service.pipeline.schedule import MicrobatchSchedule
from peerd.service.pipeline.stage_client import TrainerCredentials
from peerd.service.rpc.rpc import Answer
from peerd.sim.clock import SimClock

STAGES = 3
PEERS = [Keypair.from_seed(f"stage {stage}".encode().ljust(32, b".")) for stage in range(STAGES)]
TRAINER = Keypair.from_seed(b"t".ljust(32, b"."))
OWN = TRAINER.peer_id.text
RUN = RunFile(
    run="schedule",
    model=ModelSection(d_model=3, heads=1, layers=3, context=4),
    pipeline=PipelineSection(stages=STAGES, microbatch=2),
)
MARK = fingerprint(RUN)


def frame(value: float, *shape: int) -> TensorFrame:
    return TensorFrame("float32", shape, memoryview(np.full(shape, value, "float32")).cast("B"))


def value(of: TensorFrame) -> float:
    return float(np.frombuffer(of.payload, "float32")[0])


class Stages:
    """In place of an Rpc: a forward adds 1 to its input, a backward tenfolds the gradient; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int | None]] = []
        self.values: list[tuple[float, ...]] = []

    def arrival_rate(self, peer: PeerId) -> None: ...

    async def call(self, peer: PeerId, method: str, body: Any, *_: Any, **more: Any) -> Answer[StageAnswer]:
        await trio.lowlevel.checkpoint()
        stage, verb = next(s for s, key in enumerate(PEERS) if key.peer_id == peer), method.rpartition("/")[2]
        assert stage == body.stage
        self.asked.append((stage, verb, body.step if isinstance(body, StageForward | StageBackward) else None))
        self.values.append(tuple(map(value, more["frames"])))
        if verb == "forward":
            return Answer(StageAnswer(), (frame(value(more["frames"][0]) + 1, 2, 4, 3),))
        if verb == "loss":
            return Answer(StageAnswer(loss_sum=value(more["frames"][0])))
        signed = receipt(PEERS[stage].sign, MARK, 5, stage, body.step, Mb(OWN, body.seq))
        gradient = (frame(value(more["frames"][1]) * 10, 2, 4, 3),) if stage else ()
        return Answer(StageAnswer(loss_sum=0.5 if stage == STAGES - 1 else 0.0, receipt=signed), gradient)


def members(keys: list[Keypair]) -> list[MemberInfo]:
    return [MemberInfo(key.peer_id.text, stage, [], True) for stage, key in enumerate(keys)]


def pipeline(stages: Any) -> MicrobatchSchedule:
    class Ways:
        def linked(self, peer: PeerId) -> bool:
            return True

        def doubt(self, peer: PeerId) -> float:
            return 0.0

    papers = TrainerCredentials(OWN, lambda seq: None, TRAINER.sign)
    made = MicrobatchSchedule(RUN, stages, SimClock(1, "t"), Ways(), papers)
    made.update(members(PEERS))
    return made


def load() -> Microbatch:
    return Microbatch(frame(1.0, 2, 4), frame(2.0, 2, 4))


async def test_a_microbatch_goes_forward_through_all_stages_and_back(autojump_clock: MockClock) -> None:
    stages, one = Stages(), load()
    holdings = await pipeline(stages).train(7, 4, one)
    assert stages.asked == [
        (0, "forward", 7),
        (1, "forward", 7),
        (2, "backward", 7),
        (1, "backward", 7),
        (0, "backward", 7),
    ]
    assert stages.values == [(1.0,), (2.0,), (3.0, 2.0), (2.0, 20.0), (1.0, 200.0)]
    assert [holding.peer for holding in holdings] == [key.peer_id.text for key in PEERS]
    assert one.loss_sum == 0.5


async def test_one_stage_is_done_again_from_what_was_kept(autojump_clock: MockClock) -> None:
    stages, one = Stages(), load()
    made = pipeline(stages)
    await made.train(7, 4, one)
    before = len(stages.asked)
    holding = await made.repeat(7, 4, 1, one)
    assert holding.peer == PEERS[1].peer_id.text
    assert stages.asked[before:] == [(1, "backward", 7)]
    assert stages.values[-1] == (2.0, 20.0)
    assert (made.retries, made.waits_for, made.peers()) == (0, None, STAGES)


async def test_a_loss_is_taken_with_whatever_parameters_there_are(autojump_clock: MockClock) -> None:
    stages = Stages()
    made = pipeline(stages)
    assert await made.evaluate(frame(1.0, 2, 4), frame(2.0, 2, 4)) == pytest.approx(3.0)
    assert stages.asked == [(0, "forward", None), (1, "forward", None), (2, "loss", None)]
    assert made.sent_bytes == 4 * (8 + 24 + 24 + 8)
    assert made.received_bytes == 4 * (24 + 24)
