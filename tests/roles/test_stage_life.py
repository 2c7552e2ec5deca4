"""The life of stage peers: they join, save, leave, come back, and refuse what is wrong, while training goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import ConfigError, RemoteError
from peerd.core.frame import TensorFrame
from peerd.core.messages.handover import PassAnswer, PassRequest, Ticket
from peerd.core.messages.swarm import StageAnswer, StageForward
from peerd.core.run.runfile import CheckpointSection, EvaluateSection, RunFile, fingerprint
from peerd.service.run_services import RunServices
from peerd.sim.clock import run_virtual
from roles.backbone import BackboneRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.exact import write_texts
from tests.worlds.roles.training import pinned, pipeline, reaches, small_run, swarm, until_equal


def life_run(folder: Path) -> RunFile:
    """A run on texts that are made in `folder`."""
    checkpoint = CheckpointSection(every_steps=3, keep=2)
    return small_run("life", write_texts(folder), EvaluateSection(every_steps=0), checkpoint)


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
        assert back.role.status()["stage"] == 0
        assert any(event["name"] == "stage.restored" for event in back.log.recent())
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
async def test_a_broken_checkpoint_is_named(
    tmp_path: Path, autojump_clock: MockClock, ended: tuple[RunFile, Path]
) -> None:
    run, before = ended
    peers = shutil.copytree(before, tmp_path / "peers")
    for file in (peers / "stage0").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(BaseExceptionGroup) as caught:
        await start_alone(peers, pinned(run, 0))
    error = single(caught.value)
    assert isinstance(error, ConfigError)
    assert "safetensors" in str(error)


async def start_alone(directory: Path, run: RunFile) -> None:
    async with swarm(directory) as s:
        await s.start("stage0", StageRole, run)
        await trio.sleep_forever()


@pytest.mark.slow
async def test_other_settings_are_named(tmp_path: Path, autojump_clock: MockClock, run: RunFile) -> None:
    async with swarm(tmp_path / "peers") as s:
        peers, (trainer,) = await pipeline(s, run, 2)
        await reaches(s, peers[0], 1)  # by then the stage peers have announced themselves and their settings
        other = msgspec.structs.replace(run, optimizer=msgspec.structs.replace(run.optimizer, lr=0.5))
        ctx, stranger = peers[0].role._ctx, trainer.role._ctx
        with pytest.raises(ConfigError, match=r"optimizer\.lr is 0\.5 here and 0\.001 there"):
            with trio.fail_after(200):
                await TrainerRole(with_run(stranger, other)).run()
        assert ctx.run == pinned(run, 0)


async def test_bad_frames_are_refused_and_change_nothing(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile
) -> None:
    async with swarm(tmp_path / "peers") as s:
        await s.start("backbone", BackboneRole, None)
        stage = await s.start("stage1", StageRole, pinned(run, 1))
        await stage.ready.wait()
        rpc, mark = s.peers["backbone"].role._ctx.rpc, fingerprint(run)
        before = stage.role.post.state.model.vector().copy()
        good = frame(np.zeros((2, 16, 16), "float32"))
        targets = frame(np.zeros((2, 16), "int64"))
        bad: list[list[TensorFrame]] = [
            [frame(np.full((2, 16, 16), np.nan, "float32")), targets],
            [frame(np.zeros((2, 16, 8), "float32")), targets],
            [frame(np.zeros((2, 16, 16), "float64")), targets],
            [good, frame(np.full((2, 16), 256, "int64"))],
            [good, frame(np.full((2, 16), -1, "int64"))],
            [good],
        ]
        names = [s.peers["backbone"].host.id.text, stage.host.id.text]
        body = PassRequest(mark, 1, names[0], Ticket(0, 7, 0, 0, 1, 0, names), None)
        s.peers["backbone"].host.learn(stage.host.id, stage.host.addrs())
        for frames in bad:
            with pytest.raises(RemoteError):
                await rpc.call(stage.host.id, "handover/2/pass", body, PassAnswer, frames=frames, timeout_s=10)
        at_a_step: Any = 99
        for wrong in (StageForward(b"x" * 16, 1), StageForward(mark, 0), StageForward(mark, 1, at_a_step)):
            with pytest.raises(RemoteError):
                await rpc.call(stage.host.id, "stage/6/forward", wrong, StageAnswer, frames=[good], timeout_s=10)
        assert (stage.role.post.state.model.vector() == before).all()
        assert stage.role.post.state.model.held == []


@pytest.mark.slow
def test_the_trainer_goes_on_in_the_text_where_it_ended(ended: tuple[RunFile, Path]) -> None:
    _, before = ended
    position = json.loads((before / "trainer0" / "life-position.json").read_text())
    assert position


def frame(array: Any) -> TensorFrame:
    return TensorFrame(array.dtype.name, array.shape, array.data.cast("B"))


def with_run(ctx: Any, run: RunFile) -> Any:
    return dataclasses.replace(ctx, run=run, services=RunServices(run, ctx.host, ctx.rpc, ctx.dht, ctx.clock))


def single(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
