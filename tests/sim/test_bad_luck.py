"""Bad luck without malice, in virtual time: a step goes on within half a minute, or somebody's status says why not.

Ways that lead in one direction only or not at all, disks that hang or are full, a peer that stands still: none of it is
anybody's lie, all of it happens at home.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors
import torch
import trio

from peerd.compute import checkpoint
from peerd.core.run.runfile import (
    BatchSection,
    CheckpointSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.world import World, WorldConfig
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.virtualroles import PacedDevice, Roles, virtual_run
from tests.kit.world import home_line
from tests.sim.test_training_swarm import is_conductor

T = TypeVar("T")
PATIENCE_S = 30.0
WATCHED_S = 100.0
MICROBATCH_S = 1.5  # of a stage's device: a step takes some seconds
Trouble = Callable[[World, Roles], Awaitable[None]]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return virtual_run(
        tmp_path,
        (4000,) * 10,
        model=ModelSection(d_model=8, heads=1, layers=2, context=8),
        pipeline=PipelineSection(stages=2, microbatch=1),
        optimizer=OptimizerSection(name="sgd", lr=1e-2),
        batch=BatchSection(target_samples=8),
        checkpoint=CheckpointSection(every_steps=2, keep=2),
    )


def of_stage(roles: Roles, stage: int) -> list[str]:
    """Nodes that serve a stage; the conductor's comes last."""
    found = [name for name, role in roles.live.items() if isinstance(role, StageRole) and role.stage == stage]
    return sorted(found, key=lambda name: (is_conductor(roles.live[name]), name))


def told(roles: Roles) -> list[str]:
    """The `waits_for` of all roles that wait, with their peers' names."""
    return [f"{name}: {why}" for name, role in sorted(roles.live.items()) if (why := role.status()["waits_for"])]


async def watch(seed: int, roles: Roles, trouble: Trouble, mend: Callable[[], None]) -> None:
    """Six stage peers and two trainers; no time longer than PATIENCE_S passes without a step, or a word why."""
    async with World(seed, swarm(), WorldConfig(line=home_line)).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        for number in range(6):
            await world.start(f"stage{number}", program=roles.program(StageRole))
        for number in range(2):
            await world.start(f"trainer{number}", program=roles.program(TrainerRole))
        assert await world.until(lambda: max(roles.steps(), default=0) >= 3, within_s=60), roles.story()
        until = trio.current_time() + WATCHED_S
        try:
            await trouble(world, roles)
            await assert_it_moves_or_says_why(roles, until)
        finally:
            mend()


async def assert_it_moves_or_says_why(roles: Roles, until: float) -> None:
    newest, moved = max(roles.steps()), trio.current_time()
    while (now := trio.current_time()) < until:
        await trio.sleep(0.5)
        if max(roles.steps()) > newest or told(roles):
            newest, moved = max(roles.steps()), now
        if now - moved > PATIENCE_S:
            raise AssertionError(f"no step and no word since {now - moved:.0f} s\n{roles.story()}")


def check(
    run: RunFile,
    tmp_path: Path,
    trouble: Trouble,
    worker: Callable[[], Any] = lambda: PacedDevice(MICROBATCH_S),
    mend: Callable[[], None] = lambda: None,
) -> None:
    torch.set_num_threads(1)
    run_virtual(watch, 1, Roles(run, tmp_path / "peers", worker), trouble, mend, seed=1)


# --- ways ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [thorough(True, id="both ways"), pytest.param(False, id="one way")])
@pytest.mark.parametrize("count", [pytest.param(1, id="one peer"), thorough(3, id="the stage")])
@pytest.mark.parametrize("stage", [thorough(0), 1])
@pytest.mark.thorough
def test_a_trainer_reaches_the_conductor_and_not_a_stage(
    run: RunFile, tmp_path: Path, stage: int, count: int, both: bool
) -> None:
    async def trouble(world: World, roles: Roles) -> None:
        peers = [name for name in of_stage(roles, stage) if not is_conductor(roles.live[name])]
        for peer in peers[:count]:
            world.net.block("trainer0", peer, both=both)

    check(run, tmp_path, trouble)


@pytest.mark.parametrize("direction", ["out", thorough("in")])
@pytest.mark.parametrize("whom", [thorough("conductor"), "stage-mate", thorough("next stage")])
def test_a_member_reaches_another_in_one_direction_only(
    run: RunFile, tmp_path: Path, whom: str, direction: str
) -> None:
    async def trouble(world: World, roles: Roles) -> None:
        zero, one = of_stage(roles, 0), of_stage(roles, 1)
        a, b = {"conductor": (one[0], zero[-1]), "stage-mate": (one[0], one[1]), "next stage": (zero[0], one[0])}[whom]
        world.net.block(*((a, b) if direction == "out" else (b, a)), both=False)

    check(run, tmp_path, trouble)


# --- a peer that stands still -------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["member", thorough("conductor"), thorough("trainer")])
@pytest.mark.thorough
def test_a_peer_stands_still_for_20_s_while_a_step_is_prepared(run: RunFile, tmp_path: Path, whom: str) -> None:
    async def trouble(world: World, roles: Roles) -> None:
        victim = {"member": of_stage(roles, 1)[0], "conductor": of_stage(roles, 0)[-1], "trainer": "trainer0"}[whom]
        closing = [role for role in roles.of(StageRole) if role.stage == 1]
        assert await world.until(lambda: any(r.post.serving.closing for r in closing), within_s=60, step_s=0.001)
        world.net.stall(victim)
        await trio.sleep(20)
        world.net.resume(victim)

    check(run, tmp_path, trouble)


# --- disks --------------------------------------------------------------------------------------------------


class Disk(PacedDevice):
    """A device for which writing takes for ever, once it hangs; other jobs go on."""

    hangs = False
    victims = 1
    mended = trio.Event()  # at the test's end: a commit under way is not broken off

    def __init__(self) -> None:
        super().__init__(MICROBATCH_S)

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        if Disk.hangs and name == "write a checkpoint" and (self in Disk.hung or len(Disk.hung) < Disk.victims):
            Disk.hung.append(self)
            await Disk.mended.wait()
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)

    hung: list[PacedDevice] = []  # noqa: RUF012 - of the test that runs now


@pytest.mark.parametrize("victims", [pytest.param(1, id="one"), thorough(6, id="all")])
@pytest.mark.thorough
def test_a_disk_hangs(run: RunFile, tmp_path: Path, victims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "hung", [])
    monkeypatch.setattr(Disk, "victims", victims)
    monkeypatch.setattr(Disk, "hangs", False)

    async def trouble(world: World, roles: Roles) -> None:
        Disk.hangs = True

    monkeypatch.setattr(Disk, "mended", trio.Event())
    check(run, tmp_path, trouble, Disk, lambda: Disk.mended.set())


@pytest.mark.parametrize("victims", [thorough(1, id="one"), thorough(6, id="all")])
def test_a_disk_is_full_in_mid_commit(
    run: RunFile, tmp_path: Path, victims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, full, left = checkpoint.safetensors.torch.save_file, [False], [victims]
    folders: set[str] = set()

    def save_file(tensors: Any, path: Path, *args: Any, **more: Any) -> None:
        folder = str(Path(path).parent)
        if full[0] and (folder in folders or left[0]):
            if folder not in folders:
                left[0] -= 1
                folders.add(folder)
            Path(path).write_bytes(b"half of it")
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        original(tensors, path, *args, **more)

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", save_file)

    async def trouble(world: World, roles: Roles) -> None:
        full[0] = True

    check(run, tmp_path, trouble)
