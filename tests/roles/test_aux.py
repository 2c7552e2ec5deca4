"""Role `aux`: takes over summing from peers with slow lines, changes no bit, and is done without when it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from peerd.run.runfile import RunFile
from roles.aggregator import AuxAggregatorRole
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.roles.training import Peer, Swarm, all_finished, replicas, swarm, with_line

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


async def started(s: Swarm, run: RunFile) -> tuple[Peer, list[Peer]]:
    peers = await replicas(s, with_line(run, 10.0), 3)
    return await s.start("aux", AuxAggregatorRole, with_line(run, 1000.0)), peers


async def test_a_helper_sums_for_replicas_with_slow_lines_and_changes_no_bit(tmp_path: Path, batches: Batches) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=1)
    async with swarm(tmp_path / "peers") as s:
        aux, peers = await started(s, run)
        await all_finished(s, peers)
        status = aux.role.status()
        modules = [peer.role.replica.post.served.module for peer in peers]
    assert batches.faults(per_step=8) == []
    assert status["averaging"]["rounds"] > 0, status
    plain = plain_torch(run, batches)
    done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


@pytest.mark.thorough
async def test_a_helper_that_vanishes_is_done_without(tmp_path: Path, batches: Batches) -> None:
    run = run_file("sgd", "float64", write_texts(tmp_path), stages=1)
    async with swarm(tmp_path / "peers") as s:
        aux, peers = await started(s, run)
        with trio.fail_after(60):
            while not aux.role.status()["averaging"]["rounds"]:
                await peers[0].role.replica.moved()
        assert peers[0].role.replica.position.step < STEPS
        aux.kill()
        await all_finished(s, peers)
    assert batches.faults(per_step=8) == []
