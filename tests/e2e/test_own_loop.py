"""The page's loop of one's own, exactly as it is printed there: three processes, one classifier."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "peerd/library/user-loop.md").read_text("utf-8")
CODE = PAGE.partition("```python\n")[2].partition("```")[0]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "digits.py", *arguments]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **paths}, stdout=subprocess.PIPE, text=True)


def test_the_example_has_thirty_lines_at_most() -> None:
    assert 0 < len(CODE.splitlines()) <= 30


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_three_processes_train_one_classifier_and_end_with_the_same_parameters(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "digits.py").write_text(CODE)
    processes = [start(tmp_path)]
    try:
        assert processes[0].stdout is not None
        address = processes[0].stdout.readline().split()[-1]
        processes += [start(tmp_path, address) for _ in range(2)]
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], said
    found = [re.search(r"accuracy ([\d.]+), parameters ([0-9a-f]{16})", text) for text in said]
    assert all(found), said
    assert all(float(match[1]) > 0.9 for match in found if match), said
    assert len({match[2] for match in found if match}) == 1, said
