"""Peers with role expert, in a simulated world: they share a grid, serve it, and what one learnt outlives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import ConfigError
from peerd.experts.calls.expert_client import ExpertClient
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.run.expert_network import ExpertCall, ExpertReply
from peerd.run.grid import Uid
from peerd.run.runfile import ExpertsSection, LimitsSection, ModelSection, RunFile
from peerd.status.swarm_view import swarm_view
from peerd.swarm import contributions
from roles.expert import ExpertRole
from tests.kit.runs import changed
from tests.worlds.roles.inline_worker import InlineWorker
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import NetConfig
from tests.worlds.simulation.world import Node, World, WorldConfig

PERIOD_S = 10.0
WIDTH = 8
GRID = [4, 4]
EVERY = [Uid(0, (row, column)) for row in range(4) for column in range(4)]


def run_with(**experts: object) -> RunFile:
    section = {"grid": GRID, "layers": 1, "hidden": 16, "announce_s": PERIOD_S, "checkpoint_updates": 2} | experts
    return RunFile(
        run="experts",
        seed=3,
        model=ModelSection(d_model=WIDTH, heads=2, layers=1, context=4),
        experts=msgspec.convert(section, ExpertsSection),
        limits=LimitsSection(experts=8),
    )


@dataclass
class Scene:
    """Hosts, and a peer that calls them."""

    world: World
    roles: Roles
    boot: Node
    client: ExpertClient

    async def start(self, *names: str, skew_s: float = 0.0) -> list[Node]:
        program = self.roles.program(ExpertRole)
        return [await self.world.start(name, program=program, skew_s=skew_s) for name in names]

    def owners(self) -> dict[Uid, list[str]]:
        found: dict[Uid, list[str]] = {}
        for name, role in sorted(self.roles.live.items()):
            for uid in role.host.experts:
                found.setdefault(uid, []).append(name)
        return found

    def versions(self) -> dict[Uid, int]:
        hosts = [role.host for role in self.roles.live.values()]
        return {uid: hosted.model.version for host in hosts for uid, hosted in host.experts.items()}

    async def all_hosted(self, within_s: float) -> None:
        full = lambda: sorted(self.owners()) == EVERY and {len(o) for o in self.owners().values()} == {1}  # noqa: E731
        assert await self.world.until(full, within_s=within_s), f"{self.owners()}\n{self.roles.story()}"
        await trio.sleep(1)  # what came last is announced, too

    async def forward(self, uids: list[Uid]) -> list[ExpertReply | None]:
        await self.client.choose(0, [np.zeros((1, 4), np.float32)] * 2, 16)
        return await self.client.forward([ask(uid) for uid in uids], 1)

    async def update(self, uids: list[Uid]) -> list[ExpertReply | None]:
        found = await self.forward(uids)
        asks = [
            ExpertCall(uid, (0,), (samples(), samples()), reply.served)
            for uid, reply in zip(uids, found, strict=True)
            if reply is not None
        ]
        return await self.client.backward(asks)


def samples() -> TensorFrame:
    values = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]
    return TensorFrame("float32", values.shape, values.tobytes())


def ask(uid: Uid) -> ExpertCall:
    return ExpertCall(uid, (0,), (samples(),))


@asynccontextmanager
async def scene(folder: Path, **experts: object) -> AsyncIterator[Scene]:
    with trio.fail_after(100_000):
        world = World(7, swarm(), WorldConfig(net=NetConfig()))
        async with world.running():
            roles = Roles(run_with(**experts), folder)
            boot = await world.start("boot")
            world.bootstrap.append(boot.full_addr)
            directory = ExpertDirectory(roles.run, boot.rpc, boot.host, boot.dht, boot.clock)
            yield Scene(world, roles, boot, ExpertClient(roles.run, boot.rpc, directory, boot.clock, InlineWorker()))


@pytest.mark.slow
async def test_hosts_share_the_grid_and_answer_for_all_of_it(tmp_path: Path, autojump_clock: object) -> None:
    async with scene(tmp_path) as s:
        await s.start("one", "two", "three")
        await s.all_hosted(within_s=6 * PERIOD_S)
        counted = Counter(owner for owners in s.owners().values() for owner in owners)
        assert len(counted) == 3
        assert all(await s.forward(EVERY))
        found = await s.update(EVERY)
        assert [reply.served.version for reply in found if reply is not None] == [1] * 16
        told = s.roles.live["one"].status()
        assert (told["hosted"], told["updates"], told["waits_for"]) == (counted["one"], counted["one"], None)
        await trio.sleep(2 * contributions.PERIOD_S)
        given = (await swarm_view(s.boot.dht, s.roles.run)).contributions
        assert sorted(row.updates or 0 for row in given) == sorted(counted.values())


@pytest.mark.slow
async def test_the_experts_of_a_host_that_was_killed_come_back_with_what_their_checkpoints_had(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        _, victim, _ = await s.start("one", "two", "three")
        await s.all_hosted(within_s=6 * PERIOD_S)
        for _ in range(4):
            assert all(await s.update(EVERY))
        await trio.sleep(PERIOD_S)  # checkpoints are written and handed over
        lost = [uid for uid, owners in s.owners().items() if owners == ["two"]]
        assert lost
        before = s.versions()
        await s.world.kill(victim, silent=True)
        await s.all_hosted(within_s=6 * PERIOD_S)
        assert s.versions() == before
        generations = {uid: r.host.experts[uid].generation for r in s.roles.live.values() for uid in r.host.experts}
        assert {uid for uid, generation in generations.items() if generation == 1} == set(lost)
        await trio.sleep(3 * PERIOD_S)
        assert all(await s.update(EVERY))
        await s.world.restart(victim)  # with its old disk: others have gone on with its experts
        await trio.sleep(3 * PERIOD_S)
        await s.all_hosted(within_s=PERIOD_S)
        assert s.versions() == {uid: version + 1 for uid, version in before.items()}


@pytest.mark.slow
@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
async def test_a_host_whose_clock_is_off_by_a_minute_hosts_like_the_others(
    skew_s: float, tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        await s.start("one", "two", "three")
        await s.start("wrong", skew_s=skew_s)
        await s.all_hosted(within_s=8 * PERIOD_S)
        await trio.sleep(3 * PERIOD_S)
        await s.all_hosted(within_s=1.0)
        mine = [uid for uid, owners in s.owners().items() if owners == ["wrong"]]
        if mine:
            assert all(await s.forward(mine))


@pytest.mark.slow
async def test_a_host_says_that_a_precision_of_its_own_has_no_effect(tmp_path: Path, autojump_clock: object) -> None:
    async with scene(tmp_path) as s:
        own = changed(s.roles.run, limits={"precision": "bf16"})
        await s.world.start("one", program=s.roles.program(ExpertRole, run=own))
        await s.start("two")
        hosts = lambda: {host for owners in s.owners().values() for host in owners}  # noqa: E731
        assert await s.world.until(lambda: hosts() == {"one", "two"}, within_s=6 * PERIOD_S)
        (told,) = s.roles.events("expert.precision_unused")
        assert "limits.precision (bf16) has no effect on hosted experts" in str(told["reason"])


def test_a_run_without_experts_or_with_a_block_that_fails_is_refused_before_anything_is_joined() -> None:
    with pytest.raises(ConfigError, match="has no experts to host"):
        ExpertRole.check_run(RunFile(run="plain"))
    with pytest.raises(ConfigError, match=r"experts\.block"):
        ExpertRole.check_run(run_with(block="nowhere:nothing"))
    ExpertRole.check_run(run_with())
