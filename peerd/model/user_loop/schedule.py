"""Schedule of an optimizer's settings by global step: a torch scheduler that steps with the swarm.

Torch's schedulers count their own steps and update the settings in the optimizer's groups in place. The settings of a
step are therefore those after the same number of scheduler steps from the start, and a newcomer makes these steps at
once. Nothing is sent, since the settings depend on the step alone. Independent of models. Synchronous, for one thread
at a time.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any, Final

import outcome
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from peerd.core.errors import ConfigError

Made = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]

_PROBED: Final = 64  # steps whose settings are compared between peers, since functions have no text


class Schedule:
    """The scheduler of one optimizer: `made` itself, or the scheduler that it returns."""

    def __init__(self, optimizer: torch.optim.Optimizer, made: Made) -> None:
        """Raises ConfigError if `made` is not, and does not return, a usable scheduler of this optimizer."""
        found: object = made
        if not isinstance(made, LRScheduler):
            if not callable(made):
                raise ConfigError(f"scheduler: a torch scheduler or a function is needed, not {type(made).__name__}")
            found = made(optimizer)
        if not isinstance(found, LRScheduler) or found.optimizer is not optimizer:
            raise ConfigError(
                "scheduler must return a torch scheduler of the optimizer, as in lambda opt: StepLR(opt, 100)"
            )
        if isinstance(found, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau depends on each peer's own losses, so peers would differ")
        if made_steps := getattr(found, "last_epoch", 0):
            raise ConfigError(f"scheduler has made {made_steps} steps already; it must start at global step 0")
        self.scheduler = found
        self._optimizer = optimizer
        self._done = 0
        self._start = copy.deepcopy(found.state_dict())
        self._settings = [dict(_settings(group)) for group in optimizer.param_groups]
        self.text = self._described()

    def go_to(self, step: int) -> None:
        """Set the optimizer's settings for the step after `step` global steps; raises what the scheduler raises."""
        if step < self._done:
            self.begin_anew()
        # Torch warns about a scheduler's step before the optimizer's; a newcomer's optimizer has not made those steps.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        while self._done < step:
            self.scheduler.step()
            self._done += 1

    def begin_anew(self) -> None:
        """Return to the settings of step 0, undoing all changes since."""
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in settings.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.copy(value)
        self.scheduler.load_state_dict(copy.deepcopy(self._start))
        self._done = 0

    def _described(self) -> str:
        """The scheduler's class, its public attributes that are numbers, texts or lists of numbers, and a digest of the
        optimizer's settings, such as learning rates, in the first steps.
        """
        numbers = {name: value for name, value in vars(self.scheduler).items() if _is_plain(value)}
        text = ", ".join(f"{name}={numbers[name]}" for name in sorted(numbers) if not name.startswith("_"))
        given = hashlib.sha256()
        for step in range(_PROBED):
            if isinstance(outcome.capture(self.go_to, step), outcome.Error):
                break  # some schedules end
            given.update(repr([sorted(_plain_settings(group)) for group in self._optimizer.param_groups]).encode())
        self.begin_anew()
        return f"{type(self.scheduler).__name__}({text}) #{given.hexdigest()[:16]}"


def _settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(k, v.clone() if isinstance(v, Tensor) else copy.copy(v)) for k, v in group.items() if k != "params"]


def _plain_settings(group: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (k, repr(v.item() if isinstance(v, Tensor) else v))
        for k, v in group.items()
        if k not in ("params", "foreach", "fused")
    ]


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in value)
    )
