"""Mixture of experts: scores of experts, the weighted mean of the outputs that arrived, and the balance of the gate.

Product keys (Lample et al. 2019; Learning@home, section 3.2): a gate scores the places of each dimension of the grid,
concatenated in one tensor; an expert's score is the sum over its coordinates. The softmax covers only the experts that
answered, as if the others had not been called, and only their scores get gradients. Sums run over the slots of a sample
in order, so equal inputs give equal bits on any device.

Shapes: N samples, K slots per sample for its chosen experts, G places in all dimensions together, d dimensions, *S
shape of one output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.run.grid import Uid


@dataclass(frozen=True, slots=True)
class ChosenColumns:
    """The experts that each sample chose: `columns` are their coordinates as columns of the scores."""

    columns: Tensor  # int64 [N, K, d]; zeros in empty slots
    taken: Tensor  # bool [N, K]: slots with an expert


def choice_of(chosen: Sequence[Sequence[Uid]], sides: Sequence[int], slots: int) -> ChosenColumns:
    """ChosenColumns of the first `slots` experts of each sample."""
    columns = torch.zeros(len(chosen), slots, len(sides), dtype=torch.int64)
    taken = torch.zeros(len(chosen), slots, dtype=torch.bool)
    starts = [sum(sides[:i]) for i in range(len(sides))]
    for sample, uids in enumerate(chosen):
        if found := [[s + c for s, c in zip(starts, uid.at, strict=True)] for uid in uids[:slots]]:
            columns[sample, : len(found)] = torch.tensor(found)
            taken[sample, : len(found)] = True
    return ChosenColumns(columns, taken)


def expert_scores(scores_NG: Tensor, columns_NKd: Tensor) -> Tensor:
    """Scores of the chosen experts, [N, K]."""
    N, K, d = columns_NKd.shape
    return scores_NG.gather(1, columns_NKd.reshape(N, K * d)).view(N, K, d).sum(-1)


def weights_of(scores_NG: Tensor, columns_NKd: Tensor, came_NK: Tensor) -> Tensor:
    """Weights [N, K] of the experts that answered, with a sum of 1 per sample; zeros if none answered."""
    found_NK = expert_scores(scores_NG, columns_NKd).masked_fill(~came_NK, -torch.inf)
    some_N1 = came_NK.any(1, keepdim=True)  # a softmax over nothing would be NaN, and so would its gradient
    return found_NK.masked_fill(~some_N1, 0.0).softmax(1).masked_fill(~some_N1, 0.0)


def mixed(scores_NG: Tensor, columns_NKd: Tensor, came_NK: Tensor, outputs: Tensor) -> Tensor:
    """The mean [N, *S] of the outputs [N, K, *S] that arrived, weighted by the softmax of their experts' scores."""
    weights = weights_of(scores_NG, columns_NKd, came_NK)
    return (weights.view(*weights.shape, *[1] * (outputs.ndim - 2)) * outputs).sum(1)


def imbalance(scores_NG: Tensor, sides: Sequence[int]) -> Tensor:
    """Squared coefficient of variation of the mean softmax over samples, summed over the grid's dimensions.

    0 if all places have the same mean; `side - 1` for a dimension in which one place gets everything.
    """
    total = scores_NG.new_zeros(())
    for scores, side in zip(torch.split(scores_NG, list(sides), 1), sides, strict=True):
        share = scores.softmax(1).mean(0)
        total = total + side * (share - 1.0 / side).square().sum()
    return total
