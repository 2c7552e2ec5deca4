"""Layers of experts in a user's own training loop: `DMoE`, and the background peer that makes its calls.

`ExpertPeer` runs one peer, with a trio loop of its own, in a background thread. Any number of the user's threads may
call through it; each waits for its own calls. After the peer has ended, calls raise the error that ended it. The thread
is a daemon thread, and peers that are still open are closed when the interpreter exits, so nothing hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import outcome
import trio

from peerd.core.errors import ConfigError
from peerd.daemon.daemon import Daemon
from peerd.experts.model.dmoe import DMoE
from peerd.library.background import BackgroundConfig, Closed, failure_of, wait_until_left
from peerd.library.roles.expert_calls import CallerPart, calls_role_for
from peerd.run.config import load_run
from peerd.run.expert_network import ExpertCall, ExpertCaller, ExpertReply
from peerd.run.grid import Uid
from peerd.run.runfile import RunFile

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DMoE", "ExpertPeer"]

logging.getLogger("peerd").addHandler(logging.NullHandler())  # a library logs nothing unless its user configures it


class ExpertPeer:
    """A peer of `run`, a run file with `experts:`, that calls its experts: `peerd.DMoE(peer.run, 0, peer)`.

    Use it as a context manager, or call `start` and `close`.

    * `bootstrap`: addresses of peers of the run, in addition to the run file's. Unless `alone`, `start` waits until one
      of them answers, and raises Unreachable after `wait_s` seconds.
    * `data_dir`: stores this peer's identity for later sessions; in a run with tokens, also its access.token for role
      trainer.
    * `log_level`: level of the log on stderr, or None for no log.
    """

    def __init__(
        self,
        run: RunFile | str | os.PathLike[str],
        *,
        bootstrap: Sequence[str] = (),
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"),
        data_dir: str | os.PathLike[str] | None = None,
        alone: bool = False,
        wait_s: float | None = None,
        log_level: str | None = None,
    ) -> None:
        """Raises ConfigError for invalid settings. Does not start the peer."""
        self.run = run if isinstance(run, RunFile) else load_run(Path(run)).run
        if self.run.experts is None:
            raise ConfigError(f"run {self.run.run!r} has no experts: its run file lacks the section experts")
        wish = BackgroundConfig.of(bootstrap, listen, data_dir, (alone, wait_s), log_level)
        self._wish = dataclasses.replace(wish, bootstrap=(*self.run.bootstrap, *wish.bootstrap))
        self._part = CallerPart(self._opened)
        self._begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._calls: ExpertCaller | None = None
        self._failure: BaseException = Closed("this peer is not running: use it in a with block, or call start()")
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._daemon: Daemon | None = None
        self._closing = False
        self.address = ""

    # --- the user's loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the run; returns when experts can be called."""
        if self._thread is not None:
            raise ConfigError("this peer has been started already; make a new one")
        self._thread = threading.Thread(target=self._work, name=f"peerd {self.run.run}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            failure = self._begun.get()
            if failure is not None:
                raise failure
            failed.pop_all()

    def close(self) -> None:
        """Leave the run, within ten seconds; calls in progress raise Unreachable. Closing again has no effect."""
        self._closing = True
        atexit.unregister(self.close)
        if self._thread is None:
            return
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)
        wait_until_left(self._thread, self._daemon)

    def __enter__(self) -> ExpertPeer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """Statistics of the calls to experts; empty if the peer is not running."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError, trio.Cancelled):
                return trio.from_thread.run_sync(self._snapshot, trio_token=self._token)
        return {}

    # --- calls to experts, as `run.expert_network.ExpertCaller` ---------------

    def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        """The best `k` live experts of each sample, best first; fewer if fewer are alive."""
        return self._caller().choose(layer, scores, k)

    def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        """The experts' outputs; None for those that failed or were late. Raises TooFewExperts."""
        return self._caller().forward(asks, samples)

    def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        """Gradients of the inputs; the expert counts as a constant where it is None."""
        return self._caller().backward(asks)

    def _caller(self) -> ExpertCaller:
        if self._calls is None:
            raise self._failure
        return self._calls

    # --- the background -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Body of the thread; passes the error that ends it to the user."""
        failure = failure_of(outcome.capture(trio.run, self._main), "this peer has been closed")
        self._failure, self._calls, self._token = failure, None, None
        self._begun.put(failure)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with contextlib.ExitStack() as stack:
            self._daemon = self._wish.daemon(stack, self.run, calls_role_for(self._part), self._listens)
            if not self._closing:
                _, never = trio.open_memory_channel[int](0)
                await self._daemon.run(never)

    def _opened(self, calls: ExpertCaller) -> None:
        self._calls = calls
        self._begun.put(None)

    def _listens(self, address: str) -> None:
        self.address = address

    def _snapshot(self) -> dict[str, Any]:
        return self._part.role.status() if self._part.role is not None else {}

    def _stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop("closed")
