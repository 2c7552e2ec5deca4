"""A full disk, as a small tmpfs: at the start it is one sentence, later it costs checkpoints and nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerd.cli.cli import invoke
from peerd.state.state_room import StateRoom
from tests.worlds.processes.processes import processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]
BYTES = 16 << 20
SAID = "peerd: the disk is full: %s can't be written; make room in the data directory, or choose another --data-dir\n"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own at `folder`; the test is skipped where none can be mounted."""
    folder.mkdir()
    options = f"size={BYTES},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs Linux, root and mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, but_bytes: int = 0) -> None:
    """Leave no room, or so much."""
    with (folder / "fill").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(max(0, file.tell() - but_bytes))


@pytest.mark.thorough
def test_a_disk_that_is_full_at_the_start_is_one_sentence(tmp_path: Path) -> None:
    with small_disk(tmp_path / "peer"), processes(tmp_path) as started:
        fill(tmp_path / "peer")
        peer = started.join("peer", "stage", run_file(tmp_path), "/ip4/127.0.0.1/tcp/1")
        assert peer.popen.wait(200) == 1
        assert peer.said == SAID % (peer.data_dir / "lock")


def test_room_for_a_state_is_in_memory_where_the_disk_has_none(tmp_path: Path) -> None:
    """A file that only seems to have room ends the process that writes to it."""
    with small_disk(tmp_path / "disk") as disk:
        assert len(StateRoom(1 << 20, disk).row) == 1 << 20
        fill(disk)
        room = StateRoom(1 << 20, disk).row
        room[:] = bytes(range(256)) * (1 << 12)
        assert room[255] == 255


@pytest.mark.thorough
def test_disks_that_fill_up_cost_checkpoints_and_a_newcomer_on_one_joins(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("backbone", "stage-0", "stage-1", "trainer", "newcomer"):
            stack.enter_context(small_disk(tmp_path / name))
        started = stack.enter_context(processes(tmp_path))
        file = run_file(tmp_path)
        backbone, peers, trainer = started.swarm(file)
        backbone.wait_until(lambda: bool(backbone.role().get("kept_steps")), "it keeps nothing", 90.0)
        for process in (backbone, *peers, trainer):
            fill(process.data_dir)
        for process, missing in ((backbone, "not_kept"), *((peer, "not_saved") for peer in peers)):
            lost = lambda process=process, missing=missing: str(process.role().get(missing) or "")  # noqa: E731
            process.wait_until(lambda lost=lost: bool(lost()), "it reports nothing", 90.0)
            assert "No space left on device" in lost()
            if process is not backbone:
                assert f"{process.data_dir}" in lost()
        assert backbone.role()["kept_steps"], "complete checkpoints stay"
        fill(tmp_path / "newcomer", but_bytes=64 << 10)
        newcomer = started.join("newcomer", "stage", file, backbone.address())
        newcomer.reaches(2)
        newcomer.wait_until(lambda: bool(newcomer.role().get("not_saved")), "it reports nothing", 90.0)
        trainer.reaches(trainer.step() + 20)
        assert trainer.role()["microbatches"]["redone"] == 0
        for process in started.all:
            assert invoke(["status", "--data-dir", str(process.data_dir)]) == 0, "status needs no room"
        for process in (trainer, newcomer, *peers, backbone):
            assert process.end()[0] == 0
            assert process.said.count("warning: checkpoint.not_saved") == (process in (newcomer, *peers))
            assert ("Traceback" if process is backbone else "Error") not in process.said
            assert "a bug" not in process.said
