"""`peerd` processes that start at once: each is forked from one parent that has imported torch and peerd.

A process of its own has its own pid, files, environment and end, as any other; only the import is shared. The parent
ends with the process that started it, and kills what it forked.

    python -m tests.worlds.processes.prefork FD    the parent; FD: a socket on which it is asked to fork
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
IMPORTED: Final = (
    "torch",
    "peerd.cli.cli",
    "peerd.daemon.daemon",
    "peerd.daemon.launch",
    *map("roles.{}".format, ("stage", "trainer")),
)
MESSAGE_BYTES: Final = 1 << 17
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork takes one thread along
PEERD: Final = [sys.executable, "-m", "peerd"]


class ForkedProcess:
    """One process, used like a subprocess.Popen."""

    def __init__(self, pid: int, fate: socket.socket) -> None:
        """`fate`: where the parent writes the exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self._fate = fate

    def poll(self) -> int | None:
        """Exit code, or None while the process lives."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once the process has ended."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(PEERD, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._fate], [], [], timeout)[0]:
            text = self._fate.recv(100)
            self.returncode = int(text) if text else -signal.SIGKILL  # the parent is gone, and all that it forked
            self._fate.close()
        return self.returncode


@functools.cache
def _parent() -> socket.socket:
    """The socket of this process's parent of forked processes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.worlds.processes.prefork", str(theirs.fileno())]
        environment = {**os.environ, **ONE_THREAD}
        popen = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], process_group=0)
    atexit.register(popen.wait, timeout=10)
    atexit.register(ours.close)  # before that: at its end the parent ends
    return ours


def start(
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: IO[bytes],
    stderr: int | None = None,
    env: Mapping[str, str],
) -> Any:
    """As subprocess.Popen, for commands that begin with `python -m peerd`."""
    assert list(command[:3]) == PEERD, command
    assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT), "only these are made here"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked = json.dumps({"argv": list(command[3:]), "env": dict(env), "cwd": str(Path.cwd())}).encode()
    with theirs:
        socket.send_fds(_parent(), [asked], [stdout.fileno(), theirs.fileno()])
    pid = ours.recv(100)
    assert pid, "the parent of forked processes has ended"
    return ForkedProcess(int(pid), ours)


def serve(channel: socket.socket) -> list[str]:
    """Fork a process whenever one is asked for; returns in each forked process, with its arguments."""
    children: dict[int, socket.socket] = {}
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready = select.select([channel, reading], [], [])[0]
        if reading in ready:
            os.read(reading, 4096)
            _reap(children)
        if channel in ready:
            message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
            if not message:
                _end(children)
            if pid := os.fork():
                children[pid] = socket.socket(fileno=files[1])
                children[pid].send(str(pid).encode())
                os.close(files[0])
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (channel, *children.values()):
                other.close()
            for end in (reading, writing, files[1]):
                os.close(end)
            return _become(json.loads(message), files[0])


def _reap(children: dict[int, socket.socket]) -> None:
    """Report the exit code of each process that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with children.pop(found[0]) as fate, contextlib.suppress(OSError):  # who asked may be gone
                fate.send(str(os.waitstatus_to_exitcode(found[1])).encode())


def _end(children: dict[int, socket.socket]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    sys.exit(0)


def _become(asked: dict[str, Any], output: int) -> list[str]:
    """Take over files, folder and environment of a process that is asked for; returns its arguments."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(output)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    arguments: list[str] = asked["argv"]
    return arguments


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays in pages that all processes share
    sys.argv = [sys.argv[0], *serve(socket.socket(fileno=int(sys.argv[1])))]
    runpy.run_module("peerd", run_name="__main__", alter_sys=True)
