"""`scripts/gpu_check.py` as it is run on a machine with a GPU; here on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc"),
]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=NO_GPU)])
def test_a_device_codes_copies_and_trains_as_plain_torch_does(device: str) -> None:
    found = check("--device", device, "--json")
    assert found.returncode == 0, found.stderr + found.stdout
    report: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    assert report["met"]
    assert report["codes"]["wrong"] == report["copies"]["wrong"] == report["offload"]["wrong"] == []
    assert min(report["exact"]["float64"]["steps"]) >= 10
    assert report["speed"]["tokens_per_s"] > 0
    if device == "cpu":  # a driver does not tell of processes in containers
        assert len(report["speed"]["bytes_per_parameter"]) == 2


def test_wrong_parts_are_refused() -> None:
    found = check("--device", "cpu", "--only", "codes,colours")
    assert found.returncode == 2
    assert "colours: known are codes, copies, offload, exact, speed" in found.stderr
