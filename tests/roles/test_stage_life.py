"""The life of stage peers: they join, save, leave, come back, and refuse what is wrong, while training goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from peerd.run.runfile import RunFile
from roles.stage import StageRole
from tests.worlds.roles.training import pinned, pipeline, reaches, small_run, swarm, until_equal
from tests.worlds.simulation.clock import run_virtual


def life_run(folder: Path) -> RunFile:
    """A run on texts that are made in `folder`."""
    return small_run(folder, run="life", checkpoint={"every_steps": 3, "keep": 2})


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return life_run(tmp_path)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, Path]:
    """A run, and the directories of its peers, which were all stopped after the fifth step."""
    folder = tmp_path_factory.mktemp("ended")
    run = life_run(folder)

    async def train() -> None:
        async with swarm(folder / "peers") as s:
            peers, (trainer,) = await pipeline(s, run, 4)
            await reaches(s, peers[0], 5)
            assert all(peer.role.position.step >= 4 for peer in peers)
            await trainer.role.leave()

    run_virtual(train, seed=1)
    return run, folder / "peers"


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.no_watchdog("several peers and the threads of their workers share one interpreter")
async def test_a_killed_peer_returns_with_its_checkpoint_and_catches_up(tmp_path: Path, run: RunFile) -> None:
    async with swarm(tmp_path / "peers") as s:
        peers, (trainer,) = await pipeline(s, run, 4)
        for name in ("more", "still more"):  # stage 0 is the weaker one whatever each peer is measured to do
            await s.start(name, StageRole, pinned(run, 1))
        await reaches(s, peers[0], 4)
        peers[0].kill()
        await reaches(s, peers[2], peers[2].role.position.step + 3)
        back = await s.start("stage0", StageRole, run)  # not pinned: it knows its stage from its checkpoint
        await reaches(s, back, peers[2].role.position.step + 3)
        events = back.log.recent()
        first = next(event["stage"] for event in events if event["name"] == "stage.entered")
        assert first == 0, "it may be moved later"
        assert any(event["name"] == "stage.restored" for event in events)
        assert trainer.role.status()["microbatches"]["lost"] == 0


@pytest.mark.slow
async def test_a_whole_swarm_goes_on_from_its_last_common_checkpoint(
    tmp_path: Path, autojump_clock: MockClock, ended: tuple[RunFile, Path]
) -> None:
    run, before = ended
    async with swarm(shutil.copytree(before, tmp_path / "peers")) as s:
        peers, _ = await pipeline(s, run, 4)
        await reaches(s, peers[0], 6)
        restored = [e["step"] for p in peers for e in p.log.recent() if e["name"] == "stage.restored"]
        assert restored
        assert all(step >= 3 and step % 3 == 0 for step in restored)
        for peer in peers:
            await reaches(s, peer, 7)


@pytest.mark.slow
async def test_a_newcomer_downloads_the_state_and_serves(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile
) -> None:
    async with swarm(tmp_path / "peers") as s:
        peers, _ = await pipeline(s, run, 2)
        await reaches(s, peers[1], 2)
        new = await s.start("new", StageRole, run)
        await reaches(s, new, peers[0].role.position.step + 3)
        assert any(event["name"] == "stage.downloaded" for event in new.log.recent())
        mate = next(p for p in peers if p.role.stage == new.role.stage)
        await until_equal(s, new, mate, beyond=0)


@pytest.mark.slow
async def test_who_leaves_hands_over_without_a_redo(tmp_path: Path, autojump_clock: MockClock, run: RunFile) -> None:
    async with swarm(tmp_path / "peers") as s:
        peers, (trainer,) = await pipeline(s, run, 4)
        await reaches(s, peers[0], 3)
        began = trio.current_time()
        await peers[1].role.leave()
        assert trio.current_time() - began < 9.0
        peers[1].kill()
        await reaches(s, peers[3], peers[3].role.position.step + 3)
        assert trainer.role.status()["microbatches"]["redone"] == 0
        assert all(m.peer != peers[1].host.id.text for m in peers[0].role.members)


@pytest.mark.slow
def test_the_trainer_goes_on_in_the_text_where_it_ended(ended: tuple[RunFile, Path]) -> None:
    _, before = ended
    position = json.loads((before / "trainer0" / "life-position.json").read_text())
    assert position
