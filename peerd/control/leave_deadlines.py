"""Leaving: how long a process may take to end, and what ends it after that.

Roles have LEAVE_S to hand in what they hold, and the process ends after DRAIN_S, whatever still runs. Both are longer
only while a role writes a state that nobody else is known to have, which the role names in `unsaved`; the second signal
ends that, too.
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
_LOOK_S: Final = 0.5  # between looks whether a role still writes
_GOODBYE_S: Final = 2.0  # for roles to end after the last of them has written


class LeaveDeadlines:
    """Time limits of one process that leaves. `tell` receives the reason for a longer wait, as text for the user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._until = 0.0  # by time.monotonic: the process is not ended before that

    async def limit(self, scope: trio.CancelScope, unsaved: Callable[[], list[str]]) -> None:
        """Cancel `scope`, in which roles leave, after LEAVE_S, or shortly after `unsaved` names nothing any more."""
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
    """End the process after `delay_s`, as promised to the user that pressed Ctrl+C, even when a job on the device does
    not end. `until`: as `LeaveDeadlines.until`.
    """

    def end() -> None:
        time.sleep(delay_s)
        while (left_s := until() - time.monotonic()) > 0:
            time.sleep(left_s)
        sys.stderr.write("peerd: something did not stop in time; ending the process\n")
        os._exit(code())

    threading.Thread(target=end, daemon=True).start()
