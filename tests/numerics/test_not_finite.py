"""Samples for which a model has no finite output or gradient are dropped; the rest is trained as in plain torch.

Three stages of a model of one's own; the middle one is not finite for some samples, forward or backward. In virtual
time: what is dropped costs a fraction of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.run.runfile import ModelSection, RunFile
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.kit.runs import changed
from tests.kit.spoilt import SPOILT, spoil_texts, write_spoilt
from tests.worlds.roles.training import Peer, all_finished, events, pipeline, replicas, swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]
EVERY = 600  # bytes: about one sample in twenty is spoilt
LONGEST_S = 30.0  # of virtual time for all steps, which take 10 s without anything spoilt


def spoilt_run(folder: Path, how: str, stages: int, every: int = EVERY) -> RunFile:
    run = run_file("adamw", "float64", write_texts(folder), stages=stages)
    spoil_texts(folder, every)
    model = ModelSection(kind=write_spoilt(folder, how), d_model=16, context=32, dtype="float64")
    return changed(run, model=model)


def dropped(peers: list[Peer]) -> list[dict[str, Any]]:
    return [event for peer in peers for event in peer.log.recent(400) if event["name"] == "microbatch.dropped"]


def check_spoilt_samples_are_out(batches: Batches) -> None:
    for found in batches.inputs.values():
        assert not any((tokens == SPOILT).any() for tokens in found.values())


@pytest.mark.parametrize("mates", [1, 2])
@pytest.mark.parametrize("how", ["forward", "backward"])
async def test_what_is_not_finite_is_dropped_and_the_rest_is_trained_exactly(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch, how: str, mates: int
) -> None:
    run = spoilt_run(tmp_path, how, 3)
    monkeypatch.chdir(tmp_path)
    async with swarm(tmp_path / "peers") as s:
        peers, trainers = await pipeline(s, run, 3 * mates)
        began = trio.current_time()
        await all_finished(s, trainers, within_s=600)
        took_s = trio.current_time() - began
        gone = dropped(trainers)
        modules = [peer.role.post.served.module for peer in peers]
        counts = trainers[0].role.status()["microbatches"]
    print("dropped", len(gone), "took", took_s)
    assert gone, "nothing was spoilt"
    assert {event["stage"] for event in gone} == {1}
    assert all(len(event["by"]) == mates for event in gone)
    assert all("text" in sample for event in gone for sample in event["samples"])
    assert counts["not_finite"] == len(gone)
    assert counts["lost"] == 0
    check_spoilt_samples_are_out(batches)
    assert batches.faults(per_step=8) == [], "\n".join(events(peers))
    assert differences(run, plain_torch(run, batches), modules) == []
    assert took_s < LONGEST_S


@pytest.mark.parametrize("how", ["forward", "backward"])
async def test_replicas_drop_what_is_not_finite_and_train_the_rest_exactly(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = spoilt_run(tmp_path, how, 1)
    monkeypatch.chdir(tmp_path)
    async with swarm(tmp_path / "peers") as s:
        peers = await replicas(s, run, 2)
        began = trio.current_time()
        await all_finished(s, peers, within_s=600)
        took_s = trio.current_time() - began
        gone = dropped(peers)
        modules = [peer.role.replica.post.served.module for peer in peers]
    assert gone, "nothing was spoilt"
    assert {event["stage"] for event in gone} == {0}
    check_spoilt_samples_are_out(batches)
    assert batches.faults(per_step=8) == [], "\n".join(events(peers))
    done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
    assert done
    assert differences(run, plain_torch(run, batches), done[:1]) == []
    assert took_s < LONGEST_S
