"""Torch's schedulers by global step: each step's settings are a plain loop's, for newcomers and returners, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as s

from peerd.core.errors import ConfigError
from peerd.model.user_loop.schedule import Schedule

MAKERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda o: s.StepLR(o, 3, 0.5),
    "lambda": lambda o: s.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: s.CosineAnnealingLR(o, 10),
    "restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: s.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: s.CyclicLR(o, 0.01, 0.1, 5),
    "exponential": lambda o: s.ExponentialLR(o, 0.9),
    "warm-up, then cosine": lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1, 4), s.CosineAnnealingLR(o, 9)], [4]),
    "both at once": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.5, 4), s.ExponentialLR(o, 0.9)], o),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.3, momentum=0.9)


def settings(o: torch.optim.Optimizer) -> tuple[float, float]:
    return o.param_groups[0]["lr"], o.param_groups[0]["momentum"]


def plain(name: str, steps: int) -> list[tuple[float, float]]:
    o = optimizer()
    scheduler, found = MAKERS[name](o), []
    for _ in range(steps):
        found.append(settings(o))
        o.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_each_step_has_the_settings_of_a_plain_loop_bit_for_bit(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = plain(name, 15)
        o = optimizer()
        schedule = Schedule(o, MAKERS[name])
        found = []
        for step in range(15):
            schedule.go_to(step)
            found.append(settings(o))
        assert found == expected
        for step in (11, 3, 0, 14):  # a newcomer's, and one's that goes back to a checkpoint
            schedule.go_to(step)
            assert settings(o) == expected[step]
            late = optimizer()
            Schedule(late, MAKERS[name]).go_to(step)
            assert settings(late) == expected[step]


def test_a_scheduler_that_is_made_already_will_do_and_is_the_one_that_steps() -> None:
    o = optimizer()
    made = s.StepLR(o, 2, 0.1)
    Schedule(o, made).go_to(4)
    assert made.get_last_lr() == pytest.approx([0.003])


def test_the_texts_tell_schedules_apart_functions_too() -> None:
    texts = {name: Schedule(optimizer(), maker).text for name, maker in MAKERS.items()}
    assert len(set(texts.values())) == len(MAKERS)
    assert texts == {name: Schedule(optimizer(), maker).text for name, maker in MAKERS.items()}
    assert texts["steps"].startswith("StepLR(base_lrs=[0.3], gamma=0.5, last_epoch=0, step_size=3) #")
    other = Schedule(optimizer(), lambda o: s.LambdaLR(o, lambda step: 1 / (2 + step))).text
    assert other != texts["lambda"]


def test_what_is_no_schedule_is_refused_in_words() -> None:
    def used(o: torch.optim.Optimizer) -> s.LRScheduler:
        found = s.StepLR(o, 3)
        o.step()
        found.step()
        return found

    wrong: list[tuple[Any, str]] = [
        (3, "a torch scheduler or a function is needed, not int"),
        (lambda o: None, "must return a torch scheduler of the optimizer"),
        (s.StepLR(optimizer(), 3), "must return a torch scheduler of the optimizer"),
        (s.ReduceLROnPlateau, "each peer's own losses"),
        (used, "has made 1 steps already"),
    ]
    for made, words in wrong:
        with pytest.raises(ConfigError, match=words):
            Schedule(optimizer(), made)
