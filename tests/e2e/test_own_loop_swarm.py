"""Own loops among the other roles: helpers and backbones that join by a loop's line, and a loop that begins again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file
from torch import nn

from peerd.cli.cli import invoke
from scripts.waiting import eventually
from tests.numerics.test_library_is_exact import OPTIMIZERS, Books, User, check
from tests.worlds.processes.processes import LISTEN, Process, Processes, processes
from tests.worlds.processes.user_loops import own_runtime

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]
ROOT: Final = Path(__file__).resolve().parents[2]
LOOP: Final = """
import json, sys, time, torch, peerd
settings = json.loads(sys.argv[1])
steps = settings.pop("steps", 10**9)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 2))
opt = peerd.AveragingOptimizer(
    peerd.Lamb(model.parameters(), lr=0.01), run="own", target_samples=16, samples_per_step=4, model=model,
    scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000), listen=["/ip4/127.0.0.1/tcp/0"],
    save_steps=4, announce=lambda address: print("line", opt.join_line, flush=True), **settings)
with opt:
    opt.write_run_file("run.yaml")
    moments = max(float(s["exp_avg"].abs().max()) for s in opt.state_dict()["state"].values()) if opt.global_step else 0
    print("begins", opt.global_step, opt.param_groups[0]["lr"], moments, flush=True)
    while opt.global_step < steps:
        model(torch.randn(4, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        time.sleep(0.02)
"""


class Loop:
    """A process that runs an own loop. The loop ends by itself only after `steps`, if they are given."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        paths = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        command, env = [sys.executable, "-u", "-c", LOOP, json.dumps(settings)], {**os.environ, **paths}
        self.popen = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)

    def says(self, word: str) -> list[str]:
        """The words after `word` in the line that begins with it."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(word):
                return line.split()[1:]
        raise AssertionError(f"the loop ended with {self.popen.wait()}, and never said {word!r}")

    def link(self) -> str:
        """The line by which others join, without the command before it."""
        return self.says("line")[-1]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@contextlib.contextmanager
def swarm(folder: Path) -> Iterator[tuple[Processes, list[Loop]]]:
    """Processes of peerd, and loops; none outlives the block."""
    folder.chmod(0o700)
    loops: list[Loop] = []
    with processes(folder) as started:
        try:
            yield started, loops
        finally:
            for loop in loops:
                loop.kill()


def address_of(link: str) -> str:
    found = re.fullmatch(r"peerd://([\d.]+):(\d+)/(\w+)/own", link)
    assert found is not None, link
    return f"/ip4/{found[1]}/tcp/{found[2]}/p2p/{found[3]}"


def kept_steps(backbone: Process) -> list[int]:
    return list(backbone.role().get("kept_steps") or [])


def test_a_helper_sums_for_own_loops_and_the_result_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines are stated: the helper's is the best by far."""
    with own_runtime(tmp_path, monkeypatch), processes(tmp_path) as started:
        books, make = Books(monkeypatch), OPTIMIZERS["adamw"]
        slow = {"min_peers": 2, "upload_mbit": 1.0, "download_mbit": 1.0}
        first = User(1, make, books, **slow)
        first.address()
        link = first.opt.join_line.split()[-1]
        helper = started.start("helper", "join", link, "--yes", "--listen", LISTEN, "--upload-mbit", "100")
        helper.wait_until(lambda: helper.role().get("state") == "running", "it never helped")
        assert "joining as aux, which this run needs" in helper.said
        second = User(2, make, books, bootstrap=first.address(), **slow)
        check(books, [first, second], make)
        rounds = helper.role()["averaging"]["rounds"]
        assert rounds > 0
        assert helper.end()[0] == 0


def test_a_backbone_keeps_own_loops_and_a_new_one_goes_on_where_they_were_killed(tmp_path: Path) -> None:
    with swarm(tmp_path) as (started, loops):
        loops.append(Loop(tmp_path, min_peers=2))
        link = loops[0].link()
        loops.append(Loop(tmp_path, min_peers=2, bootstrap=[address_of(link)]))
        keeper = started.start("keeper", "join", link, "--yes", "--role", "backbone", "--listen", LISTEN)
        keeper.wait_until(lambda: len(kept_steps(keeper)) >= 2, "it never kept two checkpoints")
        assert loops[1].says("begins")[0] == "0"
        for loop in loops:
            loop.kill()
        assert invoke(["export", "--backbone", str(keeper.data_dir), "--out", str(tmp_path / "out")]) == 0
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert set(weights) == set(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).state_dict())
        loops.append(Loop(tmp_path, bootstrap=[keeper.address()], alone=True))
        step, lr, moments = loops[-1].says("begins")
        assert int(step) in kept_steps(keeper)
        assert float(lr) == pytest.approx(0.005 * (1 + math.cos(math.pi * int(step) / 1000)), rel=1e-6)
        assert float(moments) > 0
        before = max(kept_steps(keeper))
        keeper.wait_until(lambda: max(kept_steps(keeper)) > before, "it never kept another one")


