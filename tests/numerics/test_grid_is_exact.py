"""Nine replicas that average in groups of three train as one process does, also when one dies in the second round.

In virtual time, with the trainer's role.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peerd.core.run.runfile import AveragingSection, BatchSection, RunFile
from peerd.machine.averaging.allreduce import AveragingPlan
from peerd.service.averaging.allreduce import Averaging
from tests.kit.amount import thorough
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.roles.training import Peer, Swarm, all_finished, replicas, swarm

PEERS = 9

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


class Sums:
    """Every round that a peer of this process makes, and what is to happen when one begins its second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = Counter[tuple[int, int]]()  # peers of a group, and how many make the same sum
        self.peers: dict[str, Peer] = {}
        self.kill_after: int | None = None  # so many second rounds
        self.killed: list[Peer] = []
        self.somebody_died = trio.Event()
        original = Averaging.sum

        async def sum_(averaging: Averaging, plan: AveragingPlan, *rest: Any) -> Any:
            self.groups[len(plan.group), plan.copies] += 1
            if plan.copies > 1 and self.kill_after is not None and not self.killed:
                self.kill_after -= 1
                peer = self.peers[averaging._own]
                if self.kill_after <= 0 and not peer.role.replica._services.conducting.acting:
                    self.killed.append(peer)
                    peer.kill()
                    self.somebody_died.set()
            return await original(averaging, plan, *rest)

        monkeypatch.setattr(Averaging, "sum", sum_)


def grid_run(folder: Path, dtype: str, code: Any = "none") -> RunFile:
    run = run_file("adamw", dtype, write_texts(folder), stages=1)
    averaging, batch = AveragingSection(group_size=3, code=code), BatchSection(target_samples=18)
    return msgspec.structs.replace(run, averaging=averaging, batch=batch)


async def started(s: Swarm, run: RunFile, sums: Sums) -> list[Peer]:
    peers = await replicas(s, run, PEERS)
    sums.peers = {peer.host.id.text: peer for peer in peers}
    return peers


@pytest.mark.parametrize("dtype", [thorough("float32"), "float64"])
async def test_nine_replicas_in_a_grid_train_like_one_process(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    run, sums = grid_run(tmp_path, dtype), Sums(monkeypatch)
    async with swarm(tmp_path / "peers") as s:
        peers = await started(s, run, sums)
        await all_finished(s, peers)
        modules = [peer.role.replica.post.served.module for peer in peers]
    assert sums.groups[3, 3] >= PEERS * (STEPS - 2)  # nine may not have been there for the first
    assert batches.faults(per_step=9) == []
    plain = plain_torch(run, batches)
    done = [module for module in modules if module.step == STEPS]
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


@pytest.mark.parametrize("code", ["int8", thorough("powersgd")])
@pytest.mark.thorough
async def test_replicas_in_a_grid_stay_equal_though_gradients_are_coded(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    run, sums = grid_run(tmp_path, "float32", code), Sums(monkeypatch)
    async with swarm(tmp_path / "peers") as s:
        peers = await started(s, run, sums)
        await all_finished(s, peers)
    assert sums.groups[3, 3] >= PEERS * (STEPS - 2)
    assert len(batches.digests) == STEPS
    assert batches.faults(per_step=9) == []


@pytest.mark.thorough
async def test_a_replica_that_dies_in_the_second_round_is_left_out_and_the_others_stay_equal(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sums = grid_run(tmp_path, "float64"), Sums(monkeypatch)
    sums.kill_after = 3 * PEERS + 2  # some have made their second round of that attempt, others have yet to
    async with swarm(tmp_path / "peers") as s:
        peers = await started(s, run, sums)
        with trio.fail_after(200):
            await sums.somebody_died.wait()
        living = [peer for peer in peers if peer not in sums.killed]
        await all_finished(s, living)
        modules = [peer.role.replica.post.served.module for peer in living]
    assert len(sums.killed) == 1
    assert len(modules) == PEERS - 1
    assert sums.groups[2, 2] + sums.groups[2, 4] > 0  # eight in groups of three at most: three rounds of two
    assert batches.faults(per_step=9) == []
    plain = plain_torch(run, batches)
    done = [module for module in modules if module.step == STEPS]
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []
