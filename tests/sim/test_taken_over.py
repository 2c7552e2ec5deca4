"""Nobody takes a run over: made-up positions move nobody, and of two parts that meet the one with more work goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import RemoteError
from peerd.messages.swarm import Mbs, MemberAnswer, MemberSync, Moved, Position, Restore
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import CheckpointSection, PipelineSection
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.declared import declared
from tests.kit.virtual_time import virtual
from tests.worlds.network.world import home_world
from tests.worlds.roles.misfortunes import public_ip
from tests.worlds.roles.two_stages import MICROBATCH_S, two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.world import Node, World

pytestmark = pytest.mark.slow
CUT_S = 60.0
OPEN: Any = {"declared": declared()}


def conducting(roles: Roles) -> Any:
    return roles.live[roles.conductors()[0]]._services.conducting


async def claim(roles: Roles, stranger: Node, positions: list[Position]) -> None:
    """The stranger serves both stages from the start, and says that it has checkpoints of these positions."""
    for stage in (0, 1):
        report = MemberSync(
            run=next(iter(roles.live.values()))._services.fingerprint,
            session=7,
            stage=stage,
            position=Position(0, b""),
            prepared=None,
            saved=positions,
            held=Mbs(),
            counted=Mbs(),
            addrs=[str(stranger.addr)],
            since=stranger.clock.wall(),
            term=0,
            seen=0,
            wait_s=0.0,
            witnessed=positions,
        )
        conductor = conducting(roles)._host.id
        await stranger.rpc.call(conductor, "swarm/6/member", report, MemberAnswer, timeout_s=5.0)


def obey(stranger: Node) -> None:
    """The stranger says that it is wherever a conductor orders it to go."""

    async def restore(call: Incoming[Restore]) -> Answer[Moved]:
        await trio.lowlevel.checkpoint()
        return Answer(Moved(call.body.target))

    stranger.rpc.serve("stage/6/restore", Restore, restore, **OPEN)


@pytest.mark.parametrize("behind", [1, -1], ids=["behind", "ahead"])
async def test_a_stranger_that_claims_a_checkpoint_moves_nobody_when_a_stage_is_lost(
    tmp_path: Path, autojump_clock: MockClock, behind: int
) -> None:
    checkpoint = CheckpointSection(every_steps=4, keep=2)
    pipeline = PipelineSection(stages=2, microbatch=2)
    run = virtual_run(tmp_path, (40_000,), stages=2, pipeline=pipeline, checkpoint=checkpoint)
    roles = Roles(run, tmp_path / "peers")
    async with home_world() as world:
        for number in range(2):
            await world.start(f"stage{number}", program=roles.program(StageRole), ip=public_ip(number))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: len(roles.steps()) == 2 and min(roles.steps()) >= 6, within_s=60)
        stranger = await world.start("stranger")
        (lost,) = roles.serving(1)
        await world.kill(next(node for node in world.living() if node.name == lost))
        obey(stranger)
        made_up = [Position(conducting(roles).machine.current.step - behind, b"of its own")]
        lineages = set[bytes]()
        await world.start("new", program=roles.program(StageRole))
        before = max(roles.steps())
        for _ in range(80):
            with suppress(RemoteError, IndexError):
                await claim(roles, stranger, made_up)
                machine = conducting(roles).machine
                lineages |= {p.lineage for p in (machine.current, machine.course.target) if p is not None}
            await trio.sleep(0.25)
            lineages |= {role.position.lineage for role in roles.of(StageRole)}
        assert made_up[0].lineage not in lineages, roles.story()
        assert max(roles.steps()) > before - 6, roles.story()


async def cut(roles: Roles, world: World, *island: str) -> tuple[int, list[int]]:
    """Cut these peers off for a while; the newest step when all can reach each other again, and the steps from then."""
    world.net.partition(island)
    await trio.sleep(CUT_S)
    most = max(roles.steps() or [roles.replica_step()])
    world.net.heal()
    steps = []
    for _ in range(60):
        await trio.sleep(1.0)
        steps.append(max(roles.steps() or [roles.replica_step()]))
    return most, steps


@pytest.mark.parametrize("island", [("b0", "b1"), ("a0", "a1")], ids=" ".join)
@virtual
async def test_the_half_that_trained_goes_on_when_two_halves_meet(tmp_path: Path, island: tuple[str, ...]) -> None:
    roles = Roles(two_stage_run(tmp_path), tmp_path / "peers", lambda: PacedDevice(MICROBATCH_S))
    async with two_stages(roles) as world:
        assert await world.until(lambda: min(roles.steps(), default=0) >= 3, within_s=60), roles.story()
        most, steps = await cut(roles, world, *island)
        assert min(steps) >= most - 1, f"from step {most} to {min(steps)}\n{roles.story()}"
        assert steps[-1] > most + 3, roles.story()
        assert len(roles.conductors()) == 1
        assert min(roles.steps()) >= steps[-1] - 1, "all have joined"


@virtual
async def test_a_lone_peer_that_trained_by_itself_joins_the_larger_part(tmp_path: Path) -> None:
    run = virtual_run(tmp_path, (40_000,), checkpoint=CheckpointSection(every_steps=1000, keep=2))
    roles = Roles(run, tmp_path / "peers", lambda: PacedDevice(0.03))
    async with replica_world(roles, 3, seed=3) as world:
        alone = next(name for name in ("replica0", "replica1", "replica2") if name not in roles.conductors())
        most, steps = await cut(roles, world, alone)
        assert min(steps) >= most - 1, f"from step {most} to {min(steps)}\n{roles.story()}"
        assert len(roles.conductors()) == 1
        here = [role.replica.position.step for role in roles.of(TrainerRole)]
        assert min(here) >= steps[-1] - 2, roles.story()
        left = roles.events("stage.branch_left")
        assert left, "what is dropped is said"
        folder = roles.directory / alone / "checkpoints"
        kept = {path.name for path in folder.rglob("step-*.json")}
        assert any(int(name[5:13]) == event["before"] for name in kept for event in left), (kept, left)
