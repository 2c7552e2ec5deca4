"""Replicas that average in low rank: the same bits on all, a loss near that of whole gradients, newcomers, a helper."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from peerd.codec.tensors import state_digest
from peerd.messages.swarm import Position
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import AveragingSection, CheckpointSection, OptimizerSection, RunFile
from roles.aggregator import AuxAggregatorRole
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.exact import Batches, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.roles.training import all_finished, reaches, replicas, swarm, with_line

STEPS = 24
STEPS_FOR_A_NEWCOMER = 120  # a step takes milliseconds, and whoever joins a second or two
LOW_RANK = AveragingSection(code="powersgd", rank=2)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


def run_with(averaging: AveragingSection, text: Path, steps: int = STEPS) -> RunFile:
    run = run_file("adamw", "float32", text, stages=1)
    optimizer = OptimizerSection(name="adamw", lr=5e-3, total_steps=steps)
    return msgspec.structs.replace(run, averaging=averaging, optimizer=optimizer)


def write_sentences(folder: Path) -> Path:
    """Text of few words: what comes next is soon guessed. Returns the pattern that names the files."""
    rng = random.Random(4)
    words = ("the", "peer", "that", "sums", "a", "gradient", "for", "all", "others", "waits", "until", "it", "came")
    for i in range(20):
        (folder / f"text{i}.txt").write_text(" ".join(rng.choice(words) for _ in range(800)))
    return folder / "*.txt"


def loss_of(module: StageModule, text: Path) -> float:
    tokens = torch.from_numpy(np.frombuffer(text.read_bytes(), np.uint8)[: 16 * 33].astype("int64").reshape(16, 33))
    return module.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@pytest.mark.thorough
async def test_replicas_agree_and_learn_as_with_whole_gradients(tmp_path: Path, batches: Batches) -> None:
    texts = write_sentences(tmp_path)
    ends: dict[str, float] = {}
    for averaging in (AveragingSection(), LOW_RANK):
        batches.digests.clear()
        run = run_with(averaging, texts)
        async with swarm(tmp_path / averaging.code) as s:
            peers = await replicas(s, run, 3)
            await all_finished(s, peers)
            modules = [peer.role.replica.post.served.module for peer in peers]
        assert [place for place, found in batches.digests.items() if len(found) != 1] == []
        assert len(batches.digests) == STEPS
        done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
        ends[averaging.code] = loss_of(done[0], tmp_path / "text0.txt")
        start = loss_of(StageModule(run, 0), tmp_path / "text0.txt")
    fallen = {code: start - loss for code, loss in ends.items()}
    assert fallen["none"] > 1.5, (start, ends)
    assert fallen["powersgd"] > 0.8 * fallen["none"], (start, ends)
    before = StageModule(run_with(LOW_RANK, texts), 0).low_rank
    assert before is not None
    for name, q in before.state().items():
        assert not torch.equal(q, done[0].low_rank.state()[name]), f"{name} is as it was at the start"


@pytest.mark.parametrize("delayed", [thorough(False, id="at once"), pytest.param(True, id="delayed")])
@pytest.mark.thorough
async def test_survivors_and_a_newcomer_have_the_same_bits(tmp_path: Path, batches: Batches, delayed: bool) -> None:
    """Parameters, moments and Q: `StageModule.digest` is of them all."""
    run = run_with(LOW_RANK, write_texts(tmp_path), STEPS_FOR_A_NEWCOMER)
    run = changed(run, optimizer={"delayed": delayed})
    async with swarm(tmp_path / "peers") as s:
        peers = await replicas(s, run, 3)
        await reaches(s, peers[0], 4)
        peers[1].kill()
        await reaches(s, peers[0], peers[0].role.replica.position.step + 2)
        new = await s.start("newcomer", TrainerRole, run)
        await all_finished(s, [peers[0], peers[2], new])
        downloads = [event for event in new.log.recent(1000) if event["name"] == "stage.downloaded"]
        modules = [peer.role.replica.post.served.module for peer in (peers[0], peers[2], new)]
    assert [place for place, found in batches.digests.items() if len(found) != 1] == []
    assert len(batches.digests) == STEPS_FOR_A_NEWCOMER
    assert downloads
    assert 0 < downloads[0]["step"] < STEPS_FOR_A_NEWCOMER
    assert any(module.step == STEPS_FOR_A_NEWCOMER for module in modules)


@pytest.mark.thorough
async def test_a_helper_takes_part_in_both_sums_and_changes_no_bit(tmp_path: Path, batches: Batches) -> None:
    run = run_with(LOW_RANK, write_texts(tmp_path))
    async with swarm(tmp_path / "peers") as s:
        peers = await replicas(s, with_line(run, 10.0), 3)
        aux = await s.start("aux", AuxAggregatorRole, with_line(run, 1000.0))
        await all_finished(s, peers)
        status = aux.role.status()
        code = peers[0].role.replica.post.state.model.low_rank
        positions = [peer.role.replica.position for peer in peers]
    assert [place for place, found in batches.digests.items() if len(found) != 1] == []
    assert all(isinstance(position, Position) for position in positions)
    rounds = status["averaging"]["rounds"] / 2
    assert rounds > 0, status
    first, second = code.elements
    whole = 4 * 3 * (first + second)  # bytes, when all of three senders' vectors are summed by the helper
    assert rounds * 0.5 * whole < status["aggregated_bytes"] <= rounds * whole * 1.01, status


@pytest.mark.thorough
async def test_a_swarm_goes_on_from_its_checkpoints_with_the_q_of_that_step(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(LOW_RANK, write_texts(tmp_path))
    run = msgspec.structs.replace(run, checkpoint=CheckpointSection(every_steps=3, keep=2))
    loaded: dict[int, set[bytes]] = {}  # by step
    original = StageModule.load_state

    def load_state(module: StageModule, state: Mapping[str, torch.Tensor]) -> None:
        kept = {name: tensor for name, tensor in state.items() if name.startswith("powersgd/")}
        loaded.setdefault(int(state["step"]), set()).add(state_digest(kept))
        original(module, state)

    monkeypatch.setattr(StageModule, "load_state", load_state)
    for stop_at in (7, 12):
        batches.digests.clear()  # what was not saved is done again, on other samples
        loaded.clear()
        async with swarm(tmp_path / "peers") as s:
            peers = await replicas(s, run, 2)
            for peer in peers:
                await reaches(s, peer, stop_at)
        assert [place for place, found in batches.digests.items() if len(found) != 1] == []
    assert min(step for _, step in batches.digests) >= 3
    start = StageModule(run, 0).low_rank
    assert start is not None
    assert any(step >= 3 and step % 3 == 0 for step in loaded)
    assert all(len(found) == 1 and found != {state_digest(start.state())} for found in loaded.values())
