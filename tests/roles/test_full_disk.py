"""Disks that are full, or that hang: training goes on, what is missing is said, and the next checkpoint is tried."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.cli.cli import invoke
from peerd.model import checkpoint
from peerd.model.frozen_state import FrozenState
from peerd.run.runfile import RunFile
from peerd.state.checkpoints import stage_checkpoints
from tests.worlds.processes.processes import run_file
from tests.worlds.roles.training import Peer, pipeline, reaches, small_run, swarm


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run(tmp_path, run="disk", checkpoint={"every_steps": 2, "keep": 2})


class Disk:
    """A disk that fills up or hangs, for checkpoints below `folder`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.lets_go = False, trio.Event()
        self.tried: list[str] = []
        self.held: list[str] = []  # names of the jobs that wait for a disk that hangs
        self._folder = folder
        original = checkpoint.write_state

        def write_state(path: Path, state: FrozenState) -> bytes:
            if path.is_relative_to(self._folder):
                self.tried.append(path.name)
                if self.full:
                    path.write_bytes(b"as much as there was room for")
                    raise OSError(errno.ENOSPC, "No space left on device")
            return original(path, state)

        monkeypatch.setattr(checkpoint, "write_state", write_state)

    def hang(self, files: Any) -> None:
        """From the first checkpoint on, hold all jobs of this worker for files until `lets_go` is set."""
        run = files.run

        async def held(job: Any, *, name: str, **more: Any) -> Any:
            if self.held or name == "write a checkpoint":
                self.held.append(name)
                await self.lets_go.wait()
            return await run(job, name=name, **more)

        files.run = held


async def saved(peer: Peer) -> None:
    with trio.fail_after(200):
        await peer.role.post.saving.written()


@pytest.mark.slow
@pytest.mark.usefixtures("autojump_clock")
async def test_a_full_disk_costs_checkpoints_and_nothing_else(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "peers" / "stage0", monkeypatch)
    disk.full = True
    async with swarm(tmp_path / "peers") as s:
        (peer, _), (trainer,) = await pipeline(s, run, 2)
        await peer.ready.wait()
        await reaches(s, peer, 5)
        await saved(peer)
        said = peer.role.status()["not_saved"]
        folder = tmp_path / "peers" / "stage0" / "checkpoints" / "disk" / "stage-0"
        assert f"{folder}: No space left on device (" in said
        assert said.endswith(" MB free)")
        warnings = [event for event in peer.log.recent(1000) if event["name"] == "checkpoint.not_saved"]
        assert [event["level"] for event in warnings].count("warn") == 1
        assert str(folder) in str(warnings[0])
        assert [file.name for file in folder.iterdir()] == []  # nor does it leave anything that takes room
        assert len(disk.tried) >= 2
        disk.full = False
        await reaches(s, peer, peer.role.step + 3)
        await saved(peer)
        assert peer.role.status()["not_saved"] is None
        assert peer.role.status()["saved_steps"]
        assert trainer.role.status()["microbatches"]["redone"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("autojump_clock")
async def test_steps_go_on_while_a_disk_hangs_and_the_newest_state_is_the_next_to_be_written(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "peers" / "stage0", monkeypatch)
    monkeypatch.setattr(stage_checkpoints, "_HANGS_S", 0.0)
    async with swarm(tmp_path / "peers") as s:
        (peer, _), _ = await pipeline(s, run, 2)
        disk.hang(peer.role._ctx.worker("files"))
        await peer.ready.wait()
        await reaches(s, peer, 9)
        assert disk.held.count("write a checkpoint") == 1
        assert disk.tried == []
        assert "the checkpoint of step 2 is not yet written to" in peer.role.status()["not_saved"]
        waiting = peer.role.post.saving._waiting[0].step
        assert waiting >= 8
        disk.lets_go.set()
        await saved(peer)
        steps_tried = [int(name[5:13]) for name in disk.tried]
        assert steps_tried[0] == 2
        assert steps_tried[1] >= waiting
        assert peer.role.status()["not_saved"] is None


def test_a_full_disk_at_the_start_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peerd.run.home._try_lock", full)
    line = f"join --role stage --model {run_file(tmp_path)} --data-dir {tmp_path / 'data'}"
    assert invoke(line.split()) == 1
    said = capsys.readouterr().err
    assert said == "peerd: the disk is full; make room in the data directory, or choose another --data-dir\n"
