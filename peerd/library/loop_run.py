"""The run file of a user's own loop, made from its optimizer and model: the settings on which the run's peers agree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from peerd.core.addr import parse_addr, split_peer
from peerd.core.errors import ConfigError
from peerd.messages.run_link import best_link, plain_tree
from peerd.messages.state import StateLayout
from peerd.messages.swarm import MAX_MICROBATCHES
from peerd.model.stage.shared_buffers import Live, buffers_of
from peerd.model.stage.user_model import UserModel
from peerd.run.check import check
from peerd.run.config import section_of
from peerd.run.runfile import (
    AccessSection,
    AveragingSection,
    BatchSection,
    CheckpointSection,
    LimitsSection,
    LoopSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.run.typed_yaml import to_yaml


def access_section(organizer: str | None, token: str | os.PathLike[str] | None, has_home: bool) -> AccessSection:
    """Who is admitted: everyone, or the peers with a token of `organizer`."""
    if organizer is None:
        if token is not None:
            raise ConfigError("token is given without organizer; give the organizer's peer id, 12D3KooW..., as well")
        return AccessSection()
    if not has_home:
        raise ConfigError("organizer is given without data_dir: a token is for the peer whose identity is stored there")
    return AccessSection(allow="tokens", organizer=organizer, token=os.fspath(token) if token is not None else "")


def limits_section(upload_mbit: float, download_mbit: float) -> LimitsSection:
    """The rates of this peer's link, as its user states them."""
    stated = {"stage": 0, "upload_mbit": upload_mbit, "download_mbit": download_mbit}
    limits: LimitsSection = section_of(LimitsSection, stated)
    return limits


def line_of(address: str, run: str) -> str:
    """The command with which others join at this address; empty if there is no address yet, or it cannot be dialed."""
    addr = parse_addr(address) if address else None
    peer = split_peer(addr)[1] if addr is not None else None
    link = best_link([addr], peer, run) if addr is not None and peer is not None else None
    return f"peerd join {link.text}" if link is not None else ""


def shared_yaml(run: RunFile, bootstrap: Sequence[str]) -> str:
    """The run file for helpers and backbones: the settings that all share, and bootstrap addresses."""
    access = AccessSection(allow=run.access.allow, organizer=run.access.organizer)
    shared = msgspec.structs.replace(run, limits=LimitsSection(), access=access, bootstrap=list(bootstrap))
    head = f"# The run {run.run} of users' own loops, by peerd.AveragingOptimizer.\n"
    return head + to_yaml({key: value for key, value in plain_tree(shared).items() if value is not None})


def named_of(
    model: torch.nn.Module | None, named: Iterable[tuple[str, Tensor]] | None
) -> Iterable[tuple[str, Tensor]] | None:
    """The parameters with their names: `named` if given, else the model's, else None."""
    return model.named_parameters() if named is None and model is not None else named


def live_buffers(model: torch.nn.Module | None, named: Iterable[tuple[str, Tensor]] | None) -> Live:
    """A function that returns the buffers to share: those given, else the model's, else none."""
    if named is not None:
        given = dict(named)
        return lambda: given
    return buffers_of(model) if model is not None else dict


def averaging_section(code: str, rank: int) -> AveragingSection:
    """The averaging settings, checked before the model is made, which depends on them."""
    made: AveragingSection = section_of(AveragingSection, {"code": code, "rank": rank})
    faults = [f"{path} {message}" for path, message in check(RunFile(run="any", averaging=made))]
    if faults:
        raise ConfigError("; ".join(faults))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """A user's settings of the run, besides its model and optimizer. Raises ConfigError if they are invalid."""

    run: str
    target_samples: int
    samples_per_step: int
    averaging: AveragingSection
    save_steps: int
    min_peers: int
    access: AccessSection
    limits: LimitsSection

    def __post_init__(self) -> None:
        target, samples = self.target_samples, self.samples_per_step
        for name, value in (("target_samples", target), ("samples_per_step", samples)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of samples above 0")
        if type(self.save_steps) is not int or self.save_steps < 1:
            raise ConfigError(f"save_steps is {self.save_steps!r}; it must be a whole number above 0")
        if self.min_peers < 1:
            raise ConfigError(f"min_peers is {self.min_peers}; it must be at least 1")
        if target % samples or target // samples > MAX_MICROBATCHES:
            allowed = f"a multiple of samples_per_step ({samples}), up to {samples * MAX_MICROBATCHES}"
            raise ConfigError(f"target_samples is {target}; allowed: {allowed}")

    def run_file(self, model: UserModel) -> RunFile:
        """The run file, with one stage and the settings on which the run's peers must agree."""
        layout = StateLayout(model.outline())
        made = RunFile(
            run=self.run,
            model=ModelSection(kind="loop", layers=1, dtype="float64" if model.dtype == torch.float64 else "float32"),
            pipeline=PipelineSection(stages=1, microbatch=self.samples_per_step),
            optimizer=OptimizerSection(delayed=model.delayed),
            batch=BatchSection(target_samples=self.target_samples),
            averaging=self.averaging,
            checkpoint=CheckpointSection(every_steps=self.save_steps),
            loop=LoopSection(
                model=model.model_text(),
                optimizer=model.optimizer_text(),
                layout=layout.digest.hex(),
                layout_bytes=len(layout.text),
            ),
            limits=self.limits,
            access=self.access,
        )
        faults = [f"{path} {message}" for path, message in check(made)]
        if faults:
            raise ConfigError("; ".join(faults))
        return made
