"""Rates of stage peers as their conductor publishes them: a trainer that comes later knows who is slow beforehand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from roles.trainer import TrainerRole
from tests.kit.virtual_time import virtual
from tests.worlds.roles.two_stages import MICROBATCH_S, two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles
from tests.worlds.simulation.world import World

TIMES_SLOWER = 4.0


def id_of(world: World, name: str) -> str:
    return next(node.id.text for node in world.living() if node.name == name)


def all_at(roles: Roles, step: int) -> bool:
    """True once all stage peers have made so many steps."""
    return len(roles.steps()) == 4 and min(roles.steps()) >= step


@pytest.mark.slow
@virtual
async def test_a_trainer_that_comes_later_shares_by_published_rates_before_it_has_measured_anything(
    tmp_path: Path,
) -> None:
    roles = Roles(two_stage_run(tmp_path), tmp_path / "roles", lambda: PacedDevice(MICROBATCH_S))
    async with two_stages(roles) as world:
        assert await world.until(lambda: all_at(roles, 1), within_s=120), roles.story()
        roles.live["b1"].post.serving._worker.microbatch_s *= TIMES_SLOWER
        assert await world.until(lambda: all_at(roles, 20), within_s=600), roles.story()
        await world.start("late", program=roles.program(TrainerRole))
        assert await world.until(lambda: "late" in roles.live, within_s=30)
        peers = roles.live["late"]._pipeline._peers
        assert await world.until(lambda: len(peers) == 4, within_s=60), roles.story()
        rates = peers.rates()
        fast_id, slow_id = id_of(world, "a1"), id_of(world, "b1")
        names = {fast_id: "fast", slow_id: "slow"}
        wiring = peers.wiring(1)
        assert not any(wiring.seconds_per_unit(peer) for peer in wiring)
        ratio = rates[fast_id] / rates[slow_id]
        picks = Counter(names[wiring.pick(0.0, 1.0)] for _ in range(50))
    print(f"published: {ratio:.1f} times as fast; shares {dict(picks)}")
    assert TIMES_SLOWER / 2 <= ratio <= 2 * TIMES_SLOWER
    assert picks["fast"] >= 1.6 * picks["slow"]
