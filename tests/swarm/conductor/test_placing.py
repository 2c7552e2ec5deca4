"""Placing: what peers say that they serve, and two stage-mates of which one may go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from peerd.core.errors import Overloaded
from peerd.messages.progress import StageProgress
from peerd.messages.swarm import PostsHeld, WhichPosts
from peerd.role.run_services import RunServices
from peerd.rpc.rpc_types import Answer, Incoming
from peerd.swarm.conductor.rivals import POSTS
from peerd.swarm.conductor.stage_finder import StageFinder
from peerd.swarm.directory import StagePeer
from peerd.swarm.stage_choice import Move
from tests.kit.declared import ANY
from tests.kit.exact import run_file, write_texts
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import Node, World

HERE, ELSEWHERE = 0, 1


async def mates(world: World, nursery: trio.Nursery, folder: Path) -> list[tuple[Node, StageFinder]]:
    """Two peers that serve one stage and are connected."""
    run = run_file("sgd", "float32", write_texts(folder))
    found = []
    for node in await world.start_many(2):
        placing = RunServices(run, node.host, node.rpc, node.dht, node.clock).placing()
        nursery.start_soon(placing.answer, lambda: [HERE])
        found.append((node, placing))
    (one, _), (other, _) = found
    one.host.learn(other.id, [other.full_addr])
    await one.host.connect(other.id)
    return found


async def test_of_two_mates_one_may_leave(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (one, first), (other, second) = await mates(world, nursery, tmp_path)
        assert not await first.may_leave(ELSEWHERE, [other.id.text]), "the other does not serve that"
        assert await first.may_leave(HERE, [other.id.text])
        assert not await second.may_leave(HERE, [one.id.text]), "it would leave nobody"
        first.stays()
        assert await second.may_leave(HERE, [one.id.text])
        nursery.cancel_scope.cancel()


async def test_two_mates_that_ask_at_once_both_stay(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (one, first), (other, second) = await mates(world, nursery, tmp_path)
        told: list[bool] = []

        async def ask(placing: StageFinder, mate: Node) -> None:
            told.append(await placing.may_leave(HERE, [mate.id.text]))

        async with trio.open_nursery() as at_once:
            at_once.start_soon(ask, first, other)
            at_once.start_soon(ask, second, one)
        assert told == [False, False]
        assert await first.may_leave(HERE, [other.id.text]), "asked again, one after the other"
        nursery.cancel_scope.cancel()


async def test_of_a_mate_that_is_too_busy_to_say_its_record_counts(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def busy(_: Incoming[WhichPosts]) -> Answer[PostsHeld]:
        raise Overloaded("too many calls", 0.1)

    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (_, first), (other, _) = await mates(world, nursery, tmp_path)
        other.rpc.unserve("posts/1")
        other.rpc.serve(POSTS, WhichPosts, busy, declared=ANY)
        assert not await first.may_leave(HERE, [other.id.text])
        progress = StageProgress(HERE, 0.0, 0, 0, 0.0, "cpu", "", "", [])
        first._directory.announced[other.id, HERE] = StagePeer(other.id, progress)
        assert await first.may_leave(HERE, [other.id.text])
        assert not await first.may_leave(ELSEWHERE, [other.id.text])
        nursery.cancel_scope.cancel()


async def test_a_peer_that_is_gone_or_has_no_part_in_the_run_serves_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (_, first), (other, _) = await mates(world, nursery, tmp_path)
        stranger = await world.start("stranger")
        world.nodes["n00"].host.learn(stranger.id, [stranger.full_addr])
        assert not await first.may_leave(HERE, [stranger.id.text])
        await world.kill(other)
        assert not await first.may_leave(HERE, [other.id.text])
        nursery.cancel_scope.cancel()


async def test_a_role_that_begins_again_in_its_process_answers_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (_, first), (other, second) = await mates(world, nursery, tmp_path)
        other.rpc.unserve("posts/1")  # of its first life
        for stages in ([HERE], [ELSEWHERE]):
            async with trio.open_nursery() as life:
                life.start_soon(second.answer, stages.copy)
                await wait_all_tasks_blocked()
                assert await first._rivals.posts([other.id]) == {other.id: stages}
                life.cancel_scope.cancel()
            assert await first._rivals.posts([other.id]) == {other.id: ()}, "it serves nothing between two lives"
        nursery.cancel_scope.cancel()


async def test_a_peer_that_comes_to_serve_while_a_mover_looks_is_seen(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (_, first), (other, second) = await mates(world, nursery, tmp_path)
        await trio.sleep(3.0)  # for the directory to know both
        await second.goes(ELSEWHERE)
        directory, looks = first._directory, list[str]()

        async def between() -> None:
            looks.append("look")
            if len(looks) == 1:
                await second._directory.announce(StageProgress(ELSEWHERE, 0.0, 0, 0, 0.0, "cpu", "", "", []))
                await second.serves_now(trio.lowlevel.checkpoint)

        async def refresh(read: Callable[[], Awaitable[object]] = directory.refresh) -> object:
            found = await read()
            await between()
            return found

        async def arrivals(wall: float, read: Callable[[float], Awaitable[object]] = directory.arrivals) -> object:
            found = await read(wall)
            await between()
            return found

        monkeypatch.setattr(directory, "refresh", refresh)
        monkeypatch.setattr(directory, "arrivals", arrivals)
        move = Move(HERE, ELSEWHERE, 5.0, (other.id.text,), frozenset({other.id.text}))
        assert not await first._is_backed(move, 1)
        assert len(looks) == 2
        nursery.cancel_scope.cancel()


async def test_a_peer_is_on_its_way_until_its_record_is_there(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with World(1, swarm()).running() as world, trio.open_nursery() as nursery:
        (_, first), (other, second) = await mates(world, nursery, tmp_path)
        await second.goes(ELSEWHERE)
        announced = trio.Event()
        nursery.start_soon(second.serves_now, announced.wait)
        await trio.sleep(3.0)
        assert [one.peer for one in await first._arrivals()] == [other.id.text]
        announced.set()
        await trio.sleep(1.0)
        assert await first._arrivals() == []
        nursery.cancel_scope.cancel()
