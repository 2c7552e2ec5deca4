"""Starts `peerd` as a process, with its data directory and log in one folder, and reads its status.

For tests, benchmarks and the soak test. The caller must end the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peerd.daemon.control import socket
from peerd.run.home import socket_path


class PeerdProcess:
    """One `peerd` process, its output and its status."""

    def __init__(
        self,
        name: str,
        folder: Path,
        arguments: Sequence[str],
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        """Start `peerd ARGUMENTS`. All processes of a run share `folder`.

        `start` is called like subprocess.Popen, for example to start the process on another host.
        """
        self.name = name
        self.data_dir, self.log = folder / name, folder / f"{name}.log"
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700, exist_ok=True)
        with self.log.open("ab") as output:
            self.popen = start(
                [sys.executable, "-m", "peerd", *arguments, "--data-dir", str(self.data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime)},
            )

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def events(self) -> list[dict[str, Any]]:
        """The complete lines of its event log."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.data_dir / "events.jsonl").read_text("utf-8").splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def status(self) -> dict[str, Any]:
        """Its status snapshot, or {} if it does not answer."""
        with contextlib.suppress(OSError, ValueError):
            return socket.fetch(str(socket_path(self.data_dir)))
        return {}

    def role(self) -> dict[str, Any]:
        """Status of its first role."""
        found: dict[str, Any] = (self.status().get("roles") or [{}])[0]
        return found

    def addr(self) -> str:
        """The first address at which it listens, or "" if there is none yet."""
        addrs: list[str] = self.status().get("peer", {}).get("addrs") or [""]
        return addrs[0]
