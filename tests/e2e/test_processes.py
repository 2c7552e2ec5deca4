"""Whole swarms of real processes on loopback: they train, lose members, are stopped, and come back."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from scripts.waiting import eventually
from tests.worlds.processes.processes import LISTEN, Process, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]


def soon(done: Callable[[], bool], complaint: str, timeout_s: float = 30.0) -> float:
    """Wait until it holds; how long that took."""
    began = time.monotonic()
    assert eventually(done, timeout_s), complaint
    return time.monotonic() - began


def test_a_killed_peer_is_done_without_and_each_other_leaves_well(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        backbone, peers, trainer = started.swarm(run_file(tmp_path), stages=4)
        soon(lambda: served_by(peers) == [0, 0, 1, 1], "stages are not filled", 90)
        trainer.reaches(2)

        conductor = next(peer for peer in peers if peer.role()["conducts"])
        other = next(peer for peer in peers if peer.role()["stage"] != conductor.role()["stage"])
        for victim in (other, conductor):
            victim.popen.kill()
            peers.remove(victim)
            trainer.reaches(trainer.step() + 5)
            assert trainer.role()["microbatches"]["lost"] == 0

        soon(lambda: bool(backbone.status()["swarm"].get("trainers")), "the trainer is not in the directory")
        assert_ends_well(trainer, signal.SIGINT)
        soon(lambda: not backbone.status()["swarm"].get("trainers"), "the trainer's record was not withdrawn", 5.0)

        leaver = next(peer for peer in peers if peer.role()["stage"] == 1)
        peers.remove(leaver)
        gone = leaver.status()["peer"]["id"]
        assert any(gone in connected(peer) for peer in (*peers, backbone))
        assert_ends_well(leaver, signal.SIGTERM)
        for peer in (*peers, backbone):
            assert soon(partial(lacks, peer, gone), f"{peer.name} did not notice that a peer left") < 2
        soon(lambda: gone not in announced(backbone), "its record was not withdrawn", 5.0)

        for process in (*peers, backbone):
            assert_ends_well(process, signal.SIGINT)
        assert not [process.name for process in started.all if "Traceback" in process.said]


def served_by(peers: list[Process]) -> list[int]:
    return sorted(int(peer.role().get("stage", -1)) for peer in peers)


def assert_ends_well(process: Process, number: int) -> None:
    code, seconds = process.end(number)
    assert code == 0, process.said
    assert seconds < 10, process.said


def connected(process: Process) -> set[str]:
    return {peer["peer"] for peer in process.status()["network"]["peers"]}


def lacks(process: Process, peer: str) -> bool:
    return peer not in connected(process)


def announced(process: Process) -> set[str]:
    return {peer["peer"] for stage in process.status()["swarm"].get("stages", []) for peer in stage["peers"]}


@pytest.mark.thorough
@pytest.mark.parametrize("disks_are_lost", [False, True], ids=["from its checkpoints", "from what a backbone kept"])
def test_a_swarm_that_was_killed_goes_on(tmp_path: Path, disks_are_lost: bool) -> None:
    file = run_file(tmp_path)
    with processes(tmp_path) as started:
        backbone, peers, trainer = started.swarm(file)
        trainer.reaches(5)
        soon(lambda: bool(backbone.role().get("kept_steps")), "the backbone keeps nothing", 90.0)
        saved = [max(peer.role()["saved_steps"]) for peer in peers]
        for process in started.all:
            process.popen.kill()
        for process in started.all:
            process.popen.wait()
    for process in started.all:
        if process is not backbone and disks_are_lost:
            shutil.rmtree(process.data_dir)
        process.log.unlink()
    with processes(tmp_path) as started:
        backbone, peers, trainer = started.swarm(file)
        for peer in peers:
            peer.wait_for("stage.restored")
            assert "checkpoint.fetched" in peer.said or not disks_are_lost
        kept = max(backbone.role()["kept_steps"] if disks_are_lost else saved)
        assert kept >= 2
        trainer.reaches(kept + 3)


@pytest.mark.thorough
def test_one_process_with_every_role_begins_a_run(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        file = run_file(tmp_path)
        roles = [text for role in ("aux", "trainer", "backbone", "stage") for text in ("--role", role)]
        first = started.start("first", "join", *roles, "--model", str(file), "--listen", LISTEN)
        for number in range(2):
            started.join(f"other-{number}", "stage", file, first.address())

        def steps() -> list[int]:
            return [int(role.get("step") or 0) for role in first.status().get("roles") or []]

        first.wait_until(lambda: max(steps(), default=0) >= 5, "it does not train", 90.0)
        assert "role.failed" not in first.said
