"""peerd in a user's own training loop: an optimizer that steps with the average over all peers.

`AveragingOptimizer` runs one peer, with a trio loop of its own, in a background thread, which exchanges gradients with
the user's thread (`library/roles/handoff`). The user's model and optimizer are only accessed while the user's
thread is inside `start`, `step` or `close`. Errors in the background are raised there, unchanged, once they occur. The
thread is a daemon thread, and peers that are still open are closed when the interpreter exits, so nothing hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import outcome
import torch
import trio
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from peerd.core.errors import ConfigError
from peerd.core.limits import LAST_STEP
from peerd.daemon.daemon import Daemon
from peerd.library.background import BackgroundConfig, Closed, failure_of, wait_until_left
from peerd.library.loop_run import (
    LoopSettings,
    access_section,
    averaging_section,
    limits_section,
    line_of,
    live_buffers,
    named_of,
    shared_yaml,
)
from peerd.library.roles.averager import UserPart, role_for
from peerd.library.roles.handoff import GradientHandoff
from peerd.model.stage.shared_buffers import GradientNotFinite
from peerd.model.stage.user_model import UserModel
from peerd.model.user_loop.schedule import Made
from peerd.run.runfile import RANK

_PATIENCE_S: Final = 10.0  # that a step waits for the user's thread to call `step`
_DELAYED_PATIENCE_S: Final = 45.0  # in delayed runs, where it computes the next step; others wait a minute
_STEP_KEY: Final = "global_step"  # in a state dict, beside torch's own keys

T = TypeVar("T")

logging.getLogger("peerd").addHandler(logging.NullHandler())  # a library logs nothing unless its user configures it


class AveragingOptimizer:
    """Steps `optimizer`, on every peer of `run`, with the mean gradient over `target_samples` samples of all peers.

    In the loop of each peer: `loss.backward(); opt.step(); opt.zero_grad()`, where the loss is the mean over
    `samples_per_step` samples. `step` returns when the next gradient may be computed; meanwhile the swarm may have made
    any number of global steps, or none. Use it as a context manager, or call `start` and `close`. Peers of one `run`
    need the same parameters, optimizer settings and sizes. Their initial values may differ; those of one peer are used.

    * `bootstrap`: addresses of peers of the run. Without an answer from one of them, `start` waits and reports it on
      stderr, unless `alone`; after `wait_s` seconds it raises Unreachable with the addresses tried.
    * `announce`: called with this peer's address, from another thread, as soon as it listens.
    * `data_dir`: stores identity and checkpoints, to continue later.
    * `model`: source of `named_parameters` and `named_buffers`, unless these are given.
    * `buffers`: how the known buffers are kept equal (average, first or local); newcomers get them, too.
    * `scheduler`: a new torch scheduler of `optimizer`, or a function that makes one. It steps with the swarm; never
      call its step().
    * `lr`: instead of a scheduler, the learning rate by global step, from 0. Without both, the groups' own stays fixed.
    * `clip_norm`: maximum norm of the whole mean gradient, as in `torch.nn.utils.clip_grad_norm_`; 0: no limit.
    * `delayed`: while a step's gradients are averaged, compute those of the next step with the previous parameters.
    * `min_peers`: number of peers needed to begin.
    * `code`, `rank`: how gradients are encoded, as in `averaging` of a run file; the same on all peers.
    * `upload_mbit`, `download_mbit`: limits of this peer in Mb/s, which also set its share of averaging; 0: no limit.
    * `organizer`: peer id of the organizer whose tokens admit peers. `token`: file with this peer's token; by default
      access.token in `data_dir`.
    * `save_steps`: global steps between checkpoints, here (with `data_dir`) and on backbones that keep the run. The
      last step is saved, too.
    * `log_level`: level of additional lines on stderr, or None for no additional lines.
    """

    _thread: threading.Thread | None = None
    _daemon: Daemon | None = None
    _token: trio.lowlevel.TrioToken | None = None
    _closing = False
    _address = ""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        run: str,
        target_samples: int,
        samples_per_step: int,
        bootstrap: Sequence[str] = (),
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"),
        data_dir: str | os.PathLike[str] | None = None,
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        named_buffers: Iterable[tuple[str, Tensor]] | None = None,
        buffers: str = "average",
        scheduler: Made | None = None,
        lr: Callable[[int], float] | None = None,
        clip_norm: float = 0.0,
        delayed: bool = False,
        min_peers: int = 1,
        alone: bool = False,
        wait_s: float | None = None,
        code: str = "none",
        rank: int = RANK,
        upload_mbit: float = 0.0,
        download_mbit: float = 0.0,
        organizer: str | None = None,
        token: str | os.PathLike[str] | None = None,
        save_steps: int = 50,
        announce: Callable[[str], None] = lambda address: None,
        log_level: str | None = None,
    ) -> None:
        """Raises ConfigError for invalid settings. Does not start the peer."""
        self.optimizer, self._announce = optimizer, announce
        self._settings = LoopSettings(
            run=run,
            target_samples=target_samples,
            samples_per_step=samples_per_step,
            averaging=averaging_section(code, rank),
            save_steps=save_steps,
            min_peers=min_peers,
            access=access_section(organizer, token, data_dir is not None),
            limits=limits_section(upload_mbit, download_mbit),
        )
        self._model = UserModel(
            optimizer,
            named_of(model, named_parameters),
            lr,
            self._settings.averaging,
            delayed,
            scheduler=scheduler,
            buffers=(live_buffers(model, named_buffers), buffers),
            microbatch=samples_per_step,
            clip_norm=clip_norm,
        )
        self._run = self._settings.run_file(self._model)
        self._wish = BackgroundConfig.of(bootstrap, listen, data_dir, (alone, wait_s), log_level)
        self._desk = GradientHandoff(_DELAYED_PATIENCE_S if delayed else _PATIENCE_S, int(delayed))
        self._part = UserPart(self._model, self._desk, min_peers, saves=data_dir is not None)
        self._last_status: dict[str, object] = {}

    # --- the user's loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the run; returns when the first gradient may be computed, with the parameters of the swarm."""
        if self._thread is not None:
            raise ConfigError("this optimizer has been started already; make a new one")
        self._model.check_unchanged()
        self._thread = threading.Thread(target=self._work, name=f"peerd {self._run.run}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self._desk.wait()
            failed.pop_all()

    def step(self, closure: Callable[[], T] | None = None, *, samples: int | None = None) -> T | None:
        """Contribute the parameters' gradients, as one microbatch; returns when the next ones may be computed.

        `closure` computes the gradients first, once; its result is returned. `samples`: number of samples in this
        microbatch, if fewer than `samples_per_step`, such as at the end of an epoch. Raises GradientNotFinite, with the
        parameter's name, if a gradient is not finite (then nothing is contributed, and the loop may continue). Also
        raises errors from the background.
        """
        if self._thread is None or self._closing:
            raise Closed("this optimizer is not running: use it in a with block, or call start()")
        whole = self._settings.samples_per_step
        count = whole if samples is None else samples
        if type(count) is not int or not 1 <= count <= whole:
            raise ConfigError(f"samples is {count!r}; allowed: 1 to samples_per_step ({whole})")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._model.check_unchanged()
        gradients = self._model.gradients()
        try:
            self._model.check_finite(gradients)
        except GradientNotFinite:
            self._desk.counts.not_finite += 1
            raise
        for device in {p.device for p in gradients if p is not None and p.is_cuda}:
            torch.cuda.synchronize(device)
        self._desk.hand_in(gradients, count)
        return result

    def close(self) -> None:
        """Leave the run in order; closing again has no effect.

        Takes at most ten seconds if another peer's loop continues. The last peer waits until its state is stored in
        `data_dir`, and until a backbone and the members that are behind have fetched it. It reports this wait on stderr
        (with `log_level`, in the log); Ctrl+C ends the wait. A global step that contains a microbatch of this peer may
        still be made meanwhile.
        """
        self._closing = True
        atexit.unregister(self.close)
        if self._thread is None:
            return
        self._desk.come_to_stay()
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)
        wait_until_left(self._thread, self._daemon)

    def __enter__(self) -> AveragingOptimizer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as the optimizer's own."""
        self.optimizer.zero_grad(set_to_none)

    # --- the interface of a torch optimizer ---------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups. Treat their settings as read-only: `step` raises an error if they were
        changed.
        """
        return self.optimizer.param_groups

    @property
    def scheduler(self) -> LRScheduler | None:
        """The torch scheduler that follows the global step, or None."""
        return self._model.schedule.scheduler if self._model.schedule is not None else None

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state for the current parameters, and `global_step`."""
        return {**self.optimizer.state_dict(), _STEP_KEY: self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any], *, global_step: int | None = None) -> None:
        """Continue from a state returned by `state_dict`, before `start`: moments, global step and learning rate.

        A plain torch optimizer's state has no `global_step`, so pass it; 0 restarts the schedule. If the run has
        already begun, the swarm's state replaces this one. Load the parameters as well.
        """
        if self._thread is not None:
            raise ConfigError("load_state_dict was called after the start, when the swarm sets the state")
        step = state_dict.get(_STEP_KEY) if global_step is None else global_step
        if step is None:
            raise ConfigError(
                "this state has no global_step, as it is a plain optimizer's: call load_state_dict(..., "
                "global_step=N) with the number of steps made; 0 restarts the schedule"
            )
        if type(step) is not int or not 0 <= step <= LAST_STEP:
            raise ConfigError(f"global_step is {step!r}; allowed: 0 to {LAST_STEP}")
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != _STEP_KEY})
        self._model.settings_changed()
        self._run = self._settings.run_file(self._model)
        self._model.begin_at(step)

    # --- information --------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Number of the swarm's steps that the parameters include."""
        return self._model.step

    @property
    def address(self) -> str:
        """Address for other peers' `bootstrap`; empty before this peer listens."""
        return self._address

    @property
    def join_line(self) -> str:
        """The command with which helpers and backbones join, `peerd join peerd://...`; empty before it listens."""
        return line_of(self._address, self._run.run)

    def write_run_file(self, path: str | os.PathLike[str]) -> None:
        """Write the run file for `peerd backbone --model` and `peerd join --role aux --model`; works before the start,
        too.

        It names no code and no data, and is the same on all peers of the run, except for `bootstrap`.
        """
        pathlib.Path(path).write_text(shared_yaml(self._run, self._wish.bootstrap), "utf-8")

    def digest(self) -> str:
        """A hash of the parameters, in hex: equal on all peers at the same step."""
        return self._model.digest().hex()

    def status(self) -> dict[str, object]:
        """Step, peers, results of microbatches (`late`: dropped), and the reason for waiting; after the end, the last
        values.
        """
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError, trio.Cancelled):
                self._last_status = trio.from_thread.run_sync(self._snapshot, trio_token=self._token)
        return {**self._last_status, "global_step": self.global_step, "address": self._address}

    def _snapshot(self) -> dict[str, object]:
        return self._part.role.status() if self._part.role is not None else {}

    # --- the background -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Body of the thread; passes the error that ends it to the user."""
        self._desk.end(failure_of(outcome.capture(trio.run, self._main), "this averaging peer has been closed"))

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._desk.open(self._token)
        with contextlib.ExitStack() as stack:
            self._daemon = self._wish.daemon(stack, self._run, role_for(self._part), self._listens)
            if not self._closing:
                _, never = trio.open_memory_channel[int](0)
                await self._daemon.run(never)

    def _listens(self, address: str) -> None:
        self._address = address
        self._announce(address)

    def _stop(self) -> None:
        self._last_status = self._snapshot()
        if self._daemon is not None:
            self._daemon.stop("closed")
