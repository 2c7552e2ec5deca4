"""Ties a child process to its parent, so that the child ends even if the parent is killed.

The parent passes its process id in the environment and keeps the child's standard input open. On Linux the kernel kills
the child when the parent dies. Elsewhere, and as a fallback, the child exits at the end of its standard input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import psutil

PARENT_VARIABLE: Final = "PEERD_PARENT"
_PR_SET_PDEATHSIG: Final = 1
_LOOK_S: Final = 0.02


def start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `python -P -m peerd ...` in its own process group, tied to this process, with its output in `log`.

    With -P, files in the working directory cannot replace modules that peerd imports. Must be called from the main
    thread: Linux takes the end of the starting thread for the parent's death.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "peerd", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())},
            process_group=0 if sys.platform != "win32" else None,
        )


def tie() -> None:
    """In a child: make this process end with its parent. Does nothing in a process that was not started by `start`."""
    named = os.environ.pop(PARENT_VARIABLE, "")
    if not named.isdigit():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(named):  # the parent died before prctl
        os._exit(1)
    threading.Thread(target=_watch_input, name="tether", daemon=True).start()


def _watch_input() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    os._exit(1)


def group_is_gone(process_id: int, patience_s: float = 0.0) -> bool:
    """Wait up to `patience_s` until no process of the child's group is left. Returns False if some remain.

    A killed child may leave a short-lived process, as torch starts one when it is imported.
    """
    if sys.platform == "win32":
        return True
    until = time.monotonic() + patience_s
    while _lives(process_id):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)  # no event loop is running, and there is no signal for processes that are not our children
    return True


def _lives(group: int) -> bool:
    """True while any process of the group runs. Zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (psutil.Error, ProcessLookupError):
            continue
    return False
