"""`peerd demo` as anyone runs it, only shorter: its figures, and that nothing is left whatever happens to it.

The first run starts in a folder with files that have the names of modules; no process of a demo may import them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_odd_folders import odd

__all__ = ["odd"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc"),
]
ALL = 7  # the demo, a backbone, four stage peers, a trainer


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "peerd", "demo", "--data-dir", str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_of(folder: Path) -> list[int]:
    """Every process that works in the folder, the demo itself included, whatever it is doing."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may end while we look
            if entry.name.isdigit() and str(folder) in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return found


def started(demo: subprocess.Popen[str]) -> bool:
    """Returns once the demo has said that all its processes run; False when it ended without."""
    assert demo.stdout is not None
    return any("started a backbone, 4 stage peers and a trainer" in line for line in demo.stdout)


def ended(folder: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a demo that kills one of its processes, and trains all the same."""
    process = demo(folder, "--json", *arguments)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert found["steps"] == int(arguments[-1])
    assert found["loss_end"] < found["loss_start"] - 1
    assert found["loss_after_kill"] < found["loss_at_kill"]
    assert found["killed"] == 1
    assert found["processes_left"] == 0
    assert processes_of(folder) == []
    return found


def test_the_demo_trains_through_a_kill_and_prints_its_figures(odd: Path) -> None:
    found = ended(odd / "d", "--steps", "12")
    assert (found["started_later"], found["microbatches_lost"]) == (1, 0)
    assert found["microbatches"] == 12 * 32 // 4
    assert found["tokens_per_s"] > 0
    assert found["wire_bytes_per_token"] > 0
    assert len(found["sample"]) == 200
    assert (Path(found["checkpoint"]) / "run.yaml").exists()
    exported, written, measured = typed(found["commands"], odd)
    assert "run demo, step 12; validation loss " in exported
    assert written.startswith("def ")
    assert "perplexity" in measured


def typed(commands: list[str], folder: Path) -> list[str]:
    """The output of the three lines with which a demo ends, pasted into a shell elsewhere."""
    said = []
    for command in commands:
        process = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)
        assert process.returncode == 0, f"{command}\n{process.stderr}"
        said.append(process.stdout)
    return said


@pytest.mark.alone
@pytest.mark.thorough
def test_the_experts_of_a_killed_host_come_back_with_the_weights_of_their_checkpoints(tmp_path: Path) -> None:
    found = ended(tmp_path / "d", "--kind", "moe", "--steps", "45")
    assert found["experts_orphaned"] > 0
    assert found["experts_back"] == found["experts_orphaned"]
    assert found["same_weights"] >= 0.8 * found["experts_back"]  # the rest: killed between its disk and its holders
    assert found["updates_lost"] >= 0
    assert set(found["taken_over"].values()) <= {"host-1", "host-2", "host-3", "host-4"}
    exported, written, measured = typed(found["commands"], tmp_path)
    assert "no checkpoint of" not in exported  # all experts are in the model
    assert (tmp_path / "d" / "model" / "model_experts.py").exists()
    assert len(written) > 100
    assert "perplexity" in measured


def test_ctrl_c_stops_every_process_of_the_demo(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--calm")
    assert started(process)
    assert len(processes_of(tmp_path)) >= ALL
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0
    assert f"stopped; the data so far is in {tmp_path / 'd'}" in err
    assert processes_of(tmp_path) == []


def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--calm")
    assert started(process)
    watched = [os.pidfd_open(pid) for pid in processes_of(tmp_path)]
    assert len(watched) >= ALL
    process.kill()
    process.communicate()
    for ending in watched:
        assert select.select([ending], [], [], 10.0)[0]  # readable once that process has ended
        os.close(ending)
    assert processes_of(tmp_path) == []


def test_a_process_of_the_demo_that_fails_ends_it_with_its_last_words(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--calm")
    assert started(process)
    assert len(processes_of(tmp_path)) >= ALL
    os.kill(int((tmp_path / "d" / "backbone" / "lock").read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "peerd: backbone was ended by SIGKILL:" in err
    assert "| peer id 12D3KooW" in err
    assert "Traceback" not in err
    assert processes_of(tmp_path) == []
