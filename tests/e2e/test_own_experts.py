"""The page's loop with a layer of experts, exactly as it is printed: they live on another peer, behind sockets."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import trio

from peerd.run.config import load_run
from tests.worlds.roles.expert_host import PlainHost
from tests.worlds.roles.training import swarm

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "configs/moe.yaml"
PAGE = (ROOT / "peerd/experts/dmoe.md").read_text("utf-8")
CODE = PAGE.partition("```python\n")[2].partition("```")[0]


def test_the_example_has_thirty_lines_at_most() -> None:
    assert 0 < len(CODE.splitlines()) <= 30


@pytest.fixture
def _script(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "digits.py").write_text(CODE)


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.usefixtures("_script")
async def test_a_loop_of_ones_own_trains_with_experts_of_another_peer(tmp_path: Path) -> None:
    async with swarm(tmp_path / "hosts") as peers:
        host = await peers.start("host", PlainHost, load_run(FILE).run)
        await host.ready.wait()
        paths = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-u", "digits.py", str(FILE), str(host.host.addrs()[0])]
        with trio.fail_after(100):
            ended = await trio.run_process(
                command,
                cwd=tmp_path,
                env={**os.environ, **paths},
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
        said = ended.stdout.decode() + ended.stderr.decode()
        assert ended.returncode == 0, said
        found = re.search(r"accuracy ([\d.]+), calls (\d+)", said)
        assert found, said
        assert float(found[1]) > 0.8, said
        assert int(found[2]) >= 40 * 4, said
        assert sum(expert.version for expert in host.role.experts.values()) >= 40 * 4
