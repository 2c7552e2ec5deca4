"""A sum that is lent to a round of averaging stays as it is, whatever is added or forgotten meanwhile."""

from __future__ import annotations

import pytest
import torch

from peerd.codec.flat import FlatLayout, FlatSums

LAYOUT = FlatLayout(("a", "b"), (torch.Size([2, 3]), torch.Size([4])))


def ones() -> list[torch.Tensor]:
    return [torch.ones(shape) for shape in LAYOUT.shapes]


@pytest.mark.parametrize("change", ["add", "clear", "clear_all", "step"])
def test_a_lent_sum_never_changes(change: str) -> None:
    sums = FlatSums(LAYOUT, 2, torch.float32, "cpu")
    sums.add(ones(), 1.0, 0)
    sums.add(ones(), 5.0, 1)
    lent = sums.lend()
    assert lent is sums.due  # no copy
    {
        "add": lambda: sums.add(ones(), 1.0, 0),
        "clear": lambda: sums.clear(0),
        "clear_all": sums.clear_all,
        "step": sums.step,
    }[change]()
    assert torch.equal(lent, torch.ones(10))
    expected = {"add": 2.0, "clear": 0.0, "clear_all": 0.0, "step": 5.0}[change]
    assert torch.equal(sums.due, torch.full((10,), expected))
    sums.add(ones(), 1.0, 0)
    assert torch.equal(sums.due, torch.full((10,), expected + 1.0))
    assert torch.equal(lent, torch.ones(10))


def test_adding_for_the_next_step_copies_nothing() -> None:
    sums = FlatSums(LAYOUT, 2, torch.float32, "cpu")
    lent = sums.lend()
    sums.add(ones(), 1.0, 1)
    assert sums.due is lent
