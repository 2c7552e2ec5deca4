"""Hostile sessions in services: whatever a peer says as member, trainer, conductor or relay, the run's peers live."""

from __future__ import annotations

import pytest
import torch
import trio

from peerd.sim.clock import run_virtual
from tests.fuzz import access_points, expert_points, handover_points
from tests.fuzz.expert_scene import expert_host
from tests.fuzz.service_points import POINTS
from tests.fuzz.service_scene import services
from tests.fuzz.sessions import COUNT, Point, Scene, draw, first_failure

SHARDS = max(5, COUNT // 500)  # for several processes, and none of them takes long


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_run_outlives_hostile_sessions(shard: int) -> None:
    numbers = range(shard * COUNT // SHARDS, (shard + 1) * COUNT // SHARDS)
    assert first_failure(1, numbers, POINTS, services) == ""


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_gate_outlives_hostile_sessions(shard: int) -> None:
    each = COUNT // 5 // SHARDS
    assert first_failure(1, range(shard * each, (shard + 1) * each), access_points.POINTS, access_points.gate) == ""


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_host_of_experts_outlives_hostile_sessions(shard: int) -> None:
    each = COUNT // 5 // SHARDS
    assert first_failure(1, range(shard * each, (shard + 1) * each), expert_points.POINTS, expert_host) == ""


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_stage_peers_that_hand_over_outlive_hostile_sessions(shard: int) -> None:
    each = COUNT // 5 // SHARDS
    assert first_failure(1, range(shard * each, (shard + 1) * each), handover_points.POINTS, services) == ""


def test_whoever_has_gone_before_its_token_was_read_shows_it_again() -> None:
    """Sessions of which one ends just so; the next finds a closed gate."""
    assert first_failure(1, range(500, 508), access_points.POINTS, access_points.gate) == ""


REACHED = [(one, services) for one in (*POINTS, *handover_points.POINTS)]
REACHED += [(one, expert_host) for one in expert_points.POINTS]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "scene"), [pytest.param(*one, id=one[0].name) for one in REACHED])
def test_a_session_reaches_its_point(point: Point, scene: Scene) -> None:
    """And is still welcome there."""

    async def reach() -> None:
        async with scene() as made:
            made.ephemeral = bytes(range(32))
            lanes = await point.reach(made)
            await trio.sleep(0.1)
            for lane in lanes:
                with trio.move_on_after(0.1):
                    await lane.gone()
                assert not lane.ended
            for lane in lanes:
                await lane.raw.aclose()
            assert await made.check() == ""

    run_virtual(reach, seed=1)


def test_a_session_follows_from_its_seed_and_number_alone() -> None:
    scripts = [draw(5, number, POINTS) for number in range(3 * len(POINTS))]
    assert scripts == [draw(5, number, POINTS) for number in range(3 * len(POINTS))]
    assert {script.point.name for script in scripts} == {point.name for point in POINTS}
