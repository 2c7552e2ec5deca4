"""peerd in a user's own training loop: an optimizer that steps with the average over all peers.

`AveragingOptimizer` runs one peer, with its own trio loop, in a background thread; the user's thread meets it at a desk
(`training/user_loop/handoff`). Nothing of the user's is touched but while the user's thread is inside `start`, `step`
or `close`. What goes wrong in the background is raised there, once it is known, as the error that it was. The thread is
a daemon, and the interpreter's exit closes what was forgotten, so nothing hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import outcome
import torch
import trio
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from peerd.compute.model.schedule import Made
from peerd.compute.model.shared_buffers import GradientNotFinite, Live, buffers_of
from peerd.compute.model.user_model import UserModel
from peerd.config import section_of
from peerd.core.errors import ConfigError
from peerd.core.messages.swarm import MAX_MICROBATCHES
from peerd.core.run.check import check
from peerd.core.run.runfile import (
    RANK,
    AveragingSection,
    BatchSection,
    CheckpointSection,
    LimitsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.daemon import Daemon
from peerd.library.background import CLOSE_S, BackgroundWish, Closed, check_texts, company_wish, failure_of
from peerd.training.user_loop.averager import UserPart, role_for
from peerd.training.user_loop.handoff import Desk

_PATIENCE_S: Final = 10.0  # with a user who is elsewhere while the others step
_DELAYED_PATIENCE_S: Final = 45.0  # where that is the rule: the user computes for the next step; others wait a minute
_SAVE_STEPS: Final = 50

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
    groups, never changed. `delayed`: while a step's gradients are averaged, the next step's are computed already,
    with the parameters from before it. `min_peers`: nobody begins before so many are there. With `bootstrap` given
    nobody begins either before a peer there answers, and stderr says so, unless `alone`; after `wait_s` seconds of
    that `start` raises Unreachable with what was tried. `code` and `rank`: how gradients travel, as in `averaging`
    of a run file; the same on all peers. `log_level`: what else to write to stderr; None: nothing.
    """

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
        delayed: bool = False,
        min_peers: int = 1,
        alone: bool = False,
        wait_s: float | None = None,
        code: str = "none",
        rank: int = RANK,
        announce: Callable[[str], None] = lambda address: None,
        log_level: str | None = None,
    ) -> None:
        """ConfigError says what cannot be used. Nothing starts yet."""
        self.optimizer = optimizer
        averaging = _averaging(code, rank)
        if scheduler is not None and lr is not None:
            raise ConfigError("scheduler and lr are both given; one of them sets the learning rate")
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        kept = (_live(model, named_buffers), buffers)
        self._model = UserModel(optimizer, named_parameters, lr, averaging, delayed, scheduler=scheduler, buffers=kept)
        sizes = (target_samples, samples_per_step)
        self._made_run = functools.partial(_run_file, run, self._model, sizes, averaging, data_dir is not None)
        self._run = self._made_run()
        check_texts("bootstrap", bootstrap)
        check_texts("listen", listen)
        if min_peers < 1:
            raise ConfigError(f"min_peers is {min_peers}; it must be at least 1")
        self._desk = Desk(_DELAYED_PATIENCE_S if delayed else _PATIENCE_S, int(delayed))
        self._part = UserPart(self._model, self._desk, samples_per_step, min_peers, saves=data_dir is not None)
        self._wish = BackgroundWish(
            bootstrap=tuple(bootstrap),
            listen=tuple(listen),
            home=Path(data_dir) if data_dir is not None else None,
            company=company_wish(alone, wait_s),
            log_level=log_level,
        )
        self._announce, self._address = announce, ""
        self._thread: threading.Thread | None = None
        self._daemon: Daemon | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._closing = False
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

    def step(self) -> None:
        """Hand in the gradients at the parameters, as of one microbatch; returns when the next may be computed.

        A parameter without a gradient counts as one with zeros. Raises GradientNotFinite, which names the parameter,
        for one that is not finite (nothing is handed in, and the loop may go on), and what went wrong in the
        background.
        """
        if self._thread is None or self._closing:
            raise Closed("this optimizer is not running: use it in a with block, or call start()")
        self._model.check_unchanged()
        gradients = self._model.gradients()
        try:
            self._model.check_finite(gradients)
        except GradientNotFinite:
            self._desk.counts.not_finite += 1
            raise
        for device in {p.device for p in gradients if p is not None and p.is_cuda}:
            torch.cuda.synchronize(device)
        self._desk.hand_in(gradients)

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
        """The wrapped optimizer's state, as of the parameters now."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the wrapped optimizer a state to begin with, before `start`: in a run the swarm's state counts."""
        if self._thread is not None:
            raise ConfigError("load_state_dict after the start: the optimizer's state is the swarm's now")
        self.optimizer.load_state_dict(state_dict)
        self._model.settings_changed()
        self._run = self._made_run()

    # --- for looking at -----------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Number of the swarm's steps that are in the parameters."""
        return self._model.step

    @property
    def address(self) -> str:
        """Address for others' `bootstrap`; empty before this peer listens."""
        return self._address

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


def _live(model: torch.nn.Module | None, named: Iterable[tuple[str, Tensor]] | None) -> Live:
    """The buffers to keep alike: those given, else the model's, else none."""
    if named is not None:
        given = dict(named)
        return lambda: given
    return buffers_of(model) if model is not None else dict


def _averaging(code: str, rank: int) -> AveragingSection:
    """Checked before the model is: what that keeps from step to step follows from it."""
    made: AveragingSection = section_of(AveragingSection, {"code": code, "rank": rank})
    faults = [f"{path} {message}" for path, message in check(RunFile(run="any", averaging=made))]
    if faults:
        raise ConfigError("; ".join(faults))
    return made


def _run_file(run: str, model: UserModel, sizes: tuple[int, int], averaging: AveragingSection, saves: bool) -> RunFile:
    """Run file of one stage with the settings that the peers of a run must agree on."""
    target, samples = sizes
    for name, value in (("target_samples", target), ("samples_per_step", samples)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of samples above 0")
    if target % samples or target // samples > MAX_MICROBATCHES:
        allowed = f"a multiple of samples_per_step ({samples}), up to {samples * MAX_MICROBATCHES}"
        raise ConfigError(f"target_samples is {target}; allowed: {allowed}")
    made = RunFile(
        run=run,
        model=ModelSection(
            kind=model.model_text(), layers=1, dtype="float64" if model.dtype == torch.float64 else "float32"
        ),
        pipeline=PipelineSection(stages=1, microbatch=samples),
        optimizer=msgspec.structs.replace(OptimizerSection(), name=model.optimizer_text(), delayed=model.delayed),
        batch=BatchSection(target_samples=target),
        averaging=averaging,
        checkpoint=CheckpointSection(every_steps=_SAVE_STEPS if saves else 0),
        limits=LimitsSection(stage=0),
    )
    faults = [f"{path} {message}" for path, message in check(made)]
    if faults:
        raise ConfigError("; ".join(faults))
    return made
