"""scripts/swarm.py: what it prints, and that another process with other hash seeds repeats the run exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _swarm(*options: str, hash_seed: str = "0") -> dict[str, Any]:
    command = [sys.executable, "scripts/swarm.py", "--json", "--hosts", "6", "--seconds", "20", *options]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    del report["wall_s"]
    return report


@pytest.mark.slow
def test_a_run_repeats_in_another_process_whatever_its_hash_seed() -> None:
    options = ("--dht", "--churn", "0.5", "--loss", "0.01")
    first = _swarm(*options, hash_seed="1")
    assert _swarm(*options, hash_seed="2") == first
    assert first["left"] == 3
    assert first["gets_found"] == first["gets"] > 0
    assert first["pings_answered"] > 0.9 * first["pings"] > 10
    assert _swarm(*options, "--seed", "2")["trace"] != first["trace"]
