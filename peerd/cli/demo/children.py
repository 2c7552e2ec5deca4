"""The demo's processes: starts them, reads their status, kills them, and stops all, so that none is left.

Each child is an ordinary `peerd` process with its own data directory and log file. Its status is read from its control
socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from peerd.cli.demo import tether
from peerd.core.errors import PeerdError
from peerd.run.home import socket_path
from peerd.status.role_status import RoleFigures, figures_of
from peerd.status.snapshot import StatusSnapshot, decode_status

STOP_S: Final = 10.0  # between SIGTERM and SIGKILL
LEFT_S: Final = 5.0  # for processes that killed children have started
THREADS: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
TAIL_LINES: Final = 12


@dataclass(slots=True, eq=False)
class Child:
    """One process of the demo. `snapshot` is its last status, kept after the process has ended."""

    name: str
    process: subprocess.Popen[bytes]
    data_dir: Path
    log: Path
    killed: bool = False
    snapshot: StatusSnapshot = field(default_factory=StatusSnapshot)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def tail(self) -> str:
        """The last lines that the process wrote."""
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])

    def events(self) -> list[dict[str, Any]]:
        """The events that the process wrote to its event log."""
        found = []
        with contextlib.suppress(OSError, ValueError):
            for line in (self.data_dir / "events.jsonl").read_text("utf-8").splitlines():
                found.append(json.loads(line))
        return found

    def role(self) -> RoleFigures:
        """Figures of the process's only role."""
        return next((figures_of(role, RoleFigures) or RoleFigures() for role in self.snapshot.roles), RoleFigures())

    async def ask(self, timeout_s: float) -> None:
        """Update `snapshot` from the control socket. Keeps the old one if the child does not answer."""
        with trio.move_on_after(timeout_s):
            try:
                path = os.fspath(socket_path(self.data_dir))
                async with await trio.open_unix_socket(path) as stream:
                    told = json.loads(b"".join([chunk async for chunk in stream]))
                self.snapshot = decode_status(told, StatusSnapshot)
            except (OSError, trio.BrokenResourceError, ValueError, PeerdError):
                return


class Children:
    """All processes of one demo by name, including ended ones. As a context manager, it stops them on exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name: dict[str, Child] = {}

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, arguments: list[str]) -> Child:
        """Start `peerd <arguments>` with a data directory named after the child."""
        data_dir = self.folder / name
        data_dir.mkdir(mode=0o700, exist_ok=True)
        log = self.folder / f"{name}.log"
        process = tether.start([*arguments, "--data-dir", str(data_dir)], log, THREADS)
        child = self.by_name[name] = Child(name, process, data_dir, log)
        return child

    def kill(self, child: Child) -> None:
        """Kill a child without warning, like a power cut."""
        child.killed = True
        child.process.kill()

    def failed(self) -> Child | None:
        """A child that ended with an error and was not killed by the demo, or None."""
        for child in self.by_name.values():
            if not child.killed and child.process.poll() not in (None, 0):
                return child
        return None

    def stop(self) -> None:
        """Ask all processes to leave, wait, kill the rest, and check that none is left. Else raise PeerdError."""
        try:
            self._ask_to_leave()
        except KeyboardInterrupt:
            pass
        finally:
            for child in self.by_name.values():
                if child.running:
                    child.process.kill()
                child.process.wait()
                if child.process.stdin is not None:
                    child.process.stdin.close()
        left = [child.name for child in self.by_name.values() if not tether.group_is_gone(child.process.pid, LEFT_S)]
        if left:
            raise PeerdError(f"processes of {', '.join(left)} are still running; end them by hand")

    def _ask_to_leave(self) -> None:
        """Terminate all children, the backbone last, so that the others can still notify it that they leave."""
        backbone = [child for child in self.by_name.values() if child.name == "backbone"]
        others = [child for child in self.by_name.values() if child.name != "backbone"]
        for asked in (others, backbone):
            for child in asked:
                if child.running:
                    child.process.terminate()
            deadline = time.monotonic() + STOP_S
            for child in asked:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
