"""Bridge between a plain thread and a trio loop: jobs go to the loop, permissions and failures come back.

The thread waits on a queue of its own, never inside trio, so that Ctrl+C reaches it at any time; a thread that is
interrupted while it waits tells the loop, and is let go within a bounded time. Independent of the jobs and of the
reason to wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

import trio

_RETREAT_S: Final = 10.0  # for the loop's work under way when the thread is interrupted


class LoopBridge:
    """The bridge of one thread. `interrupted` runs on the loop when the thread stopped waiting; its event ends that."""

    def __init__(self, interrupted: Callable[[threading.Event], None]) -> None:
        self._interrupted = interrupted
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._token: trio.lowlevel.TrioToken | None = None
        self._failure: BaseException | None = None

    # --- the thread ---------------------------------------------------------------------------------------------

    def call(self, job: Callable[[], None]) -> None:
        """Run a job on the loop, soon; raises the failure that an earlier wait raised, if any."""
        if self._failure is not None:
            raise self._failure
        self.send(job)

    def wait(self) -> None:
        """Wait until the loop lets the thread go; raises the loop's failure instead, if there is one."""
        with ExitStack() as interrupted:
            interrupted.callback(self._retreat)
            answer = self._answers.get()
            interrupted.pop_all()
        if answer is not None:
            self._failure = answer
            raise answer

    def send(self, job: Callable[[], None]) -> None:
        """Run a job on the loop, soon, if it still runs."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):  # `fail` has left the reason in the queue
                self._token.run_sync_soon(job)

    def _retreat(self) -> None:
        gone = threading.Event()
        self.send(lambda: self._interrupted(gone))
        gone.wait(_RETREAT_S if self._token is not None and self._failure is None else 0)

    # --- the loop -----------------------------------------------------------------------------------------------

    def open(self, token: trio.lowlevel.TrioToken) -> None:
        """Take jobs for the loop of `token`; called on it, before anything else there."""
        self._token = token

    def let_go(self) -> None:
        """End the thread's wait, the one under way or the next one."""
        self._answers.put(None)

    def fail(self, failure: BaseException) -> None:
        """Let the thread's wait raise, the one under way or the next one."""
        self._answers.put(failure)

    def take_back(self) -> None:
        """Forget permissions that the thread has not taken; failures stay."""
        waiting = [self._answers.get_nowait() for _ in range(self._answers.qsize())]
        for failure in filter(None, waiting):
            self._answers.put(failure)
