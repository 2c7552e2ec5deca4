"""A run of a model of one's own with batch norm: a replica that joins late ends with the same running statistics."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.run.runfile import (
    BatchSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from roles.trainer import TrainerRole
from tests.kit.exact import write_texts
from tests.kit.normed import write_normed
from tests.worlds.roles.training import Peer, all_finished, reaches, replicas, swarm

STEPS, LATE = 40, 5

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


@pytest.mark.thorough
async def test_replicas_with_batch_norm_agree_also_with_one_that_joins_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path)
    run = RunFile(
        run="normed",
        model=ModelSection(kind=write_normed(tmp_path), d_model=64, context=64),
        pipeline=PipelineSection(stages=1, microbatch=8),
        optimizer=OptimizerSection(name="adamw", lr=1e-3, total_steps=STEPS),
        batch=BatchSection(target_samples=256),
        data=DataSection(path=str(texts), holdout=0.2, shuffle_buffer=64),
        evaluate=EvaluateSection(every_steps=STEPS, samples=16),
    )
    monkeypatch.chdir(tmp_path)
    late: list[Peer] = []
    as_usual = TrainerRole.in_flight

    trainers: dict[TrainerRole, None] = {}

    def in_flight(self: TrainerRole) -> int:
        """Nothing until the start was evaluated, for training goes first; and nothing for a while, where the late one
        would find the run at its end.
        """
        trainers[self] = None
        if not any(one.status()["evaluations"] for one in trainers):
            return 0
        arrived = any(peer.role.replica is not None and peer.role.replica.step for peer in late)
        return as_usual(self) if arrived or self.replica is None or self.replica.step <= LATE else 0

    monkeypatch.setattr(TrainerRole, "in_flight", in_flight)
    async with swarm(tmp_path / "peers") as s:
        peers = await replicas(s, run, 2)
        await reaches(s, peers[0], LATE)
        late.append(await s.start("late", TrainerRole, run))
        peers += late
        await all_finished(s, peers)
        modules = [peer.role.replica.post.served.module for peer in peers]
    done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
    assert modules[2].step > LATE
    assert len(done) > 1
    views = [module.state_views() for module in done]
    assert {name for one in views for name, tensor in one.items() if not (tensor == views[0][name]).all()} == set()
    live = [module.buffers.copies() for module in done]
    assert all((tensor == live[0][name]).all() for one in live for name, tensor in one.items())
    assert 20 < float(live[0]["layer1.norm.running_mean"].mean()) < 60, "the embedding's, not the fresh zeros"
    judged = {entry["step"]: entry["loss"] for peer in peers for entry in peer.role.status()["evaluations"]}
    print("loss of held-out text by running statistics, by step:", judged)
    assert judged[STEPS] < 7 < judged[0], "at the start they are far off"
