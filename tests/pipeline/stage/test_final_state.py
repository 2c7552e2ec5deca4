"""A loop that its user ends waits until a backbone, or a member that stays, has its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.ids import PeerId
from peerd.messages.progress import StageProgress
from peerd.messages.swarm import MemberInfo, Position
from peerd.pipeline.stage.final_state import FinalState
from peerd.status.run_monitor import final_step
from tests.worlds.network.hosts import keypair

OWN, OTHER, BACKBONE = (keypair(name).peer_id for name in ("own", "other", "backbone"))
STEP = 60


def told(step: int = STEP, ends: bool = False) -> StageProgress:
    return StageProgress(0, 1.0, step, 0, 0.0, "cpu", "", "", [], ends=ends)


def member(peer: PeerId, ready: bool = True) -> MemberInfo:
    return MemberInfo(peer.text, 0, [], ready, since=1.0)


class Directory:
    """A directory with the records of other peers."""

    def __init__(self, keeping: bool = True) -> None:
        self.announced: dict[Any, Any] = {}
        self.keeping = frozenset({BACKBONE} if keeping else ())
        self.kept: list[Position] = []
        self.reads = 0

    async def refresh(self) -> None:
        self.reads += 1
        await trio.sleep(0.1)

    def keepers(self, position: Position) -> list[PeerId]:
        return [BACKBONE] if position in self.kept else []

    def show(self, peer: PeerId, *, ends: bool = False) -> None:
        self.announced[peer, 0] = SimpleNamespace(peer=peer, progress=told(ends=ends))


class Scene:
    """One loop at step 60, which records its announcements and log events."""

    def __init__(self, directory: Directory, *members: MemberInfo, step: int = STEP) -> None:
        async def announce_end() -> None:
            self.done.append(f"announced after {directory.reads} reads")

        async def save() -> None:
            self.done.append("saved")

        async def work(job: Any, name: str) -> Any:
            return job()

        def event(name: str, **facts: Any) -> None:
            self.events.append(name)

        self.done: list[str] = []
        self.events: list[str] = []
        position = Position(step, b"lineage")
        outline = [SimpleNamespace(nbytes=125_000_000)]
        state = SimpleNamespace(built=True, position=position, work=work, save=save, keeps_checkpoints=False)
        state.model = SimpleNamespace(outline=lambda: outline)
        self.post = SimpleNamespace(
            state=state,
            step=step,
            members=[member(OWN), *members],
            catching_up=SimpleNamespace(given_bytes=0),
            announce_end=announce_end,
        )
        run = SimpleNamespace(optimizer=SimpleNamespace(total_steps=0))
        ctx: Any = SimpleNamespace(host=SimpleNamespace(id=OWN), log=SimpleNamespace(event=event))
        services: Any = SimpleNamespace(directory=directory, run=run)
        replica: Any = SimpleNamespace(post=self.post)
        self.final = FinalState(ctx, services, replica)
        self.directory = directory

    async def leave(self) -> float:
        """Hand the state over; returns the duration in seconds."""
        began = trio.current_time()
        await self.final.handed_over()
        assert self.final.waits_for is None
        return trio.current_time() - began


async def test_a_loop_that_nobody_trained_with_leaves_at_once(autojump_clock: MockClock) -> None:
    scene = Scene(Directory(keeping=False))
    assert await scene.leave() < 1.0
    assert scene.done == ["announced after 0 reads", "saved"]
    nothing = Scene(Directory(), step=0)
    assert await nothing.leave() == 0.0
    assert nothing.done == []


async def test_the_last_loop_waits_until_a_backbone_has_its_step(autojump_clock: MockClock) -> None:
    scene = Scene(Directory())

    async def fetch() -> None:
        for _ in range(40):  # a slow line: no pause is too long, but the total is longer than a pause may be
            await trio.sleep(50.0)
            scene.post.catching_up.given_bytes += 1
        assert scene.final.waits_for == "a backbone to fetch the state of step 60"
        scene.directory.kept.append(scene.post.state.position)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch)
        assert await scene.leave() > 2000.0
    assert scene.events == ["final.kept"]


async def test_a_backbone_that_fetches_nothing_is_not_waited_for_for_ever(autojump_clock: MockClock) -> None:
    scene = Scene(Directory())
    assert await scene.leave() < 200.0
    assert scene.events == ["final.not_kept"]


async def test_a_backbone_that_ends_is_not_waited_for(autojump_clock: MockClock) -> None:
    scene = Scene(Directory())

    async def expire() -> None:
        await trio.sleep(20.0)
        scene.directory.keeping = frozenset()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expire)
        assert 20.0 < await scene.leave() < 25.0
    assert scene.events == ["final.not_kept"]


@pytest.mark.parametrize("keeping", [False, True])
async def test_where_a_member_with_the_state_stays_a_loop_leaves_at_once(
    keeping: bool, autojump_clock: MockClock
) -> None:
    scene = Scene(Directory(keeping), member(OTHER))
    scene.directory.show(OTHER)
    assert await scene.leave() < 1.0
    assert scene.events == []


async def test_of_two_loops_that_end_at_once_none_relies_on_the_other(autojump_clock: MockClock) -> None:
    scene = Scene(Directory(), member(OTHER))
    scene.directory.show(OTHER, ends=True)

    async def come_back() -> None:
        await trio.sleep(30.0)
        scene.directory.show(OTHER)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_back)
        assert await scene.leave() > 30.0
    assert scene.events == []


async def test_a_member_that_fetches_the_state_is_waited_for(autojump_clock: MockClock) -> None:
    scene = Scene(Directory(keeping=False), member(OTHER, ready=False))
    scene.directory.show(OTHER)

    async def fetch() -> None:
        for _ in range(4):
            await trio.sleep(100.0)
            scene.post.catching_up.given_bytes += 1
        scene.post.members = [member(OWN), member(OTHER)]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch)
        assert await scene.leave() > 400.0


def test_a_run_ends_with_the_step_that_more_than_half_of_its_peers_name() -> None:
    assert final_step([]) is None
    assert final_step([told(), told(ends=True)]) is None
    assert final_step([told(ends=True)]) == STEP
    assert final_step([told(7), told(ends=True), told(1 << 50, ends=True)]) == STEP
