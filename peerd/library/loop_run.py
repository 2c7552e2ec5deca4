"""The run file of a user's own loop, from their optimizer and model: what the peers of the run agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from peerd.compute.model.shared_buffers import Live, buffers_of
from peerd.compute.model.user_model import UserModel
from peerd.config import section_of
from peerd.core.errors import ConfigError
from peerd.core.messages.swarm import MAX_MICROBATCHES
from peerd.core.run.check import check
from peerd.core.run.runfile import (
    AveragingSection,
    BatchSection,
    CheckpointSection,
    LimitsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)

SAVE_STEPS: Final = 50


def live_buffers(model: torch.nn.Module | None, named: Iterable[tuple[str, Tensor]] | None) -> Live:
    """The buffers to keep alike: those given, else the model's, else none."""
    if named is not None:
        given = dict(named)
        return lambda: given
    return buffers_of(model) if model is not None else dict


def averaging_section(code: str, rank: int) -> AveragingSection:
    """Checked before the model is: what that keeps from step to step follows from it."""
    made: AveragingSection = section_of(AveragingSection, {"code": code, "rank": rank})
    faults = [f"{path} {message}" for path, message in check(RunFile(run="any", averaging=made))]
    if faults:
        raise ConfigError("; ".join(faults))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a user's loop sets of its run, beside what its model and optimizer are. ConfigError says what is wrong."""

    run: str
    target_samples: int
    samples_per_step: int
    averaging: AveragingSection
    saves: bool

    def __post_init__(self) -> None:
        target, samples = self.target_samples, self.samples_per_step
        for name, value in (("target_samples", target), ("samples_per_step", samples)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of samples above 0")
        if target % samples or target // samples > MAX_MICROBATCHES:
            allowed = f"a multiple of samples_per_step ({samples}), up to {samples * MAX_MICROBATCHES}"
            raise ConfigError(f"target_samples is {target}; allowed: {allowed}")

    def run_file(self, model: UserModel) -> RunFile:
        """The run file of one stage with the settings that the peers of a run must agree on."""
        made = RunFile(
            run=self.run,
            model=ModelSection(
                kind=model.model_text(), layers=1, dtype="float64" if model.dtype == torch.float64 else "float32"
            ),
            pipeline=PipelineSection(stages=1, microbatch=self.samples_per_step),
            optimizer=msgspec.structs.replace(OptimizerSection(), name=model.optimizer_text(), delayed=model.delayed),
            batch=BatchSection(target_samples=self.target_samples),
            averaging=self.averaging,
            checkpoint=CheckpointSection(every_steps=SAVE_STEPS if self.saves else 0),
            limits=LimitsSection(stage=0),
        )
        faults = [f"{path} {message}" for path, message in check(made)]
        if faults:
            raise ConfigError("; ".join(faults))
        return made
