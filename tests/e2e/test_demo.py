"""`peerd demo` as anyone runs it, only shorter: its figures, and that nothing is left whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(300)]


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "peerd", "demo", "--data-dir", str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(folder: Path) -> list[int]:
    """Process ids from the locks of the demo's data directories."""
    texts = [path.read_text() for path in folder.glob("*/lock")]
    return [int(text) for text in texts if text.isdigit()]


def running(process_id: int) -> bool:
    stat = Path(f"/proc/{process_id}/stat")
    if stat.exists() and ") Z " in stat.read_text():
        return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_demo_trains_through_a_kill_and_prints_its_figures(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--json", "--steps", "12")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["steps"] == 12
    assert found["loss_end"] < found["loss_start"] - 1
    assert found["loss_after_kill"] < found["loss_at_kill"]
    assert (found["killed"], found["started_later"], found["microbatches_lost"]) == (1, 1, 0)
    assert found["microbatches"] == 12 * 32 // 4
    assert found["tokens_per_s"] > 0
    assert found["wire_bytes_per_token"] > 0
    assert len(found["sample"]) == 200
    assert (Path(found["checkpoint"]) / "run.yaml").exists()
    assert found["processes_left"] == 0
    assert not [number for number in children_of(tmp_path / "d") if running(number)]


def test_ctrl_c_stops_every_process_of_the_demo(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--calm")
    wait_for(lambda: len(children_of(tmp_path / "d")) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f"stopped; what there is lies in {tmp_path / 'd'}" in err
    assert not [number for number in children_of(tmp_path / "d") if running(number)]


def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--calm")
    wait_for(lambda: len(children_of(tmp_path / "d")) >= 2)
    process.kill()
    process.communicate()
    wait_for(lambda: not [number for number in children_of(tmp_path / "d") if running(number)], 10.0)


def test_a_process_of_the_demo_that_fails_ends_it_with_its_last_words(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--calm")
    log = tmp_path / "d" / "trainer.log"
    wait_for(lambda: log.exists() and "peer id" in log.read_text())
    os.kill(int((tmp_path / "d" / "trainer" / "lock").read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "peerd: trainer was ended by SIGKILL:" in err
    assert "| peer id 12D3KooW" in err
    assert "Traceback" not in err
    assert not [number for number in children_of(tmp_path / "d") if running(number)]
