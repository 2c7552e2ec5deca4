"""Training by a swarm gives the parameters that one plain torch process gives on the same batches.

2 stages x 2 peers and 2 trainers, 10 global steps, lossless; then again with a stage peer that dies in the middle of a
step, the conductor or another. With lossy codes on the boundaries and between stage-mates it comes near, and
stage-mates still agree bit for bit. In virtual time, and one case over TCP.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.messages.swarm import Mb
from peerd.model.stage import offload
from peerd.model.stage.partition import ModelPiece, whole_model
from peerd.model.stage.served_stage import ServedStage
from peerd.model.stage.stage_module import StageModule
from peerd.pipeline import direct
from peerd.run.runfile import AveragingSection, BoundarySection, RunFile
from tests.kit.amount import few, thorough
from tests.kit.exact import TOLERANCE, Batches, differences, plain_torch, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.machines.in_turn import InTurn
from tests.worlds.roles.training import all_finished, pipeline, reaches, swarm


async def train(
    directory: Path, run: RunFile, victim: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[StageModule], int]:
    """Ten steps; the `victim` dies when it holds part of step 4 or a later one.

    Returns the living stages, and the number of microbatches that the death made the trainers compute again.
    Where one is to die each peer gets its turn: a step takes so little here that which peer is quicker is chance.
    """
    if victim != "nobody":
        monkeypatch.setattr(direct, "CheapestRoute", lambda rng: InTurn())
    async with swarm(directory) as s:
        stages, trainers = await pipeline(s, run, 4, trainers=2)
        if victim != "nobody":
            await reaches(s, stages[0], 1)
            conducts = victim == "conductor"
            may_die = [peer for peer in stages if peer.role._services.conducting.acting == conducts]
            stages.remove(await killed_mid_step(may_die, monkeypatch))
        await all_finished(s, trainers)
        counts = [trainer.role.status()["microbatches"] for trainer in trainers]
        assert [count["lost"] for count in counts] == [0, 0]
        again = sum(count["redone"] + count["requeued"] for count in counts)
        return [peer.role.post.served.module for peer in stages], again


async def killed_mid_step(peers: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cut off the first of the peers that holds three microbatches of step 4 or 5, or one of a later step; returns it.

    Trainers have the answers to two of the three by then, and count on the peer to hold them.
    """
    holds = trio.Event()
    token = trio.lowlevel.current_trio_token()
    original = ServedStage.backward
    found: list[Any] = []

    def backward(self: ServedStage, step: int, mb: Mb, tensors: Any, frames: Any, *more: Any) -> Any:
        outcome = original(self, step, mb, tensors, frames, *more)
        if not found and step >= 4 and len(self.held) >= (3 if step < 6 else 1):
            found.extend(peer for peer in peers if peer.role.post.state.model is self)
            if found:
                token.run_sync_soon(holds.set)
        return outcome

    monkeypatch.setattr(ServedStage, "backward", backward)
    with trio.fail_after(200):
        await holds.wait()
    assert found[0].role.post.state.model.held
    found[0].kill()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "optimizer", "dtype"),
    few(
        itertools.product(("nobody", "member", "conductor"), ("sgd", "adamw"), ("float32", "float64")),
        ("nobody", "adamw", "float32"),
        ("conductor", "adamw", "float64"),
    ),
)
async def test_a_swarm_trains_exactly_like_one_process(
    tmp_path: Path,
    autojump_clock: MockClock,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    dtype: str,
    victim: str,
) -> None:
    run = run_file(optimizer, dtype, write_texts(tmp_path))
    again = await trains_exactly(tmp_path / "peers", run, victim, batches, monkeypatch)
    assert (again > 0) == (victim != "nobody")


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.no_watchdog("seven peers and the threads of their workers share one interpreter")
async def test_a_swarm_whose_conductor_dies_trains_exactly_like_one_process_over_tcp(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path))
    await trains_exactly(tmp_path / "peers", run, "conductor", batches, monkeypatch)


@pytest.mark.slow
async def test_stages_with_parameters_in_the_machines_memory_train_exactly(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, as if it had memory of its own."""
    monkeypatch.setattr(offload, "has_own_memory", lambda device: True)
    run = run_file("adamw", "float64", write_texts(tmp_path))
    run = changed(run, limits={"offload": True})
    passes: list[ModelPiece] = []
    forward = ModelPiece.forward
    monkeypatch.setattr(ModelPiece, "forward", lambda piece, x: passes.append(piece) or forward(piece, x))
    assert await trains_exactly(tmp_path / "peers", run, "member", batches, monkeypatch) > 0
    assert sum(piece.offload is not None for piece in passes) >= 80


async def trains_exactly(
    directory: Path, run: RunFile, victim: str, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> int:
    modules, again = await train(directory, run, victim, monkeypatch)
    assert batches.faults(per_step=8) == []
    assert differences(run, plain_torch(run, batches), modules) == []
    return again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("boundary", "averaging", "near"),
    [
        thorough(
            BoundarySection(code="none", lossless="always"), AveragingSection(), TOLERANCE["float32"], id="packed"
        ),
        pytest.param(
            BoundarySection(code="dynamic8", lossless="always"), AveragingSection(code="int8"), 0.05, id="8 bits"
        ),
        thorough(BoundarySection(code="auto"), AveragingSection(code="nf4"), 0.15, id="auto and 4 bits"),
    ],
)
async def test_coded_training_stays_near_and_stage_mates_stay_equal(
    tmp_path: Path,
    autojump_clock: MockClock,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    boundary: BoundarySection,
    averaging: AveragingSection,
    near: float,
) -> None:
    run = run_file("sgd", "float32", write_texts(tmp_path))
    run = changed(run, pipeline={"boundary": boundary}, averaging=averaging)
    modules, _ = await train(tmp_path / "peers", run, "nobody", monkeypatch)
    assert batches.faults(per_step=8) == []
    start = {name: value.detach().clone() for name, value in whole_model(run).named_parameters()}
    model = dict(plain_torch(run, batches).named_parameters())
    away = moved = 0.0
    for module in modules:
        for name, value in module.state().items():
            if name.startswith("param/"):
                exact = model[name.removeprefix("param/")].detach()
                away += float((value - exact).double().square().sum())
                moved += float((exact - start[name.removeprefix("param/")]).double().square().sum())
    assert (away / moved) ** 0.5 <= near
    assert len({module.digest() for module in modules}) == 2  # one for each stage
