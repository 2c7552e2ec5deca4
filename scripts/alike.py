"""Training on identical samples, so that all batches have the same gradient.

So plain torch can reproduce a swarm's steps without knowing their batches, and the parameters differ if the swarm
counted a sample twice, left one out or accepted a wrong one. Used by the soak test and the GPU check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from peerd.model.stage.assemble import load_whole_model
from peerd.run.runfile import RunFile
from scripts.plain_torch import PlainTraining

PERIOD: Final = bytes(range(97, 97 + 26)) + b"ABCDEF"  # as long as the stride between samples, so that all are equal
CONTEXT: Final = len(PERIOD)


def write_text(folder: Path) -> Path:
    """Write the text to train on, unless it exists. Returns its path."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_bytes(PERIOD * 500_000)
    return text


def alike_run(text: Path) -> dict[str, Any]:
    """Sections of a run file that are the same in all such runs."""
    return {
        "seed": 11,
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": {"target_samples": 32},
        "data": {"path": str(text), "holdout": 0, "shuffle_buffer": 100},
        "evaluate": {"every_steps": 0},
    }


class Plain:
    """The same training in plain torch with SGD, in one process on one device."""

    def __init__(self, run: RunFile, device: str = "cpu") -> None:
        self._training, self._steps = PlainTraining(run, device=device), 0
        tokens = torch.tensor(list(PERIOD + PERIOD[:1]), dtype=torch.int64)
        self._rows = torch.stack([tokens] * run.batch.target_samples).to(device)

    def at(self, step: int) -> dict[str, Tensor]:
        """Parameters after `step` steps, on the CPU. Successive calls must not decrease `step`."""
        torch.set_num_threads(1)
        while self._steps < step:
            self._training.step(self._rows)
            self._steps += 1
        return {name: value.detach().cpu().clone() for name, value in self._training.model.named_parameters()}


def difference(run: RunFile, replicas: Sequence[Mapping[int, Path]], device: str = "cpu") -> tuple[float, list[int]]:
    """The largest relative difference of a tensor of any replica from plain torch's, and the step of each replica.

    `replicas` has, for each replica, the folder with the checkpoint of each stage.
    """
    found = []
    for folders in replicas:
        found.append(load_whole_model(run, [next(of.rglob(f"stage-{stage}")) for stage, of in sorted(folders.items())]))
    plain, most, at = Plain(run, device), 0.0, []
    for model, step in sorted(found, key=lambda pair: pair[1]):
        expected = plain.at(step)
        at.append(step)
        for name, value in model.named_parameters():
            apart = (value.detach() - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
            most = max(most, float(apart))
    return most, at
