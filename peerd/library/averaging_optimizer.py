"""peerd in a user's own training loop: an optimizer that steps with the average over all peers.

`AveragingOptimizer` runs one peer, with its own trio loop, in a background thread; the user's thread meets it at a desk
(`training/user_loop/handoff`). Nothing of the user's is touched but while the user's thread is inside `start`, `step`
or `close`. What goes wrong in the background is raised there, once it is known, as the error that it was. The thread is
a daemon, and the interpreter's exit closes what was forgotten, so nothing hangs.
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

from peerd.compute.model.shared_buffers import GradientNotFinite
from peerd.compute.model.user_model import UserModel
from peerd.compute.user_loop.schedule import Made
from peerd.core.errors import ConfigError
from peerd.core.limits import LAST_STEP
from peerd.core.run.runfile import RANK
from peerd.daemon import Daemon
from peerd.library.background import CLOSE_S, BackgroundConfig, Closed, failure_of
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
from peerd.training.user_loop.averager import UserPart, role_for
from peerd.training.user_loop.handoff import GradientHandoff

_PATIENCE_S: Final = 10.0  # with a user who is elsewhere while the others step
_DELAYED_PATIENCE_S: Final = 45.0  # where that is the rule: the user computes for the next step; others wait a minute
_STEP_KEY: Final = "global_step"  # of a state, beside torch's own keys

T = TypeVar("T")

logging.getLogger("peerd").addHandler(logging.NullHandler())  # a library is silent unless its user asks


class AveragingOptimizer:
    """Steps `optimizer`, on every peer of `run`, with the mean gradient of `target_samples` samples of all of them.

    In the loop of each peer: `loss.backward(); opt.step(); opt.zero_grad()`, with the loss being the mean over
    `samples_per_step` samples. `step` returns when the next gradient may be computed; meanwhile the swarm may have made
    any number of global steps, or none. Use it as a context manager, or call `start` and `close`.

    Peers of one `run` need the same parameters, optimizer settings and sizes; their first values may differ, those
    of one peer are taken. `bootstrap`: addresses of peers that take part already; `announce` is called with this
    peer's, from another thread, as soon as it listens. `data_dir`: identity and checkpoints, for going on another
    day. `model`: where `named_parameters` and `named_buffers` come from, unless they are given. Only buffers that
    are known are kept alike, by `buffers` (average, first or local), and given to newcomers. `scheduler`: a fresh
    torch scheduler of `optimizer`, or a function that makes one; it steps when the swarm does, never call its
    step(). `lr`: in place of one, the learning rate by global step, from 0; without both that of the optimizer's
    groups, never changed. `clip_norm`: the most that the norm of the whole mean gradient may be, as by
    `torch.nn.utils.clip_grad_norm_`; 0: anything. `delayed`: while a step's gradients are averaged, the next step's
    are computed already, with the parameters from before it. `min_peers`: nobody begins before so many are there. With
    `bootstrap` given nobody begins either before a peer there answers, and stderr says so, unless `alone`; after
    `wait_s` seconds of that `start` raises Unreachable with what was tried. `code` and `rank`: how gradients travel, as
    in `averaging` of a run file; the same on all peers. `upload_mbit`, `download_mbit`: what this peer may send and
    receive, in Mb/s; its share of averaging follows them; 0: no limit. `organizer`: the peer id of the organizer whose
    tokens let peers in; `token`: the file with this peer's, without it access.token in `data_dir`. `save_steps`: global
    steps between two checkpoints, here (with `data_dir`) and on backbones that keep the run. `log_level`: what else to
    write to stderr; None: nothing.
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
        """ConfigError says what cannot be used. Nothing starts yet."""
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
        """Hand in the gradients at the parameters, as of one microbatch; returns when the next may be computed.

        `closure` computes the gradients first, once; what it returns is returned. `samples`: of this microbatch, where
        it has fewer than `samples_per_step`, such as the last one of an epoch. Raises GradientNotFinite, which names
        the parameter, for a gradient that is not finite (nothing is handed in, and the loop may go on), and what went
        wrong in the background.
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
        """Leave the run well, within ten seconds; repeated closing changes nothing.

        A global step that has a microbatch of ours may still be made meanwhile.
        """
        self._closing = True
        atexit.unregister(self.close)
        if self._thread is None:
            return
        self._desk.come_to_stay()
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)
        self._thread.join(CLOSE_S)

    def __enter__(self) -> AveragingOptimizer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        self.optimizer.zero_grad(set_to_none)

    # --- as torch knows an optimizer ----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own. Settings in them are for looking at: changed ones are an error at `step`."""
        return self.optimizer.param_groups

    @property
    def scheduler(self) -> LRScheduler | None:
        """The torch scheduler that goes by the global step; None: there is none."""
        return self._model.schedule.scheduler if self._model.schedule is not None else None

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, as of the parameters now, and `global_step`."""
        return {**self.optimizer.state_dict(), _STEP_KEY: self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any], *, global_step: int | None = None) -> None:
        """Go on from a state that `state_dict` gave, before `start`: its moments, global step and learning rate.

        A plain torch optimizer's state has no `global_step`: give it, 0 for a schedule that begins anew. In a run that
        is on its way the swarm's state counts. Load the parameters as well.
        """
        if self._thread is not None:
            raise ConfigError("load_state_dict after the start: the optimizer's state is the swarm's now")
        step = state_dict.get(_STEP_KEY) if global_step is None else global_step
        if step is None:
            raise ConfigError(
                "this state has no global_step, since a plain optimizer made it: give load_state_dict(..., "
                "global_step=N), the steps that were made; 0: the schedule begins anew"
            )
        if type(step) is not int or not 0 <= step <= LAST_STEP:
            raise ConfigError(f"global_step is {step!r}; allowed: 0 to {LAST_STEP}")
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != _STEP_KEY})
        self._model.settings_changed()
        self._run = self._settings.run_file(self._model)
        self._model.begin_at(step)

    # --- for looking at -----------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Number of the swarm's steps that are in the parameters."""
        return self._model.step

    @property
    def address(self) -> str:
        """Address for others' `bootstrap`; empty before this peer listens."""
        return self._address

    @property
    def join_line(self) -> str:
        """The line by which helpers and backbones join, `peerd join peerd://...`; empty before this peer listens."""
        return line_of(self._address, self._run.run)

    def write_run_file(self, path: str | os.PathLike[str]) -> None:
        """Write the run file for `peerd backbone --model` and `peerd join --role aux --model`; also before the start.

        It names no code and no data, and is the same on all peers of the run but for `bootstrap`.
        """
        pathlib.Path(path).write_text(shared_yaml(self._run, self._wish.bootstrap), "utf-8")

    def digest(self) -> str:
        """A hash of the parameters, in hex: equal on all peers that stand at one step."""
        return self._model.digest().hex()

    def status(self) -> dict[str, object]:
        """Step, peers, what became of microbatches (`late`: dropped), what is waited for; the last after the end."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError, trio.Cancelled):
                self._last_status = trio.from_thread.run_sync(self._snapshot, trio_token=self._token)
        return {**self._last_status, "global_step": self.global_step, "address": self._address}

    def _snapshot(self) -> dict[str, object]:
        return self._part.role.status() if self._part.role is not None else {}

    # --- the background -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """The thread. Whatever ends it, the user hears of."""
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
