"""Nine replicas that average in groups of three train as one process does, also when one dies in either round.

In virtual time, with the trainer's role.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peerd.averaging.allreduce import AllReduceService
from peerd.averaging.allreduce_round import AveragingPlan
from peerd.codec.frames import from_frame
from peerd.messages.swarm import Mb
from peerd.model.stage.stage_module import StageModule
from peerd.pipeline import direct
from peerd.rpc.call_stream import CallStream
from peerd.run.runfile import AveragingSection, BatchSection, RunFile
from peerd.swarm.batch.batch_ledger import Counted
from roles.stage import StageRole
from tests.kit.amount import thorough
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.machines.in_turn import InTurn
from tests.worlds.roles.training import Peer, Swarm, all_finished, pipeline, reaches, replicas, swarm

PEERS = 9

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


def post_of(peer: Peer) -> Any:
    return peer.role.post if isinstance(peer.role, StageRole) else peer.role.replica.post


class Sums:
    """Every round that a peer of this process makes, its bytes, and who is to die as one begins.

    What a peer brought that died is counted where the conductor counts it: nobody else has it in its books.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: Batches) -> None:
        self.groups = Counter[tuple[int, int]]()  # peers of a group, and how many make the same sum
        self.made = list[tuple[int, str, AveragingPlan]]()  # at which step, by whom, in the order of their beginnings
        self.died_after = 0  # so many of these
        self.sent_bytes = Counter[bytes]()  # of parts, by attempt; as many bytes of sums come back
        self.peers: dict[str, Peer] = {}
        self.kill_in: int | None = None  # this round of a grid, from 0,
        self.kill_after = 0  # once so many have begun it
        self.killed: list[Peer] = []
        self.somebody_died = trio.Event()
        self._batches, self._brought = batches, dict[tuple[int, Mb], Any]()
        original = AllReduceService.sum

        async def sum_(averaging: AllReduceService, plan: AveragingPlan, *rest: Any) -> Any:
            self.groups[len(plan.group), plan.copies] += 1
            step = post_of(self.peers[averaging._own]).served.module.step if self.peers else 0
            self.made.append((step, averaging._own, plan))
            self._perhaps_kill(averaging._own, plan)
            return await original(averaging, plan, *rest)

        monkeypatch.setattr(AllReduceService, "sum", sum_)
        self._count_bytes(monkeypatch)
        self._count_dead(monkeypatch)

    def _perhaps_kill(self, own: str, plan: AveragingPlan) -> None:
        if self.kill_in != (plan.copies > 1) or self.killed:
            return
        self.kill_after -= 1
        peer = self.peers[own]
        if self.kill_after <= 0 and not post_of(peer)._services.conducting.acting:
            self.killed.append(peer)
            served = post_of(peer).served
            if served.module.first and served.module.last:
                self._brought |= {(served.module.step, mb): kept.frames for mb, kept in served._held.items()}
            self.died_after = len(self.made)
            peer.kill()
            self.somebody_died.set()

    def _count_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = CallStream.send

        async def send(stream: CallStream, body: Any, frames: Any = ()) -> None:
            self.sent_bytes[body.attempt] += sum(len(frame.payload) for frame in frames)
            await original(stream, body, frames)

        monkeypatch.setattr(CallStream, "send", send)

    def of_step_with_death(self) -> tuple[AveragingPlan, list[AveragingPlan], list[AveragingPlan]]:
        """The round in which one died; the others of its step that had begun before, and that began later."""
        step, _, fatal = self.made[self.died_after - 1]
        before = {plan.attempt: plan for at, _, plan in self.made[: self.died_after] if at == step}
        after = {plan.attempt: plan for at, _, plan in self.made[self.died_after :] if at == step}
        del before[fatal.attempt]
        return fatal, [*before.values()], [plan for name, plan in after.items() if name not in {*before, fatal.attempt}]

    def _count_dead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = Counted.add

        def add(counted: Counted, step: int, batch: Any) -> None:
            for (at, mb), (tokens, targets) in self._brought.items():
                if at == step and mb.seq in batch.get(mb.trainer, ()):
                    self._batches.inputs.setdefault(step, {})[mb] = from_frame(tokens).long()
                    self._batches.targets.setdefault(step, {})[mb] = from_frame(targets).long()
            original(counted, step, batch)

        monkeypatch.setattr(Counted, "add", add)


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
    run, sums = grid_run(tmp_path, dtype), Sums(monkeypatch, batches)
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
    run, sums = grid_run(tmp_path, "float32", code), Sums(monkeypatch, batches)
    async with swarm(tmp_path / "peers") as s:
        peers = await started(s, run, sums)
        await all_finished(s, peers)
    assert sums.groups[3, 3] >= PEERS * (STEPS - 2)
    assert len(batches.digests) == STEPS
    assert batches.faults(per_step=9) == []


