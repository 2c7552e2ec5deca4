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
from pathlib import Path
from typing import Final

PARENT_VARIABLE: Final = "PEERD_PARENT"
_PR_SET_PDEATHSIG: Final = 1


def start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """`python -m peerd ...` in a process group of its own, tied to this process; its output goes to `log`.

    Must be called from the main thread: Linux counts the end of the starting thread as the parent's death.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "peerd", *arguments],
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


def group_is_gone(process_id: int) -> bool:
    """Whether no process of the child's group is left."""
    if sys.platform == "win32":
        return True
    try:
        os.killpg(process_id, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
