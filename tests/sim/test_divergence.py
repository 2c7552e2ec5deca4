"""A run whose numbers leave their range says so and goes back to its newest checkpoint, once; liars are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peerd.core.errors import ConfigError
from peerd.model import optimizer
from peerd.model.stage.served_stage import ServedStage
from peerd.model.stage.stage_module import ResultNotFinite
from peerd.run.runfile import CheckpointSection, OptimizerSection, RunFile
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.machines.fakehost import leaves
from tests.worlds.roles.training import Peer, Swarm, all_finished, events, pipeline, reaches, replicas, swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]
BAD_STEP, SAVED = 5, 4  # the update after it is much too large; the checkpoint before it


def diverging_run(folder: Path, stages: int) -> RunFile:
    run = run_file("sgd", "float32", write_texts(folder), stages=stages)
    return msgspec.structs.replace(run, checkpoint=CheckpointSection(every_steps=2))


def spoil_updates(monkeypatch: pytest.MonkeyPatch, rate: float, times: int) -> None:
    """Give the update of BAD_STEP this learning rate, `times` times in all."""
    left, usual = [times], optimizer.learning_rate

    def learning_rate(section: OptimizerSection, step: int) -> float:
        if step != BAD_STEP or not left[0]:
            return usual(section, step)
        left[0] -= 1
        return rate

    monkeypatch.setattr(optimizer, "learning_rate", learning_rate)


def told(peers: list[Peer], name: str) -> list[dict[str, Any]]:
    return [event for peer in peers for event in peer.log.recent(400) if event["name"] == name]


def notes(peers: list[Peer], level: str = "warn") -> list[str]:
    return [str(e["note"]) for e in told(peers, "conductor.noted") if e["level"] == level]


async def finish(s: Swarm, trainers: list[Peer]) -> float:
    began = trio.current_time()
    await all_finished(s, trainers, within_s=300)
    return trio.current_time() - began


@pytest.mark.parametrize("stages", [1, 2])
async def test_parameters_that_overflow_are_the_first_thing_said_and_the_newest_checkpoint_is_returned_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    run = diverging_run(tmp_path, stages)
    spoil_updates(monkeypatch, float("inf"), times=2 if stages == 1 else 4)
    async with swarm(tmp_path / "peers") as s:
        if stages == 1:
            peers = trainers = await replicas(s, run, 2)
        else:
            peers, trainers = await pipeline(s, run, 4)
        took_s = await finish(s, trainers)
        said = told(peers, "run.diverged")
        warned = notes(peers)
        modules = [p.role.replica.post.served.module if stages == 1 else p.role.post.served.module for p in peers]
    print("took", took_s)
    assert len(said) == len(peers)
    assert all(e["step"] == BAD_STEP + 1 and f"goes back to step {SAVED}" in str(e["reason"]) for e in said)
    assert any(f"goes back from step {BAD_STEP + 1} to step {SAVED}" in note for note in warned), warned
    assert max(module.step for module in modules) == STEPS
    assert all(module.is_finite() for module in modules)


async def test_parameters_that_are_finite_and_useless_make_the_swarm_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = diverging_run(tmp_path, 2)
    spoil_updates(monkeypatch, 1e36, times=4)
    async with swarm(tmp_path / "peers") as s:
        peers, trainers = await pipeline(s, run, 4)
        took_s = await finish(s, trainers)
        warned = notes(peers)
        modules = [p.role.post.served.module for p in peers]
    print("took", took_s)
    assert any(f"no microbatch of step {BAD_STEP + 1} has a finite gradient: the swarm goes back" in n for n in warned)
    assert any(f"goes back from step {BAD_STEP + 1} to step {SAVED}" in note for note in warned), warned
    assert [module.step for module in modules] == [STEPS] * 4
    assert all(float(module._flat.abs().max()) < 1e3 for module in modules)


async def test_a_run_that_diverges_again_stops_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = diverging_run(tmp_path, 2)
    spoil_updates(monkeypatch, 1e36, times=100)
    async with swarm(tmp_path / "peers") as s:
        peers, trainers = await pipeline(s, run, 4)
        with trio.move_on_after(300) as limit:
            while "again" not in (trainers[0].role.status()["waits_for"] or ""):
                await trainers[0].role._contributor._heard.wait()
        assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))
        waits = trainers[0].role.status()["waits_for"]
        steps = [p.role.post.step for p in peers]
        warned = notes(peers)
    assert "diverged" in waits
    assert "lower optimizer.lr" in waits
    assert steps == [BAD_STEP + 1] * 4
    assert sum("goes back from step" in note for note in warned) == 1


async def test_a_peer_whose_parameters_overflow_again_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = diverging_run(tmp_path, 1)
    spoil_updates(monkeypatch, float("inf"), times=100)
    with pytest.raises(BaseExceptionGroup) as failed:
        async with swarm(tmp_path / "peers") as s:
            await finish(s, await replicas(s, run, 1))
    (error, *_) = leaves(failed.value)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "the run has diverged: parameters of stage 0 are not finite after step 6, again; lower"
    )


def makes_a_liar(monkeypatch: pytest.MonkeyPatch, served: Any, method: str) -> None:
    """Have a stage peer call everything not finite."""

    def lies(*args: Any, **more: Any) -> Any:
        raise ResultNotFinite("the output for this microbatch has values that are not finite")

    monkeypatch.setattr(served, method, lies)


@pytest.mark.parametrize("method", ["forward", "backward"])
async def test_a_peer_that_lies_is_named_and_the_run_goes_on_exactly_without_it(
    tmp_path: Path,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=2)
    async with swarm(tmp_path / "peers") as s:
        peers, trainers = await pipeline(s, run, 4)
        for peer in peers:
            await peer.ready.wait()
        liar = peers[2]
        makes_a_liar(monkeypatch, liar.role.post.served, method)
        await finish(s, trainers)
        counts = trainers[0].role.status()["microbatches"]
        modules = [peer.role.post.served.module for peer in peers]
        warned = notes(peers)
    assert counts["not_finite"] == 0
    assert not any("goes back" in note for note in warned)
    named = [r.getMessage() for r in caplog.records if "reported a microbatch as not finite" in r.getMessage()]
    assert named
    assert all(liar.host.id.text[-8:] in text for text in named)
    assert batches.faults(per_step=8) == []
    assert differences(run, plain_torch(run, batches), modules) == []


async def test_a_lone_peer_that_lies_drops_a_bounded_number_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lies about seven of eight microbatches: so the run has not diverged."""
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=2)
    backward, calls = ServedStage.backward, [0]

    def lies(served: ServedStage, *args: Any, **more: Any) -> Any:
        if served.module.stage == 0:
            return backward(served, *args, **more)
        calls[0] += 1
        if calls[0] % 8 == 1:
            return backward(served, *args, **more)
        raise ResultNotFinite("the gradient of this microbatch has values that are not finite")

    async with swarm(tmp_path / "peers") as s:
        peers, trainers = await pipeline(s, run, 2)
        for peer in peers:
            await peer.ready.wait()
        monkeypatch.setattr(ServedStage, "backward", lies)
        with trio.move_on_after(60):
            await reaches(s, peers[0], 1, within_s=1000)
        drops = told(trainers, "microbatch.dropped")
        waits = trainers[0].role.status()["waits_for"] or ""
    by_step: dict[int, int] = {}
    for event in drops:
        by_step[event["step"]] = by_step.get(event["step"], 0) + 1
    assert by_step
    assert max(by_step.values()) <= 8
    assert any("alone reports over 8 microbatches as not finite" in r.getMessage() for r in caplog.records), waits
