"""Two peers that lose the way to each other cost one call, not every step: the rest goes on as fast as it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worlds.roles.two_stages import MICROBATCH_S, STAGES, two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles
from tests.worlds.simulation.clock import run_virtual

FOLLOWER = "the follower of stage 0"
CUTS = [  # between whom, and the peers that are left to be fast
    ("trainer", "b1", ("a0", "b0", "a1")),
    ("trainer", FOLLOWER, ("a0", "a1", "b1")),
    ("a0", "b1", ("a0", "b0", "a1")),
]
SETTLED_S, MEASURED_S = 10.0, 20.0


def follower(roles: Roles) -> str:
    """The peer of stage 0 that does not conduct: whoever conducts is needed by everybody."""
    return next(n for n in ("a0", "b0") if not roles.live[n]._services.conducting.acting)


async def rate(roles: Roles, peers: tuple[str, ...], cut: list[tuple[str, str]]) -> float:
    """Steps a second from some seconds after the cut on."""
    async with two_stages(roles, peers) as world:

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
@pytest.mark.parametrize(("one", "other", "left"), CUTS)
@pytest.mark.thorough
def test_training_goes_on_as_fast_as_the_peers_within_reach_allow(
    tmp_path: Path, one: str, other: str, left: tuple[str, ...]
) -> None:
    torch.set_num_threads(1)
    run = two_stage_run(tmp_path)

    def roles(name: str) -> Roles:
        return Roles(run, tmp_path / name, lambda: PacedDevice(MICROBATCH_S))

    allowed = run_virtual(rate, roles("left"), left, [], seed=1)
    found = run_virtual(rate, roles("all"), tuple(STAGES), [(one, other)], seed=1)
    assert allowed > 0
    assert found >= 0.9 * allowed, f"{found:.3f} steps a second of {allowed:.3f}"