def test_loops_that_end_between_two_checkpoints_leave_their_last_step_to_a_backbone(tmp_path: Path) -> None:
    with swarm(tmp_path) as (started, loops):
        loops.append(Loop(tmp_path, min_peers=2, steps=6))
        link = loops[0].link()
        keeper = started.start("keeper", "join", link, "--yes", "--role", "backbone", "--listen", LISTEN)
        loops.append(Loop(tmp_path, min_peers=2, steps=6, bootstrap=[address_of(link), keeper.address()]))
        for loop in loops:
            assert loop.popen.wait(100) == 0
        assert max(kept_steps(keeper)) == 6
        loops.append(Loop(tmp_path, bootstrap=[keeper.address()], alone=True))
        assert loops[-1].says("begins")[0] == "6"


@pytest.mark.thorough
def test_a_backbone_that_comes_first_is_started_with_the_run_file_of_a_loop(tmp_path: Path) -> None:
    with swarm(tmp_path) as (started, loops):
        loops.append(Loop(tmp_path))
        loops[0].says("begins")
        loops[0].kill()
        keeper = started.start("keeper", "backbone", "--model", str(tmp_path / "run.yaml"), "--listen", LISTEN)
        loops.append(Loop(tmp_path, bootstrap=[keeper.address()]))
        keeper.wait_until(lambda: bool(kept_steps(keeper)), "it never kept a checkpoint")


@pytest.mark.thorough
def test_a_loop_of_invited_peers_lets_in_those_with_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = {}
    for name in ("organizer", "ann", "bob", "helper"):
        assert invoke(["identity", "--data-dir", str(tmp_path / name), "--json"]) == 0
        ids[name] = json.loads(capsys.readouterr().out)["peer_id"]
    for name, roles in (("ann", "trainer"), ("helper", "aux")):
        issue = ["token", "issue", "--run", "own", "--peer", ids[name], "--roles", roles]
        assert invoke([*issue, "--data-dir", str(tmp_path / "organizer")]) == 0
        (tmp_path / name / "access.token").write_text(capsys.readouterr().out)
    invited = {"organizer": ids["organizer"], "min_peers": 2}
    with swarm(tmp_path) as (started, loops):
        loops.append(Loop(tmp_path, data_dir="organizer", **invited))  # the organizer's own needs no token
        link = loops[0].link()
        loops.append(Loop(tmp_path, data_dir="bob", bootstrap=[address_of(link)], **invited))
        assert loops[1].popen.wait(100) != 0
        loops.append(Loop(tmp_path, bootstrap=[address_of(link)], wait_s=10))
        assert loops[2].popen.wait(100) != 0
        loops.append(Loop(tmp_path, data_dir="ann", bootstrap=[address_of(link)], **invited))
        assert loops[3].says("begins")[0] == "0"
        helper = started.start("helper", "join", link, "--yes", "--listen", LISTEN)
        helper.wait_until(lambda: helper.role().get("state") == "running", "it never helped")
        assert f"signed by its organizer {ids['organizer']}" in helper.said
        eventually(lambda: helper.role()["waits_for"] is None, 60)


def test_roles_that_compute_are_told_to_run_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with swarm(tmp_path) as (_, loops):
        loops.append(Loop(tmp_path))
        loops[0].says("begins")
        for role in ("trainer", "stage"):
            assert invoke(["join", "--role", role, "--model", str(tmp_path / "run.yaml")]) == 2
            assert "whose model is in its users' own loops; allowed: aux, backbone" in capsys.readouterr().err
