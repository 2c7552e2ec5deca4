"""Newcomers on slow lines, under virtual time: one on whose line a state takes longer than a step arrives, with one
state; one whose line carries less than the swarm's steps says so, with figures, and does not fetch state after state.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.run.runfile import BatchSection, ModelSection
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.simnet import SimLine

SLOW = SimLine(latency_s=0.03, up_mbit_s=1, down_mbit_s=1)  # a gradient takes 3 s, a state 8, a step of the others 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, thorough(2)])
@virtual
async def test_whose_line_carries_a_gradient_a_step_arrives_though_a_state_takes_longer(
    tmp_path: Path, seed: int
) -> None:
    run = virtual_run(tmp_path, (20000,), run="slow", model=ModelSection(d_model=48, heads=2, layers=2, context=8))
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.5))
    async with replica_world(roles, 3, seed=seed, step=6) as world:
        began = roles.replica_step()
        await world.start("slow", line=SLOW, program=roles.program(TrainerRole))

        def there() -> bool:
            replicas = [role.replica for role in roles.of(TrainerRole) if role.replica.built]
            modules = [replica.post.served.module for replica in replicas]
            places = {replica.position for replica in replicas}
            return len(replicas) == 4 and len(places) == 1 and len({module.digest() for module in modules}) == 1

        assert await world.until(there, within_s=300), roles.story()
        assert roles.replica_step() > began + 2  # they did not wait for it
        log = roles.logs["slow"].recent(500)
    assert [event["name"] for event in log].count("stage.downloaded") == 1, log
    assert [event for event in log if event["name"] == "stage.caught_up"], log


TOO_SLOW = SimLine(latency_s=0.03, up_mbit_s=1, down_mbit_s=1)  # a gradient takes 3 s, a step of the others 1.2
WATCHED_S, FAST = 120.0, SimLine(latency_s=0.03, up_mbit_s=10, down_mbit_s=10)


@pytest.mark.slow
@virtual
async def test_whose_line_is_slower_than_the_steps_says_so_and_does_not_fetch_state_after_state(tmp_path: Path) -> None:
    model, batch = ModelSection(d_model=48, heads=2, layers=2, context=8), BatchSection(target_samples=6)
    run = virtual_run(tmp_path, (20000,), run="slow", model=model, batch=batch)
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.2))
    async with replica_world(roles, 1, seed=1, step=2) as world:
        began = trio.current_time()
        await world.start("slow", line=TOO_SLOW, program=roles.program(TrainerRole))

        def events(name: str) -> list[dict[str, Any]]:
            return [event for event in roles.logs["slow"].recent(1000) if event["name"] == name]

        assert await world.until(lambda: bool(events("stage.too_slow")), within_s=WATCHED_S), roles.story()
        print(f"after {trio.current_time() - began:.0f} s: {events('stage.too_slow')[0]['reason']}")
        said = str(roles.live["slow"].status()["replica"]["waits_for"])
        assert said.startswith("a faster connection: a state has 961 kB and each step adds 320 kB, "), said
        assert "steps a minute, so that this peer never catches up" in said
        await trio.sleep(max(0.0, began + WATCHED_S - trio.current_time()))
        fetched = len(events("stage.downloaded")) + len(events("stage.download_failed"))
        print(f"{fetched} states in {WATCHED_S:g} s")
        assert fetched <= 4, "each pause is twice as long as the one before"
        world.net.set_line("slow", FAST)
        await trio.sleep(5.0)
        there = [role.replica for role in roles.of(TrainerRole)]
        assert await world.until(lambda: len({one.position for one in there}) == 1, within_s=200), roles.story()
