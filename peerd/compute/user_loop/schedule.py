"""Schedule of an optimizer's settings by the global step: a torch scheduler that steps when the swarm does.

Torch's schedulers count their own steps and go on from what they find in the optimizer's groups; so the settings of a
step are those after as many scheduler steps from the beginning, and a newcomer makes these at once. Nothing of it
travels: it is a function of the step, on every peer alike. Knows no models. Synchronous; one thread at a time.
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

_PROBED: Final = 64  # steps of which the settings are compared between peers: functions have no text


class Schedule:
    """The scheduler of one optimizer: what `made` is, or makes of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, made: Made) -> None:
        """ConfigError says what is no scheduler of this optimizer."""
        found: object = made
        if not isinstance(made, LRScheduler):
            if not callable(made):
                raise ConfigError(f"scheduler: a torch scheduler or a function is needed, not {type(made).__name__}")
            found = made(optimizer)
        if not isinstance(found, LRScheduler) or found.optimizer is not optimizer:
            raise ConfigError(
                "scheduler must give a torch scheduler of the optimizer, as in lambda opt: StepLR(opt, 100)"
            )
        if isinstance(found, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau goes by each peer's own losses, so peers would differ")
        if made_steps := getattr(found, "last_epoch", 0):
            raise ConfigError(f"scheduler has made {made_steps} steps already; it must begin at global step 0")
        self.scheduler = found
        self._optimizer = optimizer
        self._done = 0
        self._start = copy.deepcopy(found.state_dict())
        self._settings = [dict(_settings(group)) for group in optimizer.param_groups]
        self.text = self._described()

    def go_to(self, step: int) -> None:
        """Give the optimizer the settings for the step after `step` global ones; raises what the scheduler raises."""
        if step < self._done:
            self.begin_anew()
        # Torch warns of a scheduler's step before the optimizer's; a newcomer's optimizer has not made those steps.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        while self._done < step:
            self.scheduler.step()
            self._done += 1

    def begin_anew(self) -> None:
        """Return to the settings of step 0, whatever was changed since."""
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in settings.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.copy(value)
        self.scheduler.load_state_dict(copy.deepcopy(self._start))
        self._done = 0

    def _described(self) -> str:
        """The scheduler's class, its numbers, and a digest of what it gives at the first steps."""
        numbers = {name: value for name, value in vars(self.scheduler).items() if _is_plain(value)}
        told = ", ".join(f"{name}={numbers[name]}" for name in sorted(numbers) if not name.startswith("_"))
        given = hashlib.sha256()
        for step in range(_PROBED):
            if isinstance(outcome.capture(self.go_to, step), outcome.Error):
                break  # it has an end
            given.update(repr([sorted(_plain_settings(group)) for group in self._optimizer.param_groups]).encode())
        self.begin_anew()
        return f"{type(self.scheduler).__name__}({told}) #{given.hexdigest()[:16]}"


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
