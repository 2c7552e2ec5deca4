"""Ties a process to its parent, so that nothing is left behind even when the parent is killed.

The parent names itself in the environment and holds the child's standard input open. On Linux the kernel kills the
child when the parent dies; elsewhere, and as a second line, the child sees the end of its standard input.
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
    """`python -P -m peerd ...` in a process group of its own, tied to this process; its output goes to `log`.

    With -P no file in the working directory takes the place of a module that peerd imports.
    Must be called from the main thread: Linux counts the end of the starting thread as the parent's death.
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
    """In the child: end with the parent that named itself. Does nothing for a process started by hand."""
    named = os.environ.pop(PARENT_VARIABLE, "")
    if not named.isdigit():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(named):  # it died before the line above
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
    """True when no process of the child's group is left, or none is before patience ends.

    A child that is killed may just have had a short program run for it, as torch does when it starts.
    """
    if sys.platform == "win32":
        return True
    until = time.monotonic() + patience_s
    while _lives(process_id):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)  # no loop runs any more, and nobody tells when a process that is not our child ends
    return True


def _lives(group: int) -> bool:
    """True while any process of the group lives; not one that has ended and waits to be noticed by its adopter."""
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
