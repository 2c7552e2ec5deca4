"""Tolerance of "equal": far more than rounding does to one plain process that sums in another order.

Else a swarm, whose order is a matter of chance, would now and then be told unequal though it is not.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
import torch

from peerd.model.stage.partition import whole_model
from tests.kit.amount import few
from tests.kit.exact import OPTIMIZERS, STEPS, TOLERANCE, distance, run_file, stepping, write_texts

SAMPLES = 16
MARGIN = 2.5  # an order that nobody tried may do worse
RUNS = 8

Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of(folder: Path, context: int, rng: Random) -> list[Batch]:
    """Tokens and targets of each step."""
    texts = [torch.tensor(list(path.read_bytes())) for path in sorted(folder.glob("*.txt"))]

    def sample() -> torch.Tensor:
        text = rng.choice(texts)
        start = rng.randrange(len(text) - context)
        return text[start : start + context + 1]

    steps = [torch.stack([sample() for _ in range(SAMPLES)]) for _ in range(STEPS)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in steps]


@pytest.mark.parametrize(
    ("optimizer", "dtype"), few(itertools.product(OPTIMIZERS, TOLERANCE), ("sgd", "float32"), ("adamw", "float64"))
)
def test_the_order_of_a_sum_moves_parameters_by_far_less_than_is_allowed(
    tmp_path: Path, seed: int, optimizer: str, dtype: str
) -> None:
    run, rng = run_file(optimizer, dtype, write_texts(tmp_path), stages=1), Random(seed)

    def trained(batches: list[Batch], order: list[int], at_once: int) -> dict[str, torch.Tensor]:
        model = whole_model(run)
        make_step = stepping(list(model.parameters()), run.optimizer)
        for tokens, targets in batches:
            model.zero_grad()
            for some in torch.tensor(order).split(at_once):
                logits, expected = model(tokens[some]).flatten(0, 1), targets[some].flatten()
                loss = torch.nn.functional.cross_entropy(logits, expected, reduction="sum")
                (loss / targets.numel()).backward()
            make_step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    for _ in range(RUNS):
        batches = batches_of(tmp_path, run.model.context, rng)
        straight = trained(batches, list(range(SAMPLES)), SAMPLES)
        shuffled = trained(batches, rng.sample(range(SAMPLES), SAMPLES), run.pipeline.microbatch)
        apart = {name: distance(shuffled[name], straight[name]) for name in straight}
        assert max(apart.values()) > 0.0  # else the order was no other
        assert max(apart.values()) < TOLERANCE[dtype] / MARGIN, apart
