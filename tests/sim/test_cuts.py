"""Two peers that lose the way to each other cost one call, not every step: the rest goes on as fast as it can."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from peerd.core.run.runfile import BatchSection, ModelSection, PipelineSection, RunFile
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.simnet import SimLine
from peerd.sim.world import World, WorldConfig
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.amount import few
from tests.kit.virtualroles import PacedDevice, Roles, virtual_run

MICROBATCH_S = 0.05
STAGES = {"a0": 0, "b0": 0, "a1": 1, "b1": 1}
FOLLOWER = "the follower of stage 0"
CUTS = [  # between whom, and the peers that are left to be fast
    ("trainer", "b1", ("a0", "b0", "a1")),
    ("trainer", FOLLOWER, ("a0", "a1", "b1")),
    ("a0", "b1", ("a0", "b0", "a1")),
]
SETTLED_S, MEASURED_S = 10.0, 20.0


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return virtual_run(
        tmp_path,
        (40_000,) * 10,
        model=ModelSection(d_model=8, heads=1, layers=2, context=8),
        pipeline=PipelineSection(stages=2, microbatch=1),
        batch=BatchSection(target_samples=16),
    )


def follower(roles: Roles) -> str:
    """The peer of stage 0 that does not conduct: whoever conducts is needed by everybody."""
    return next(n for n in ("a0", "b0") if not roles.live[n]._services.conducting.acting)


async def rate(roles: Roles, peers: tuple[str, ...], cut: list[tuple[str, str]]) -> float:
    """Steps a second from some seconds after the cut on."""
    config = WorldConfig(line=lambda rng: SimLine(latency_s=0.01, up_mbit_s=100, down_mbit_s=100))
    async with World(1, swarm(), config).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        for name in peers:
            limits = msgspec.structs.replace(roles.run.limits, stage=STAGES[name])
            own = msgspec.structs.replace(roles.run, limits=limits)
            await world.start(name, program=roles.program(StageRole, run=own))
        await world.start("trainer", program=roles.program(TrainerRole))

        def ready() -> bool:
            return min(roles.steps(), default=0) >= 2

        assert await world.until(ready, within_s=60), roles.story()
        for one, other in cut:
            world.net.block(one, follower(roles) if other == FOLLOWER else other)
        await world.until(lambda: False, within_s=SETTLED_S)
        before = max(roles.steps())
        await world.until(lambda: False, within_s=MEASURED_S)
        counts = roles.live["trainer"].status()["microbatches"]
        assert counts["lost"] == 0, roles.story()
        return (max(roles.steps()) - before) / MEASURED_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handover", "one", "other", "left"),
    few(
        [(mode, *cut) for mode in ("direct", "trainer") for cut in CUTS],
        ("direct", *CUTS[1]),
        ("direct", *CUTS[2]),
    ),
)
def test_training_goes_on_as_fast_as_the_peers_within_reach_allow(
    tmp_path: Path, run: RunFile, handover: str, one: str, other: str, left: tuple[str, ...]
) -> None:
    torch.set_num_threads(1)
    section = msgspec.structs.replace(run.pipeline, handover=handover)
    run = msgspec.structs.replace(run, pipeline=section)

    def roles(name: str) -> Roles:
        return Roles(run, tmp_path / name, lambda: PacedDevice(MICROBATCH_S))

    allowed = run_virtual(rate, roles("left"), left, [], seed=1)
    found = run_virtual(rate, roles("all"), tuple(STAGES), [(one, other)], seed=1)
    assert allowed > 0
    assert found >= 0.9 * allowed, f"{found:.3f} steps a second of {allowed:.3f}"
