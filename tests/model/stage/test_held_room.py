"""Room for microbatches in a served stage: those of the trainer that has not called for longest give way."""

from __future__ import annotations

import torch

from peerd.codec.frames import to_frame
from peerd.core.limits import HELD_BATCHES
from peerd.messages.swarm import Mb
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import BatchSection, ModelSection, PipelineSection, RunFile

BATCH = 2


def call(served: ServedStage, trainer: str, seq: int) -> None:
    """As a call of `trainer`: room is made, then the microbatch is computed."""
    mb, tokens = Mb(trainer, seq), torch.zeros((1, 4), dtype=torch.int64)
    served.make_room(0, mb, [seq])
    served.backward(0, mb, (tokens, tokens), [to_frame(tokens)] * 2)


def test_a_newcomer_that_finds_no_room_gives_way_after_those_that_called_before_it() -> None:
    run = RunFile(
        run="room",
        model=ModelSection(d_model=4, heads=1, layers=1, context=4),
        pipeline=PipelineSection(microbatch=1),
        batch=BatchSection(target_samples=BATCH),
    )
    served, most = ServedStage(run, 0, "cpu"), HELD_BATCHES * BATCH
    for seq in range(most):
        call(served, f"t{seq % 4}", seq)
    call(served, "newcomer", 0)
    assert [mb.seq for mb in served.held if mb.trainer == "t0"] == [4]
    for seq, trainer in enumerate(("t0", "t1", "t2"), most):
        call(served, trainer, seq)
        assert len(served.held) == most
    assert Mb("newcomer", 0) in served.held
    call(served, "t3", most + 3)
    assert Mb("newcomer", 0) not in served.held
