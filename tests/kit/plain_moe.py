"""The same mixture of experts as DMoE, written plainly: one loop over samples and experts, ordinary torch modules."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from peerd.experts.model.blocks import build_block
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, RunFile


class PlainMoE(nn.Module):
    """A layer of experts. `dead` ones are never chosen; `missing` are chosen and do not answer."""

    def __init__(self, run: RunFile, layer: int, gate: Tensor) -> None:
        super().__init__()
        self.section = run.experts or ExpertsSection()
        self.layer, self.sides = layer, grid_of(run).sides
        self.gate = nn.Parameter(gate.detach().clone())
        self.dead: set[Uid] = set()
        self.missing: set[Uid] = set()
        self.uids = [Uid(layer, at) for at in itertools.product(*map(range, self.sides))]
        self.experts = nn.ModuleDict({str(uid).replace(".", "_"): build_block(run, uid) for uid in self.uids})
        self.touched: set[Uid] = set()

    def expert(self, uid: Uid) -> nn.Module:
        return self.experts[str(uid).replace(".", "_")]

    def score(self, uid: Uid, scores: Tensor) -> Tensor:
        starts = [sum(self.sides[:i]) for i in range(len(self.sides))]
        return torch.stack([scores[s + c] for s, c in zip(starts, uid.at, strict=True)]).sum()

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        self.touched = set()
        for one in x:
            pooled = one if one.ndim == 1 else one.mean(0)
            scores = self.gate @ pooled
            alive = [uid for uid in self.uids if uid not in self.dead]
            best = sorted(alive, key=lambda uid: -float(self.score(uid, scores.detach())))[: self.section.top_k]
            came = [uid for uid in best if uid not in self.missing]
            weights = torch.stack([self.score(uid, scores) for uid in came]).softmax(0)
            outputs = [self.expert(uid)(one[None])[0] for uid in came]
            rows.append(sum(w * y for w, y in zip(weights, outputs, strict=True)))
            self.touched |= set(came)
        return torch.stack(rows)

    def step(self) -> None:
        """What each expert does with its own gradient: clip, then plain descent."""
        o = self.section.optimizer
        for uid in self.touched:
            parameters = list(self.expert(uid).parameters())
            torch.nn.utils.clip_grad_norm_(parameters, o.clip_norm)
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= o.lr * parameter.grad
                    parameter.grad = None
