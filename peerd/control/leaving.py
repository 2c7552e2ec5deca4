"""Leaving: how long a process has for it, and what ends it then.

A user who pressed Ctrl+C waits for DRAIN_S at most, whatever still runs, and longer only while a role writes the last
copy of something, which it names; the second Ctrl+C ends that, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import trio

LEAVE_S: Final = 6.5  # for roles to hand in what they hold
DRAIN_S: Final = 9.8  # after this the process ends
STOP_S: Final = 2.0  # the same after the second signal
LOOK_S: Final = 1.0  # between looks whether roles that leave still write


class Leaving:
    """See the module's header. `tell` is told why leaving takes longer, in words."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._until = 0.0  # by time.monotonic, the process may run at least so long

    async def limit(self, scope: trio.CancelScope, reasons: Callable[[], list[str]]) -> None:
        """Cancel `scope`, in which roles leave, after LEAVE_S: later while there are `reasons`."""
        await trio.sleep(LEAVE_S)
        told = ""
        while why := reasons():
            self._until = time.monotonic() + DRAIN_S
            if told != (told := "; ".join(why)):
                self._tell(told)
            await trio.sleep(LOOK_S)
        scope.cancel()

    def until(self) -> float:
        """The moment, by time.monotonic, before which the process must not be ended; 0 if there is none."""
        return self._until


def end_process_after(delay_s: float, code: Callable[[], int], until: Callable[[], float] = lambda: 0.0) -> None:
    """End the process after `delay_s`, as promised to the user that pressed Ctrl+C, even when a job on the device does
    not end. `until`: as `Leaving.until`.
    """

    def end() -> None:
        time.sleep(delay_s)
        while (left_s := until() - time.monotonic()) > 0:
            time.sleep(left_s)
        sys.stderr.write("peerd: something did not stop in time; ending the process\n")
        os._exit(code())

    threading.Thread(target=end, daemon=True).start()
