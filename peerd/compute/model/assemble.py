"""The whole model put together again from what its stages saved: for sampling and for export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peerd.compute.checkpoint import Checkpoints
from peerd.compute.model.partition import ModelPiece, whole_model
from peerd.core.errors import ConfigError
from peerd.core.run.runfile import RunFile, fingerprint

_PARAMETER, _BUFFER = "param/", "buffer/"


def load_whole_model(run: RunFile, stages: Sequence[Mapping[str, Tensor] | Path]) -> tuple[ModelPiece, int]:
    """The model and the step it is at, from each stage's state or folder of checkpoints, in the order of stages.

    Of folders, the newest step that all have is taken. ConfigError says which stage lacks what.
    """
    if len(stages) != run.pipeline.stages:
        raise ConfigError(f"the run has {run.pipeline.stages} stages; given are {len(stages)}")
    states = _read(run, stages)
    steps = [int(state["step"]) if "step" in state else -1 for state in states]
    if len(set(steps)) != 1:
        raise ConfigError(f"the stages are at different steps: {', '.join(map(str, steps))}")
    model = whole_model(run)
    _fill(model, states)
    return model, steps[0]


def _read(run: RunFile, stages: Sequence[Mapping[str, Tensor] | Path]) -> list[Mapping[str, Tensor]]:
    """Every stage's state; those on disk at the newest step that all of them have."""
    disk = {n: Checkpoints(at, 1, fingerprint(run), n) for n, at in enumerate(stages) if isinstance(at, Path)}
    if not disk:
        return [state for state in stages if not isinstance(state, Path)]
    step = _newest_common(list(disk.values()))
    return [disk[n].load(step)[0] if isinstance(given, Path) else given for n, given in enumerate(stages)]


def _newest_common(folders: Sequence[Checkpoints]) -> int:
    common = set.intersection(*(set(checkpoints.steps()) for checkpoints in folders))
    if not common:
        found = "; ".join(f"{c.folder}: {', '.join(map(str, c.steps())) or 'none'}" for c in folders)
        raise ConfigError(f"no step is saved by every stage ({found})")
    return max(common)


def _fill(model: ModelPiece, states: Sequence[Mapping[str, Tensor]]) -> None:
    """Every parameter of the model from the one stage that has it; nothing is left over."""
    given = {n.removeprefix(_PARAMETER): t for state in states for n, t in state.items() if n.startswith(_PARAMETER)}
    wanted = dict(model.named_parameters())
    for name in sorted(wanted.keys() | given.keys()):
        if name not in given or name not in wanted or given[name].shape != wanted[name].shape:
            raise ConfigError(f"the stages' parameters are not those of this run: {name} differs")
    buffers = {n.removeprefix(_BUFFER): t for state in states for n, t in state.items() if n.startswith(_BUFFER)}
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
