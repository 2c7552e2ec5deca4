"""`peerd demo --kind moe` as anyone runs it, only shorter: a host is killed, and its experts come back elsewhere."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_demo import demo, processes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc"),
]


@pytest.mark.thorough
def test_the_experts_of_a_killed_host_come_back_with_the_weights_of_their_checkpoints(tmp_path: Path) -> None:
    process = demo(tmp_path / "d", "--kind", "moe", "--json", "--steps", "45")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["steps"] == 45
    assert found["killed"] == 1
    assert found["loss_end"] < found["loss_start"] - 1
    assert found["loss_after_kill"] < found["loss_at_kill"]
    assert found["experts_orphaned"] > 0
    assert found["experts_back"] == found["experts_orphaned"], err
    assert found["same_weights"] >= 0.8 * found["experts_back"]  # the rest: killed between its disk and its holders
    assert found["updates_lost"] >= 0
    assert set(found["taken_over"].values()) <= {"host-1", "host-2", "host-3", "host-4"}
    assert found["processes_left"] == 0
    assert processes_of(tmp_path) == []
    told = [typed(command) for command in found["commands"]]
    assert "no checkpoint of" not in told[0]  # all experts are in the model
    assert (tmp_path / "d" / "model" / "model_experts.py").exists()
    assert len(told[1]) > 100
    assert "perplexity" in told[2]


def typed(command: str) -> str:
    """Output of a command line, which has to succeed."""
    ended = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
