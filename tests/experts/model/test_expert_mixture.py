"""The mean of the experts that came, its gradients, and the balance of the gate."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.experts.model.expert_mixture import choice_of, expert_scores, imbalance, mixed, weights_of
from peerd.run.grid import Uid
from tests.kit.amount import examples
from tests.kit.expert_runs import values

SIDES = (3, 4)
CHOSEN = [[Uid(0, (0, 1)), Uid(0, (2, 3)), Uid(0, (1, 1))], [Uid(0, (2, 0))], [Uid(0, (1, 2)), Uid(0, (1, 3))]]


def scene(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    choice = choice_of(CHOSEN, SIDES, 3)
    return values(3, 7, dtype=dtype), choice.columns, choice.taken, values(3, 3, 5, seed=1, dtype=dtype)


def test_an_experts_score_is_the_sum_over_its_coordinates() -> None:
    scores, columns, taken, _ = scene()
    found = expert_scores(scores, columns)
    for sample, uids in enumerate(CHOSEN):
        for slot, uid in enumerate(uids):
            assert found[sample, slot] == scores[sample, uid.at[0]] + scores[sample, 3 + uid.at[1]]
    assert taken.tolist() == [[True] * 3, [True, False, False], [True, True, False]]


@pytest.mark.parametrize("sides", [(5,), (3, 4), (2, 3, 4)])
def test_scores_add_up_in_one_two_and_three_dimensions(sides: tuple[int, ...]) -> None:
    uids = [Uid(0, at) for at in itertools.product(*map(range, sides))]
    scores = values(1, sum(sides))
    found = expert_scores(scores, choice_of([uids], sides, len(uids)).columns)[0]
    parts = [list(part) for part in scores[0].split(list(sides))]
    assert torch.allclose(found, torch.stack([sum(at) for at in itertools.product(*parts)]))


@given(st.lists(st.booleans(), min_size=9, max_size=9), st.integers(0, 1000))
@settings(max_examples=examples(50), deadline=None)
def test_weights_sum_to_one_over_whoever_came_and_are_as_if_the_others_had_not_been_asked(
    came: list[bool], seed: int
) -> None:
    _, columns, taken, _ = scene()
    scores, here = values(3, 7, seed=seed), taken & torch.tensor(came).view(3, 3)
    weights = weights_of(scores, columns, here)
    assert torch.equal(weights > 0, here)
    for sample in range(3):
        alone = expert_scores(scores, columns)[sample][here[sample]].softmax(0)
        assert torch.allclose(weights[sample][here[sample]], alone)


def test_gradients_of_scores_and_outputs_are_right() -> None:
    scores, columns, came, outputs = scene()
    came = came & torch.tensor([[True, False, True]] * 3)
    inputs = (scores.requires_grad_(), outputs.requires_grad_())
    assert torch.autograd.gradcheck(lambda s, o: mixed(s, columns, came, o), inputs)


def test_no_gradient_reaches_an_expert_that_did_not_come() -> None:
    scores, columns, came, outputs = scene()
    came[0] = torch.tensor([True, True, False])
    scores.requires_grad_()
    outputs.requires_grad_()
    mixed(scores, columns, came, outputs).square().sum().backward()
    assert scores.grad is not None
    assert outputs.grad is not None
    assert not outputs.grad[0, 2].any()
    # Expert (1, 1) is the only one of sample 0 with the coordinate 1 in the first dimension.
    assert scores.grad[0, 1] == 0
    assert scores.grad[0, 0] != 0


def test_a_sample_without_answers_gives_zeros_and_no_nan() -> None:
    scores, columns, came, outputs = scene()
    came[1] = False
    scores.requires_grad_()
    y = mixed(scores, columns, came, outputs)
    y.sum().backward()
    assert not y[1].any()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_the_balance_is_the_squared_coefficient_of_variation() -> None:
    scores = values(50, 7, dtype=torch.float64)
    expected = 0.0
    for part in scores.split(SIDES, 1):
        share = part.softmax(1).mean(0)
        expected += float((share.std(correction=0) / share.mean()) ** 2)
    assert float(imbalance(scores, SIDES)) == pytest.approx(expected)


def test_the_balance_is_zero_when_even_and_largest_when_one_place_gets_all() -> None:
    assert float(imbalance(torch.zeros(4, 7), SIDES)) == pytest.approx(0, abs=1e-6)
    greedy = torch.full((4, 7), -1000.0)
    greedy[:, [1, 5]] = 0
    assert float(imbalance(greedy, SIDES)) == pytest.approx(2 + 3)


def test_gradients_of_the_balance_are_right() -> None:
    scores = values(4, 7, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: imbalance(s, SIDES), (scores,))
