"""Assembly of the whole model from the states of its stages, for sampling and export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peerd.core.errors import ConfigError
from peerd.model.checkpoint import Checkpoints
from peerd.model.stage.partition import ModelPiece, whole_model
from peerd.run.runfile import RunFile, fingerprint

_PARAMETER, _BUFFER = "param/", "buffer/"


def load_whole_model(run: RunFile, stages: Sequence[Mapping[str, Tensor] | Path]) -> tuple[ModelPiece, int]:
    """Return the model and its step, from each stage's state or checkpoint folder, in the order of the stages.

    From folders it loads the newest step that all of them have. ConfigError names what is missing or does not fit.
    """
    if len(stages) != run.pipeline.stages:
        raise ConfigError(f"the run has {run.pipeline.stages} stages, but {len(stages)} were given")
    states = _read(run, stages)
    steps = [int(state["step"]) if "step" in state else -1 for state in states]
    if len(set(steps)) != 1:
        raise ConfigError(f"the stages are at different steps: {', '.join(map(str, steps))}")
    model = whole_model(run)
    _fill(model, states)
    return model, steps[0]


def _read(run: RunFile, stages: Sequence[Mapping[str, Tensor] | Path]) -> list[Mapping[str, Tensor]]:
    """The state of every stage. Stages on disk are read at the newest step that all of them have."""
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
    """Copy every parameter of the model from its stage; ConfigError if one is missing, unknown or of another shape."""
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
