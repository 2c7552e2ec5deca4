"""Part of benchmarks: processes that receive orders and send answers, each as one JSON line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol


class Start(Protocol):
    """Type of subprocess.Popen, and of its equivalent on a host in a network lab."""

    def __call__(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]: ...


class Told:
    """A process that runs a module of this folder. Its first answer has its id and address."""

    def __init__(self, start: Start, module: str, *arguments: str) -> None:
        scripts = Path(__file__).parents[1]
        path = os.pathsep.join([str(scripts), str(scripts.parent)])
        self._process = start(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_s(self) -> float:
        """Processor time of the process, in user and kernel mode."""
        return cpu_s(self._process.pid)

    def dismiss(self) -> None:
        """Close the process' input, after which it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        self.dismiss()
        self._process.wait(30)


def cpu_s(pid: int) -> float:
    """Processor time of a process, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
