"""A stage that loses its last peer, and sets of roles in one process, as users meet them: with real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.waiting import eventually
from tests.kit.processes import LISTEN, Process, Processes, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]
HANGS_S = 90.0  # nothing here takes a tenth of it on an idle machine


def step_of(process: Process) -> int:
    return max([int(role.get("step") or 0) for role in process.status().get("roles") or []] or [0])


def stage_of(process: Process) -> int:
    return int(process.role().get("stage", -1))


def wait(done: Callable[[], bool], complaint: str) -> None:
    assert eventually(done, HANGS_S), complaint


def training(started: Processes, file: Path, stage_peers: int) -> tuple[str, list[Process], Process]:
    """A backbone's address, so many stage peers of both stages, and a trainer; all have a checkpoint."""
    addr = started.backbone().address()
    peers = [started.join(f"stage-{number}", "stage", file, addr) for number in range(stage_peers)]
    trainer = started.join("trainer", "trainer", file, addr)
    for peer in peers:
        peer.wait_until(lambda peer=peer: bool(peer.role().get("saved_steps")), "it saved nothing", HANGS_S)
    return addr, peers, trainer


def goes_on(trainer: Process, since: float, what: str) -> None:
    """Wait until steps are made again, from wherever it goes on; prints the seconds."""
    steps = [step_of(trainer)]

    def moved_on() -> bool:
        step = step_of(trainer)
        if step and step != steps[-1]:
            steps.append(step)
        return len(steps) > 3

    trainer.wait_until(moved_on, f"it never went on from step {steps[0]}", HANGS_S)
    print(f"{what}: training went on {time.monotonic() - since:.1f} s after the start")


def one_of(peers: list[Process], stage: int) -> Process:
    return next(peer for peer in peers if stage_of(peer) == stage)


@pytest.mark.thorough
def test_a_newcomer_takes_the_stage_whose_only_peer_was_killed(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        file = run_file(tmp_path)
        addr, peers, trainer = training(started, file, 2)
        conductor, victim = one_of(peers, 0), one_of(peers, 1)
        victim.popen.kill()
        conductor.wait_until(lambda: "stage 1 has no peers" in str(conductor.role()), "it did not notice", HANGS_S)
        newcomer, began = started.join("newcomer", "stage", file, addr), time.monotonic()
        goes_on(trainer, began, "a newcomer with a new data directory")
        assert stage_of(newcomer) == 1
        newcomer.wait_for('stage.chosen role=stage stage=1 why="it has no peer"')
        conductor.wait_for("warning: conductor.noted role=stage")
        conductor.wait_for("stage 1 was lost with its last peer: the swarm goes back from step")


@pytest.mark.thorough
def test_a_newcomer_takes_the_stage_of_the_conductor_that_was_killed(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        file = run_file(tmp_path)
        addr, peers, trainer = training(started, file, 2)
        one_of(peers, 0).popen.kill()
        newcomer, began = started.join("newcomer", "stage", file, addr), time.monotonic()
        goes_on(trainer, began, "a newcomer in the conductor's place")
        assert stage_of(newcomer) == 0
        newcomer.wait_for("stage 0 was lost with its last peer: the swarm goes back from step")


@pytest.mark.thorough
def test_a_peer_with_a_checkpoint_of_another_stage_takes_the_empty_one_when_it_starts_again(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        file = run_file(tmp_path)
        addr, peers, trainer = training(started, file, 3)
        few = min((0, 1), key=lambda stage: sum(stage_of(peer) == stage for peer in peers))
        alone = one_of(peers, few)
        again = [peer for peer in peers if peer is not alone][1]
        assert again.end()[0] == 0
        alone.popen.kill()
        alone.popen.wait()
        again, began = started.join(again.name, "stage", file, addr), time.monotonic()
        goes_on(trainer, began, f"a restarted peer of stage {1 - few}")
        assert stage_of(again) == few


@pytest.mark.thorough
def test_a_peer_that_idles_beside_an_empty_stage_moves_there(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        file = run_file(tmp_path)
        _, peers, trainer = training(started, file, 3)
        few = min((0, 1), key=lambda stage: sum(stage_of(peer) == stage for peer in peers))
        alone = one_of(peers, few)
        others = [peer for peer in peers if peer is not alone]
        alone.popen.kill()
        began = time.monotonic()
        goes_on(trainer, began, "a move (after the kill)")
        assert sorted(map(stage_of, others)) == [0, 1]
        assert sum("stage.moved" in peer.said for peer in others) == 1


SETS = [
    pytest.param(("stage", "trainer"), 1, ()),
    pytest.param(("stage", "trainer"), 2, ("stage",)),
    pytest.param(("trainer", "stage"), 1, (), marks=pytest.mark.thorough),
    pytest.param(("trainer", "stage"), 2, ("stage",), marks=pytest.mark.thorough),
    pytest.param(("trainer", "aux"), 1, (), marks=pytest.mark.thorough),
    pytest.param(("aux", "stage", "trainer"), 2, ("stage",), marks=pytest.mark.thorough),
    pytest.param(("backbone", "stage", "trainer", "aux"), 1, (), marks=pytest.mark.thorough),
    pytest.param(("aux", "trainer", "backbone", "stage"), 2, ("stage", "stage"), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("roles", "stages", "others"), SETS)
@pytest.mark.thorough
def test_a_set_of_roles_is_the_first_process_of_a_run(
    tmp_path: Path, roles: tuple[str, ...], stages: int, others: tuple[str, ...]
) -> None:
    file = run_file(tmp_path)
    file.write_text(file.read_text().replace("stages: 2", f"stages: {stages}"))
    with processes(tmp_path) as started:
        options = [text for role in roles for text in ("--role", role)]
        first = started.start("first", "join", *options, "--model", str(file), "--listen", LISTEN)
        for number, role in enumerate(others):
            started.join(f"other-{number}", role, file, first.address())
        first.wait_until(lambda: step_of(first) >= 5, "it does not train", HANGS_S)
        assert "role.failed" not in first.said
