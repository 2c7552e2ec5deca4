"""Hostile sessions in services: whatever a peer says as member, trainer, conductor or relay, the run's peers live."""

from __future__ import annotations

import pytest

from tests.fuzz import access_points, expert_points, handover_points, position_points
from tests.fuzz.expert_scene import expert_host
from tests.fuzz.position_scene import proven_run
from tests.fuzz.service_points import POINTS
from tests.fuzz.service_scene import services
from tests.fuzz.sessions import Point, Scene, draw, first_failure, reach, session_count
from tests.kit.amount import ALL
from tests.worlds.simulation.clock import run_virtual

COUNT = session_count(5_000, 250)
SHARDS = 10 if ALL else 5  # none of them takes long


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize(
    ("points", "scene", "count"),
    [
        pytest.param(POINTS, services, COUNT, id="a run"),
        pytest.param(access_points.POINTS, access_points.gate, COUNT // 5, id="a gate"),
        pytest.param(expert_points.POINTS, expert_host, COUNT // 5, id="a host of experts"),
        pytest.param(handover_points.POINTS, services, COUNT // 5, id="stage peers that hand over"),
        pytest.param(position_points.POINTS, proven_run, COUNT // 5, id="a run at a proven position"),
    ],
)
def test_hostile_sessions_leave_a_peer_well(points: list[Point], scene: Scene, count: int, shard: int) -> None:
    assert first_failure(1, range(shard * count // SHARDS, (shard + 1) * count // SHARDS), points, scene) == ""


def test_whoever_has_gone_before_its_token_was_read_shows_it_again() -> None:
    """Sessions of which one ends just so; the next finds a closed gate."""
    assert first_failure(1, range(500, 508), access_points.POINTS, access_points.gate) == ""


REACHED = [(one, services) for one in (*POINTS, *handover_points.POINTS)]
REACHED += [(one, expert_host) for one in expert_points.POINTS]
REACHED += [(one, proven_run) for one in position_points.POINTS]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "scene"), [pytest.param(*one, id=one[0].name) for one in REACHED])
def test_a_session_reaches_its_point(point: Point, scene: Scene) -> None:
    """And is still welcome there."""
    run_virtual(reach, point, scene, seed=1)


def test_a_session_follows_from_its_seed_and_number_alone() -> None:
    scripts = [draw(5, number, POINTS) for number in range(3 * len(POINTS))]
    assert scripts == [draw(5, number, POINTS) for number in range(3 * len(POINTS))]
    assert {script.point.name for script in scripts} == {point.name for point in POINTS}
