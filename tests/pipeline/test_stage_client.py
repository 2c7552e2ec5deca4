"""A trainer's evaluations: the samples pass through all stages, and whoever answers wrongly is passed by."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import NotFiniteHere, Overloaded, Unreachable
from peerd.messages.proof import grant
from peerd.messages.swarm import GrantStatement, Seqs, StageAnswer
from peerd.pipeline.not_finite import MicrobatchNotFinite
from peerd.pipeline.stage_client import StageClient, TrainerCredentials
from peerd.pipeline.stage_peers import StagePeers
from peerd.rpc.rpc import Answer
from tests.worlds.machines.handing import (
    GRADIENT,
    MARK,
    OWN,
    RUN,
    SAMPLES,
    STAGES,
    STEP,
    TOKENS,
    TRAINER,
    WIDTH,
    Asked,
    Peers,
    Ways,
    frame,
    members,
)
from tests.worlds.simulation.clock import SimClock

MAY = grant(TRAINER.sign, GrantStatement(MARK, 1, STEP, OWN, Seqs()))
OUTPUT = GRADIENT  # has the same shape


class Evaluation:
    """A trainer that evaluates, and the stages' peers as it meets them."""

    def __init__(self, *names: str, **doing: Any) -> None:
        self.peers, stages = Peers(), StagePeers(STAGES, SimClock(1, "t"), Ways())
        self.peers.doing = dict.fromkeys(names, answered) | doing
        papers = TrainerCredentials(OWN, lambda seq: None, TRAINER.sign, lambda: MAY)
        self.client = StageClient(RUN, self.peers, stages, papers)  # type: ignore[arg-type]
        stages.update(members(*names))

    async def loss(self) -> float:
        return await self.client.evaluate(frame(SAMPLES, TOKENS), frame(SAMPLES, TOKENS))


def answered(asked: Asked) -> Any:
    if asked.method == "stage/6/loss":
        return Answer(StageAnswer(loss_sum=3.0))
    return Answer(StageAnswer(), (OUTPUT,))


async def test_samples_pass_through_all_stages_with_the_grant_to_evaluate(autojump_clock: MockClock) -> None:
    one = Evaluation("a0", "a1", "a2")
    assert await one.loss() == 3.0
    asked = [(each.name, each.method, each.body.stage, each.body.grant) for each in one.peers.asked]
    assert asked == [
        ("a0", "stage/6/forward", 0, MAY),
        ("a1", "stage/6/forward", 1, MAY),
        ("a2", "stage/6/loss", 2, MAY),
    ]
    assert [each.body.step for each in one.peers.asked[:2]] == [None, None]
    sizes = [sum(len(each.payload) for each in asked.frames) for asked in one.peers.asked]
    assert sizes == [4 * 8, 4 * 24, 4 * (24 + 8)]
    assert (one.client.sent_bytes, one.client.received_bytes, one.client.retries) == (sum(sizes), 4 * (24 + 24), 0)


def with_frames(*frames: TensorFrame) -> Any:
    return lambda asked: Answer(StageAnswer(loss_sum=9.0), frames)


@pytest.mark.parametrize(
    "bad",
    [
        lambda asked: Unreachable("gone"),
        lambda asked: Overloaded("full", 0.1),
        with_frames(),
        with_frames(OUTPUT, OUTPUT),
        with_frames(frame(SAMPLES, TOKENS, WIDTH + 1)),
        with_frames(frame(SAMPLES + 1, TOKENS, WIDTH)),
        with_frames(frame(SAMPLES, TOKENS, WIDTH, dtype="float64")),
    ],
)
async def test_another_peer_is_asked_where_one_gives_no_output_for_the_next_stage(
    autojump_clock: MockClock, bad: Any
) -> None:
    one = Evaluation("a0", "a1", "b1", "a2", a1=bad)
    for _ in range(4):
        assert await one.loss() == 3.0
    assert "b1" in one.peers.names
    assert one.client.retries >= one.peers.names.count("a1") >= 1


async def test_a_loss_with_tensors_is_refused(autojump_clock: MockClock) -> None:
    one = Evaluation("a0", "a1", "a2", "b2", a2=with_frames(OUTPUT))
    for _ in range(4):
        assert await one.loss() == 3.0
    assert "a2" in one.peers.names


def not_finite(asked: Asked) -> Any:
    return NotFiniteHere("the output is not finite")


async def test_another_peers_finite_output_counts_where_one_reports_none(autojump_clock: MockClock) -> None:
    one = Evaluation("a0", "a1", "b1", "a2", a1=not_finite)
    for _ in range(4):
        assert await one.loss() == 3.0
    assert {"a1", "b1"} <= {*one.peers.names}


@pytest.mark.parametrize("others", [(), ("b1",)])
async def test_samples_that_no_peer_computes_finitely_are_given_up(
    autojump_clock: MockClock, others: tuple[str, ...]
) -> None:
    doing = dict.fromkeys(("a1", *others), not_finite)
    one = Evaluation("a0", "a1", *others, "a2", **doing)
    with pytest.raises(MicrobatchNotFinite):
        await one.loss()
    assert {*one.peers.names} == {"a0", "a1", *others}
