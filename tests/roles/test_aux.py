"""Role `aux`: takes over summing from peers with slow lines, changes no bit, and is done without when it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from peerd.core.run.runfile import RunFile
from roles.aggregator import AuxRole
from roles.backbone import BackboneRole
from roles.trainer import TrainerRole
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.kit.training import Peer, Swarm, events, swarm, with_line

pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.no_watchdog("several peers and the threads of their workers share one interpreter"),
]


async def within_a_minute(s: Swarm, what: trio.Event) -> None:
    with trio.move_on_after(200) as limit:
        await what.wait()
    assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))


async def started(s: Swarm, run: RunFile) -> tuple[Peer, list[Peer]]:
    await s.start("backbone", BackboneRole, None)
    aux = await s.start("aux", AuxRole, with_line(run, 1000.0))
    replicas = [await s.start(f"replica{i}", TrainerRole, with_line(run, 10.0)) for i in range(3)]
    return aux, replicas


async def test_a_helper_sums_for_replicas_with_slow_lines_and_changes_no_bit(tmp_path: Path, batches: Batches) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=1)
    async with swarm(tmp_path / "peers") as s:
        aux, replicas = await started(s, run)
        for peer in replicas:
            await within_a_minute(s, peer.finished)
        status = aux.role.status()
        modules = [peer.role.replica.post.served.module for peer in replicas]
    assert batches.faults(per_step=8) == []
    assert status["averaging"]["rounds"] > 0, status
    plain = await trio.to_thread.run_sync(plain_torch, run, batches)
    done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


@pytest.mark.thorough
async def test_a_helper_that_vanishes_is_done_without(tmp_path: Path, batches: Batches) -> None:
    run = run_file("sgd", "float64", write_texts(tmp_path), stages=1)
    async with swarm(tmp_path / "peers") as s:
        aux, replicas = await started(s, run)
        with trio.move_on_after(60):
            while not aux.role.status()["averaging"]["rounds"]:
                await replicas[0].role.replica.moved()
        aux.kill()
        for peer in replicas:
            await within_a_minute(s, peer.finished)
    assert batches.faults(per_step=8) == []
