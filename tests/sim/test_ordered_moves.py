"""Moves between stages that the conductor orders while training goes on: exact, and whatever fails in the midst of one.

Real roles under virtual time, with devices on which a microbatch takes its time. All but one of a stage's peers are
killed: one of the other stage's is to come.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.access.access_guard import Access
from peerd.core.errors import Refused, RemoteError
from peerd.messages.encoding import Empty
from peerd.messages.swarm import Relocate
from peerd.pipeline.stage import stage_move
from peerd.run.runfile import AccessSection, CheckpointSection, RunFile
from roles.stage import StageRole
from tests.kit.amount import some
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.network.members import ORGANIZER, Papers, revoked, token
from tests.worlds.roles.virtualroles import PacedDevice, Roles, pipeline_world
from tests.worlds.simulation.programs import stack_on
from tests.worlds.simulation.world import Node, Program, World

MICROBATCH_S = 3.0
WITHIN_S = 900.0


def run_of(tmp_path: Path, **pipeline: Any) -> RunFile:
    run = run_file("adamw", "float64", write_texts(tmp_path))
    return msgspec.structs.replace(run, pipeline=msgspec.structs.replace(run.pipeline, **pipeline))


@asynccontextmanager
async def lopsided(roles: Roles, network: Program | None = None, thinned: int | None = None) -> AsyncIterator[World]:
    """Six peers in two stages and a trainer; all but one of a stage were killed after the first step.

    `thinned`: the stage that loses peers; by default the one with fewer. Peers of stage 0 conduct.
    """
    async with pipeline_world(roles, 6, "trainer", seed=1, network=network, step=1) as world:
        for name in roles.serving(weak(roles) if thinned is None else thinned)[1:]:
            await kill(world, name)
        assert len(roles.serving(weak(roles))) == 1
        yield world


def weak(roles: Roles) -> int:
    """The stage with the fewest peers."""
    return min((0, 1), key=lambda stage: len(roles.serving(stage)))


async def kill(world: World, name: str) -> None:
    (node,) = [node for node in world.living() if node.name == name]
    await world.kill(node)


async def ends(world: World, roles: Roles, batches: Batches) -> None:
    """The run makes all its steps, exactly."""
    done: Callable[[], bool] = lambda: bool(roles.steps()) and min(roles.steps()) >= STEPS  # noqa: E731
    assert await world.until(done, within_s=WITHIN_S), roles.story()
    run = roles.run
    assert batches.faults(run.batch.target_samples // run.pipeline.microbatch) == []
    stages = [post.state.served.module for role in roles.of(StageRole) for post in role.posts]
    assert differences(run, plain_torch(run, batches), stages) == []


def paced(tmp_path: Path, run: RunFile) -> Roles:
    return Roles(run, tmp_path / "peers", lambda: PacedDevice(MICROBATCH_S))


async def test_a_peer_goes_where_the_pipeline_is_weakest_and_the_run_stays_exact(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles) as world:
        target = weak(roles)
        await ends(world, roles, batches)
        assert len(roles.serving(target)) == 2
        (moved,) = roles.events("stage.moved")
        assert (moved["before"], moved["stage"]) == (1 - target, target)
        assert "microbatches a second" in str(moved["why"])
        assert not roles.events("stage.move_failed")


async def begun(world: World, roles: Roles, event: str = "stage.move_begun") -> str:
    """The peer that moves, as soon as its log has this event."""
    found: list[str] = []

    def look() -> bool:
        found.extend(name for name, log in roles.logs.items() if any(e["name"] == event for e in log.recent(200)))
        return bool(found)

    assert await world.until(look, within_s=300), roles.story()
    return found[0]


@pytest.mark.thorough
async def test_a_peer_without_the_memory_for_both_leaves_before_it_enters(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_move, "lacking", lambda *_: "stage 1 takes more")
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles) as world:
        target = weak(roles)
        mover = await begun(world, roles)
        both: list[bool] = []
        assert await world.until(
            lambda: both.append(len(roles.live[mover].posts) > 1) or bool(roles.events("stage.moved")),
            within_s=60,
        )
        assert not any(both)
        await ends(world, roles, batches)
        assert len(roles.serving(target)) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("phase", some(["stage.moved", "stage.move_begun", "stage.downloaded"], 1))
async def test_a_kill_of_the_peer_that_moves_costs_nothing_but_the_peer(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, phase: str
) -> None:
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles) as world:
        mover = await begun(world, roles, phase)
        await kill(world, mover)
        await ends(world, roles, batches)
        assert mover not in roles.live
        assert {role.step for role in roles.of(StageRole)} == {STEPS}


@pytest.mark.thorough
async def test_a_kill_of_the_conductor_leaves_the_move_to_its_end(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles, thinned=1) as world:
        assert roles.serving(weak(roles)) != [roles.conductors()[0]]
        mover = await begun(world, roles)
        await kill(world, roles.conductors()[0])
        await ends(world, roles, batches)
        assert len(roles.live[mover].posts) == 1


@pytest.mark.thorough
async def test_a_peer_stays_whose_stage_has_lost_its_others_meanwhile(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles) as world:
        source = 1 - weak(roles)
        mover = await begun(world, roles)
        for name in roles.serving(source):
            if name != mover:
                await kill(world, name)
        await ends(world, roles, batches)
        assert roles.serving(source) == [mover]
        (failed,) = roles.events("stage.move_failed")
        assert str(failed["reason"]) == f"stage {source} has lost its other peers meanwhile"


@pytest.mark.thorough
async def test_fixed_places_are_kept(tmp_path: Path, autojump_clock: MockClock, batches: Batches) -> None:
    roles = paced(tmp_path, run_of(tmp_path, placement="fixed"))
    async with lopsided(roles) as world:
        await ends(world, roles, batches)
        assert not roles.events("stage.moved", "stage.move_begun")


@pytest.mark.thorough
async def test_a_moved_peer_comes_back_from_its_checkpoint(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    run = run_of(tmp_path)
    roles = paced(tmp_path, msgspec.structs.replace(run, checkpoint=CheckpointSection(every_steps=1, keep=2)))
    async with lopsided(roles) as world:
        mover = await begun(world, roles, "stage.moved")
        (node,) = [node for node in world.living() if node.name == mover]
        at = roles.live[mover].step
        assert await world.until(lambda: roles.live[mover].step > at, within_s=120)
        await world.kill(node)
        await world.restart(node)
        await ends(world, roles, batches)
        assert mover in roles.live
        assert len(roles.live[mover].posts) == 1


def gated(papers: dict[str, Papers], run: RunFile) -> Program:
    """As `swarm()`, for peers that show their tokens; `papers` of each as it begins."""

    async def program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        stack, mine = stack_on(node), Papers(token(node.id, number=len(papers) + 1, run=run.run))
        papers[node.name] = mine
        access = Access(run, stack.host, stack.rpc, node.clock, mine)
        stack.rpc.guard(access)
        async with trio.open_nursery() as nursery:
            await nursery.start(stack.run, [node.addr], list(node.world.bootstrap))
            await nursery.start(access.run)
            nursery.start_soon(access.refresh, stack.dht)
            task_status.started()

    return program


@pytest.mark.thorough
async def test_a_token_revoked_in_the_midst_of_a_move_costs_only_its_peer(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_move.StageMove, "_is_ready", lambda *_: False)  # it stays on its way
    access = AccessSection(allow="tokens", organizer=ORGANIZER.peer_id.text)
    run, papers = msgspec.structs.replace(run_of(tmp_path), access=access), dict[str, Papers]()
    roles = paced(tmp_path, run)
    async with lopsided(roles, gated(papers, run)) as world:
        mover = await begun(world, roles)
        assert await world.until(lambda: len(roles.live[mover].posts) == 2, within_s=30)
        number = 1 + list(papers).index(mover)
        for name, one in papers.items():
            if name != mover:
                one.lists.append(revoked(1, number))
        others = [role for name, role in roles.live.items() if name != mover and isinstance(role, StageRole)]
        done: Callable[[], bool] = lambda: min(role.step for role in others) >= STEPS  # noqa: E731
        assert await world.until(done, within_s=WITHIN_S), roles.story()
        assert roles.live[mover].step < STEPS
        assert batches.faults(run.batch.target_samples // run.pipeline.microbatch) == []
        stages = [post.state.served.module for role in others for post in role.posts]
        assert differences(run, plain_torch(run, batches), stages) == []


@pytest.mark.thorough
async def test_a_peer_takes_one_order_at_a_time_and_only_from_the_conductor_that_it_follows(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles) as world:
        target = weak(roles)
        mover = await begun(world, roles)
        role = roles.live[mover]
        with pytest.raises(Refused, match="is moving to another stage"):
            role.post.moves_to(target, "another conductor says so, too")
        (node,) = [node for node in world.living() if node.name == mover]
        known = {mover, *roles.conductors()}
        stranger = next(n for n in world.living() if n.name not in known and n.name in roles.live)
        order = Relocate(role._services.fingerprint, 99, 1 - target, target, "I conduct")
        with pytest.raises(RemoteError, match="does not follow you"):
            await stranger.rpc.call(node.id, "stage/6/relocate", order, Empty, timeout_s=5.0)
        assert role.status()["moves"] == f"moves from stage {1 - target} to stage {target}"
        assert await world.until(lambda: "moves" not in role.status(), within_s=60)
        with pytest.raises(Refused, match="has moved in the last 300 s"):
            role.post.moves_to(1 - target, "back again")
        await ends(world, roles, batches)


@pytest.mark.slow
async def test_the_conductor_and_a_peer_that_its_stage_cannot_spare_refuse_to_go(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    roles = paced(tmp_path, run_of(tmp_path))
    async with lopsided(roles, thinned=1):
        alone, conductor = roles.live[roles.serving(weak(roles))[0]], roles.live[roles.conductors()[0]]
        assert conductor is not alone
        with pytest.raises(Refused, match="no other peer of stage"):
            alone.post.moves_to(1 - alone.stage, "go")
        with pytest.raises(Refused, match="this peer conducts"):
            conductor.post.moves_to(1, "go")
