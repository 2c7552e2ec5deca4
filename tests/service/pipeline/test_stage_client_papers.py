"""A trainer and stage peers' answers: who is not ready is asked again soon, and who signs nothing is passed by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Overloaded
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.messages.proof import grant, receipt
from peerd.core.messages.swarm import Grant, GrantStatement, Mb, MemberInfo, Receipt, Seqs, StageAnswer, StageBackward
from peerd.core.run.runfile import ModelSection, PipelineSection, RunFile, fingerprint
from peerd.service.pipeline.microbatch import Microbatch
from peerd.service.pipeline.schedule import MicrobatchSchedule
from peerd.service.pipeline.stage_client import TrainerCredentials
from peerd.service.rpc.rpc import Answer
from peerd.sim.clock import SimClock

A, B, TRAINER, CONDUCTOR = (Keypair.from_seed(name.encode().ljust(32, b".")) for name in ("a", "b", "t", "c"))
RUN = RunFile(
    run="papers", model=ModelSection(d_model=16, heads=2, layers=1, context=4), pipeline=PipelineSection(microbatch=2)
)
MARK = fingerprint(RUN)
OWN = TRAINER.peer_id.text


class Stages:
    """In place of an Rpc: each peer answers as it is told to."""

    def __init__(self, says: dict[PeerId, Any]) -> None:
        self.says = says
        self.asked: list[tuple[float, PeerId, Grant | None]] = []

    def arrival_rate(self, peer: PeerId) -> None: ...

    async def call(self, peer: PeerId, method: str, body: StageBackward, *_: Any, **__: Any) -> Answer[StageAnswer]:
        await trio.lowlevel.checkpoint()
        self.asked.append((round(trio.current_time(), 2), peer, body.grant))
        found = self.says[peer](body)
        if isinstance(found, Exception):
            raise found
        return Answer(StageAnswer(loss_sum=1.0, receipt=found))


class Ways:
    def linked(self, peer: PeerId) -> bool:
        return True

    def doubt(self, peer: PeerId) -> float:
        return 0.0


def signed(by: Keypair, stage: int = 0) -> Any:
    def sign(body: StageBackward) -> Receipt:
        return receipt(by.sign, MARK, 5, stage, body.step, Mb(OWN, body.seq))

    return sign


def admitted(term: int) -> Grant:
    return grant(CONDUCTOR.sign, GrantStatement(MARK, term, 3, OWN, Seqs.of([7])))


def pipeline(stages: Any, grants: Any, *peers: Keypair) -> MicrobatchSchedule:
    made = MicrobatchSchedule(RUN, stages, SimClock(1, "t"), Ways(), TrainerCredentials(OWN, grants, TRAINER.sign))
    made.update(MemberInfo(peer.peer_id.text, 0, [], True) for peer in peers)
    return made


def load() -> Microbatch:
    tokens = np.zeros((2, 4), "uint8")
    frame = TensorFrame("uint8", tokens.shape, tokens.data.cast("B"))
    return Microbatch(frame, frame)


@pytest.mark.parametrize("bad", [lambda body: None, signed(B), signed(A, stage=1)])
async def test_whoever_does_not_sign_is_passed_by(autojump_clock: MockClock, bad: Any) -> None:
    stages = Stages({A.peer_id: bad, B.peer_id: signed(B)})
    made = pipeline(stages, lambda seq: admitted(1), A, B)
    for _ in range(4):
        (holding,) = await made.train(3, 7, load())
        assert holding.peer == B.peer_id.text
        assert holding.receipt == signed(B)(StageBackward(MARK, 0, 3, 7))


async def test_who_follows_another_conductor_is_asked_again_soon_with_the_newest_grant(
    autojump_clock: MockClock,
) -> None:
    """A change of conductor costs moments, not the rest that failures bring."""

    def until_the_second_term(body: StageBackward) -> Any:
        if body.grant is not None and body.grant.term == 2:
            return signed(A)(body)
        return Overloaded("the grant is not of a conductor that this peer follows", 0.3)

    stages = Stages({A.peer_id: until_the_second_term})
    made = pipeline(stages, lambda seq: admitted(1 if trio.current_time() < began + 2.0 else 2), A)
    began = trio.current_time()
    (holding,) = await made.train(3, 7, load())
    assert holding.peer == A.peer_id.text
    assert trio.current_time() - began < 2.5
    assert [shown.term for _, _, shown in stages.asked if shown is not None] == [1] * 7 + [2]
    assert len(stages.asked) == made.retries + 1
