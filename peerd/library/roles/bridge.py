"""Bridge between a plain thread and a trio loop: the thread sends jobs to the loop, which releases it or raises errors.

The thread waits on a queue of its own, never inside trio, so that Ctrl+C reaches it at any time. If it is interrupted
while it waits, it notifies the loop and returns within 10 s. The bridge does not depend on the jobs nor on the reason
to wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

import trio

_RETREAT_S: Final = 10.0  # time for the loop to finish its current work after an interrupt


class LoopBridge:
    """The bridge of one thread. `interrupted` runs on the loop if the thread's wait was interrupted.

    It gets an event; the thread waits until the event is set, at most 10 s.
    """

    def __init__(self, interrupted: Callable[[threading.Event], None]) -> None:
        self._interrupted = interrupted
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._token: trio.lowlevel.TrioToken | None = None
        self._failure: BaseException | None = None

    # --- the thread ---------------------------------------------------------------------------------------------

    def call(self, job: Callable[[], None]) -> None:
        """Queue a job on the loop. Raises the failure that an earlier wait raised, if any."""
        if self._failure is not None:
            raise self._failure
        self.send(job)

    def wait(self) -> None:
        """Wait until the loop releases the thread. Raises the loop's failure, if there is one."""
        with ExitStack() as interrupted:
            interrupted.callback(self._retreat)
            answer = self._answers.get()
            interrupted.pop_all()
        if answer is not None:
            self._failure = answer
            raise answer

    def send(self, job: Callable[[], None]) -> None:
        """Queue a job on the loop. Does nothing if the loop has ended."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):  # `fail` has put the reason into the queue
                self._token.run_sync_soon(job)

    def _retreat(self) -> None:
        gone = threading.Event()
        self.send(lambda: self._interrupted(gone))
        gone.wait(_RETREAT_S if self._token is not None and self._failure is None else 0)

    # --- the loop -----------------------------------------------------------------------------------------------

    def open(self, token: trio.lowlevel.TrioToken) -> None:
        """Accept jobs for the loop of `token`. Call it on that loop before the other methods."""
        self._token = token

    def let_go(self) -> None:
        """Release the thread from its current wait, or from the next one."""
        self._answers.put(None)

    def fail(self, failure: BaseException) -> None:
        """Make the thread's current wait, or the next one, raise `failure`."""
        self._answers.put(failure)

    def take_back(self) -> None:
        """Discard releases that the thread has not consumed. Failures stay queued."""
        waiting = [self._answers.get_nowait() for _ in range(self._answers.qsize())]
        for failure in filter(None, waiting):
            self._answers.put(failure)
