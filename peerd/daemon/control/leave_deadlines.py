"""Deadlines of a process that leaves: how long its roles may take, and a thread that ends the process after that.

Roles have LEAVE_S to send their gradients, and the process ends after DRAIN_S, even if tasks are still running. Both
are extended only while a role saves a state that no other peer is known to have, which the role names in `unsaved`. A
second signal ends that, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import trio

LEAVE_S: Final = 6.5  # for roles to send their gradients
DRAIN_S: Final = 9.8  # until the process ends
STOP_S: Final = 2.0  # until the process ends, after the second signal
_LOOK_S: Final = 0.5  # between checks whether a role still saves a state
_GOODBYE_S: Final = 2.0  # for roles to end after the last of them has saved its state


class LeaveDeadlines:
    """Deadlines of a process that leaves. Calls `tell` with the reason for an extension, as text for the user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._until = 0.0  # by time.monotonic; the process is not ended before

    async def limit(self, scope: trio.CancelScope, unsaved: Callable[[], list[str]]) -> None:
        """Cancel `scope`, in which roles leave, after LEAVE_S and after `unsaved` returns an empty list."""
        await trio.sleep(LEAVE_S)
        told = ""
        while found := unsaved():
            self._until = time.monotonic() + DRAIN_S
            if told != (text := "; ".join(found)):
                self._tell(told := text)
            await trio.sleep(_LOOK_S)
        if told:
            await trio.sleep(_GOODBYE_S)
        scope.cancel()

    def until(self) -> float:
        """Time, by time.monotonic, before which the process must not be ended; 0 if it may be ended now."""
        return self._until


def end_process_after(delay_s: float, code: Callable[[], int], until: Callable[[], float] = lambda: 0.0) -> None:
    """End the process after `delay_s`, even if a job on the device does not end, as a user who pressed Ctrl+C expects.

    `until` may extend the delay, as `LeaveDeadlines.until` does. `code` returns the exit code.
    """

    def end() -> None:
        time.sleep(delay_s)
        while (left_s := until() - time.monotonic()) > 0:
            time.sleep(left_s)
        sys.stderr.write("peerd: a task did not stop in time; ending the process\n")
        os._exit(code())

    threading.Thread(target=end, daemon=True).start()