async def survived(tmp_path: Path, run: RunFile, sums: Sums) -> list[StageModule]:
    """The models of those that are left once one was killed and the others have made all steps."""
    async with swarm(tmp_path / "peers") as s:
        peers = await started(s, run, sums)
        with trio.fail_after(200):
            await sums.somebody_died.wait()
        living = [peer for peer in peers if peer not in sums.killed]
        await all_finished(s, living)
        modules = [peer.role.replica.post.served.module for peer in living]
    assert len(sums.killed) == 1
    assert len(modules) == PEERS - 1
    return modules


def check_exact(run: RunFile, batches: Batches, modules: list[StageModule]) -> None:
    assert batches.faults(per_step=9) == []
    plain = plain_torch(run, batches)
    done = [module for module in modules if module.step == STEPS]
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


@pytest.mark.thorough
async def test_a_replica_that_dies_in_the_second_round_costs_no_sum_of_the_first(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had brought counts, and its mates of the second round get a copy of what other groups have."""
    run, sums = grid_run(tmp_path, "float64"), Sums(monkeypatch, batches)
    sums.kill_in, sums.kill_after = 1, 3 * PEERS + 2  # some have begun the second round of a step, others have yet to
    modules = await survived(tmp_path, run, sums)
    check_exact(run, batches, modules)
    fatal, _, later = sums.of_step_with_death()
    again = [plan for plan in later if plan.copies == 1]
    (copy,) = again
    assert set(copy.listeners) == set(fatal.group) - {peer.host.id.text for peer in sums.killed}
    assert sums.sent_bytes[copy.attempt] <= sums.sent_bytes[fatal.attempt]


async def test_groups_keep_their_sums_when_another_one_loses_a_replica(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the group of the lost one is repeated, among the two that are left, and the step stays exact."""
    run, sums = grid_run(tmp_path, "float64"), Sums(monkeypatch, batches)
    sums.kill_in, sums.kill_after = 0, 3 * PEERS + 2
    modules = await survived(tmp_path, run, sums)
    check_exact(run, batches, modules)
    fatal, before, later = sums.of_step_with_death()
    (again,) = [plan for plan in later if plan.copies == 1 and {*plan.group} & {*fatal.group}]
    assert set(again.group) == set(fatal.group) - {peer.host.id.text for peer in sums.killed}
    firsts = [plan for plan in (*before, *later) if plan.copies == 1 and plan is not again]
    assert sorted(peer for plan in firsts for peer in plan.group) == sorted(sums.peers.keys() - {*fatal.group})
    whole = sums.sent_bytes[firsts[0].attempt]  # of a group of three
    assert 0 < sums.sent_bytes[again.attempt] <= whole


async def test_a_pipeline_repeats_the_group_of_a_lost_stage_peer_and_no_other(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of four peers, in groups of two; trainers do again what the lost one held, with its mates."""
    monkeypatch.setattr(direct, "CheapestRoute", lambda rng: InTurn())  # each peer gets its turn
    averaging, sums = AveragingSection(group_size=3), Sums(monkeypatch, batches)
    run = msgspec.structs.replace(run_file("adamw", "float64", write_texts(tmp_path)), averaging=averaging)
    async with swarm(tmp_path / "peers") as s:
        stages, trainers = await pipeline(s, run, 8, trainers=2)
        await reaches(s, stages[0], 2)
        sums.peers = {peer.host.id.text: peer for peer in stages}
        sums.kill_in, sums.kill_after = 0, 10
        with trio.fail_after(200):
            await sums.somebody_died.wait()
        await all_finished(s, trainers)
        modules = [post_of(peer).served.module for peer in stages if peer not in sums.killed]
    assert batches.faults(per_step=8) == []
    assert differences(run, plain_torch(run, batches), modules) == []
    fatal, before, later = sums.of_step_with_death()
    firsts = [plan for plan in (*before, *later) if plan.copies == 1 and len(plan.senders) == len(plan.group)]
    again = [plan for plan in firsts if {*plan.group} <= {*fatal.group}]
    assert [{*plan.group} for plan in again] == [{*fatal.group} - {peer.host.id.text for peer in sums.killed}]
    others = sorted(peer for plan in firsts if plan not in again for peer in plan.group)
    assert others == sorted({*others}), "somebody brought its gradient twice"
