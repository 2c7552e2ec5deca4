"""A classifier of digits as the trunk of a run with experts, instead of a language model; and its data.

A sample is 64 pixels of 17 shades and the label, as 65 tokens, so that role `trainer` can read it like text. Only the
last token, the label, is predicted from the tokens before; the other predictions are constant and have no gradient.
Everything else is peerd's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerd.experts.model.expert_mixture import mixed
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.experts.model.trunk import TrunkModule
from peerd.model.layers import ExpertBlock
from peerd.model.stage import stage_module
from peerd.model.stage.partition import ModelPiece
from peerd.pipeline.trainer.trainer_data import TrainerData
from peerd.role.role import RoleContext
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import RunFile
from roles.trainer import TrainerRole
from scripts.benchmarks._expert_swarm import flown

PIXELS, CLASSES = 64, 10


class DigitEntry(nn.Module):
    """First layer: pixels [B, 64] to vectors [B, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(PIXELS, width)

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.into(tokens.to(self.into.weight.dtype) / 8 - 1)
        return h


class DigitBlock(ExpertBlock):
    """Layer that consists of experts only."""

    def __init__(self, width: int, scores: int) -> None:
        nn.Module.__init__(self)
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, scores, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.norm(x)


class DigitHead(nn.Module):
    """Last layer: vectors [B, D] to scores of the next token [B, 64, V]. The last position predicts the label."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm, self.out, self.vocab = nn.LayerNorm(width), nn.Linear(width, CLASSES), vocab

    def forward(self, x: Tensor) -> Tensor:
        label = F.pad(self.out(self.norm(x)), (0, self.vocab - CLASSES), value=-30.0)
        others = label.new_zeros(len(x), PIXELS - 1, self.vocab)
        return torch.cat([others, label[:, None]], 1)


@contextmanager
def digit_trunks() -> Iterator[None]:
    """Context in which the trunks of runs are classifiers of digits."""

    def build(run: RunFile, stages: Any) -> ModelPiece:
        width, grid = run.model.d_model, grid_of(run)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            blocks = [(f"block{i}", DigitBlock(width, sum(grid.sides)), 1) for i in range(grid.layers)]
            return ModelPiece([("embed", DigitEntry(width), 1), *blocks, ("head", DigitHead(width, 256), 1)]).eval()

    with mock.patch.object(stage_module, "build", build):
        yield


class DigitStream:
    """A trainer's samples: the digits to train on, repeated, each time in a new order that depends on `name`."""

    origins: tuple[str, ...] = ()
    skipped = 0

    def __init__(self, samples: Tensor, name: str) -> None:
        self._samples, self._left = samples, samples[:0]
        self._order = torch.Generator().manual_seed(int.from_bytes(name.encode()[-6:], "big"))

    def take(self, count: int) -> Tensor:
        while len(self._left) < count:
            again = self._samples[torch.randperm(len(self._samples), generator=self._order)]
            self._left = torch.cat([self._left, again])
        found, self._left = self._left[:count], self._left[count:]
        return found

    def position(self) -> dict[str, Any]:
        return {}


class DigitData(TrainerData):
    """A trainer's data with digits instead of text."""

    samples: Tensor

    def _open(self) -> Any:
        return DigitStream(self.samples, self._ctx.host.id.text)

    async def prompt_digests(self) -> dict[str, str]:
        return {}


class DigitTrainer(TrainerRole):
    """Role `trainer` with digits as samples."""

    samples: Tensor

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self._data = DigitData(ctx)
        self._data.samples = self.samples


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: 1,437 samples to train on, 360 to test on, each of 65 tokens."""
    from sklearn.datasets import load_digits

    found = load_digits()
    samples = torch.tensor([[*image, label] for image, label in zip(found.data, found.target, strict=True)]).long()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    return samples[order[360:]], samples[order[:360]]


@torch.no_grad()
def accuracy(run: RunFile, trunk: TrunkModule, experts: Mapping[Uid, HostedExpert], test: Tensor) -> float:
    """Percentage of the test samples whose label is predicted correctly."""
    last = flown(run, trunk, experts, test[:, :-1], test[:, 1:])._stops[-1]
    assert last.answers is not None
    mean = mixed(last.junction.scores, last.answers.columns, last.answers.came, last.answers.outputs)
    logits = trunk._piece.get_submodule("head")(last.junction.residual + mean)
    return float((logits[:, -1].argmax(1) == test[:, -1]).float().mean()) * 100
