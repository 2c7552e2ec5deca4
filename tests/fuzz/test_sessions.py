"""Hostile sessions: whatever a peer says after a good beginning, the host lives, answers others, and keeps nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trio

from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from tests.fuzz import session_points
from tests.fuzz.sessions import POINTS, SERVING, Point, Stage, draw, first_failure, reach, session_count, stage
from tests.kit.amount import ALL
from tests.worlds.network.hostile import Hostile
from tests.worlds.simulation.clock import run_virtual

COUNT = session_count(20_000, 500)
SHARDS = 20 if ALL else 5  # none of them takes long
assert session_points.__name__  # its points have joined by importing


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_host_outlives_hostile_sessions(shard: int) -> None:
    assert first_failure(1, range(shard * COUNT // SHARDS, (shard + 1) * COUNT // SHARDS)) == ""


def test_a_session_follows_from_its_seed_and_number_alone() -> None:
    scripts = [draw(5, number, POINTS) for number in range(100)]
    assert scripts == [draw(5, number, POINTS) for number in range(100)]
    assert scripts != [draw(6, number, POINTS) for number in range(100)]
    assert {script.point.name for script in scripts} == {point.name for point in POINTS}


@pytest.mark.parametrize("point", [pytest.param(one, id=one.name) for one in POINTS])
def test_a_session_reaches_its_point(point: Point) -> None:
    """And is still welcome there."""
    run_virtual(reach, point, stage, seed=1)


async def _broken(stream: Stream) -> None:
    while data := await stream.receive_some(1 << 16):
        if b"bad" in data:
            raise ZeroDivisionError("a bug of ours")


async def _reach(stage: Stage) -> Sequence[Hostile]:
    hostile = await session_points.entered(stage)
    await hostile.open("/broken/1")
    return [hostile]


def _serve(host: Host, _: trio.Nursery) -> None:
    host.handle("/broken/1", _broken)


def test_the_harness_shows_the_shortest_session_that_ends_by_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.sessions.SERVING", [*SERVING, _serve])
    fine = session_points.frame(0, 0, 1, 1, b"1")
    bad = session_points.frame(0, 0, 1, 5, b"bad!!")

    def talk(rng: random.Random) -> session_points.Say:
        return lambda: bad if rng.random() < 0.1 else fine

    told = first_failure(3, range(20), [Point("in what is broken", talk, _reach)])
    assert "ZeroDivisionError: a bug of ours in the handler of /broken/1" in told
    assert "of seed 3, in what is broken; these " in told
    assert told.rstrip().split("\n")[-1].count(bad.hex())


def test_the_harness_notices_what_a_session_leaves_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spoil(stage: Stage) -> Sequence[Hostile]:
        stage.honest.links.best(stage.host.id).abort("spoiled")  # type: ignore[union-attr]
        stage.host.unhandle("/echo/1")
        return await _reach(stage)

    monkeypatch.setattr("tests.fuzz.sessions.SERVING", [*SERVING, _serve])
    told = first_failure(4, range(1), [Point("who spoils it", session_points.Frames, spoil)])
    assert "these 0 steps suffice" in told
