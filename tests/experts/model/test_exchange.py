"""Rows by expert and back, and answers that cannot be used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from peerd.codec.frames import to_frame
from peerd.core.errors import TooFewExperts
from peerd.experts.model.exchange import Exchange
from peerd.run.expert_network import ExpertReply, ServedBy
from peerd.run.grid import Uid
from tests.kit.expert_runs import WIDTH, expert_run, values

A, B, C = Uid(0, (0, 1)), Uid(0, (2, 3)), Uid(0, (1, 1))
CHOSEN = [[A, B], [B, C], [A, C]]


def reply(rows: torch.Tensor, stale: int = 0) -> ExpertReply:
    return ExpertReply(to_frame(rows), ServedBy("12D3KooWliar", 2, 7), stale)


def exchange(**section: Any) -> Exchange:
    return Exchange(expert_run(top_k=2, **section), CHOSEN)


def test_rows_travel_once_for_each_expert_that_a_sample_chose() -> None:
    x = values(3, WIDTH)
    asks = exchange().forward_asks(x)
    assert {ask.uid: ask.samples for ask in asks} == {A: (0, 2), B: (0, 1), C: (1, 2)}
    assert all(ask.frames[0].shape == (2, WIDTH) for ask in asks)


def test_answers_come_back_into_their_places() -> None:
    one = exchange()
    asks = one.forward_asks(values(3, WIDTH))
    numbers = {A: 1.0, B: 2.0, C: 3.0}
    outputs = one.outputs([reply(torch.full((2, WIDTH), numbers[ask.uid])) for ask in asks])
    assert outputs[:, :, 0].tolist() == [[1, 2], [2, 3], [1, 3]]
    assert one.came.all()


def test_a_backward_goes_to_whoever_answered_with_samples_gradients_and_its_version() -> None:
    one = exchange()
    asks = one.forward_asks(values(3, WIDTH))
    one.outputs([None if ask.uid == B else reply(torch.ones(2, WIDTH)) for ask in asks])
    back = one.backward_asks(torch.ones(3, 2, WIDTH))
    assert [ask.uid for ask in back] == [A, C]
    for ask in back:
        assert len(ask.frames) == 2
        assert ask.served == ServedBy("12D3KooWliar", 2, 7)
    slopes = one.input_gradients([reply(torch.full((2, WIDTH), 5.0), 3), None])
    assert slopes[:, 0].tolist() == [5, 0, 5]
    assert one.stale == 3


def bad(kind: str) -> torch.Tensor:
    if kind == "rows":
        return torch.ones(3, WIDTH)
    if kind == "shape":
        return torch.ones(2, WIDTH + 1)
    if kind == "dtype":
        return torch.ones(2, WIDTH, dtype=torch.float64)
    return torch.full((2, WIDTH), math.nan if kind == "nan" else math.inf)


@pytest.mark.parametrize("kind", ["rows", "shape", "dtype", "nan", "infinite"])
def test_an_answer_that_cannot_be_used_counts_as_none_and_names_its_sender(kind: str) -> None:
    one = exchange()
    asks = one.forward_asks(values(3, WIDTH))
    outputs = one.outputs([reply(bad(kind) if ask.uid == B else torch.ones(2, WIDTH)) for ask in asks])
    assert one.came.tolist() == [[True, False], [False, True], [True, True]]
    assert not outputs[0, 1].any()
    (wrong,) = one.wrong
    assert "0.2.3" in wrong
    assert "WliarX"[:5] in wrong
    assert len(one.backward_asks(torch.ones(3, 2, WIDTH))) == 2


@pytest.mark.parametrize("kind", ["rows", "shape", "dtype", "nan", "infinite"])
def test_gradients_that_cannot_be_used_are_those_of_a_constant(kind: str) -> None:
    one = exchange()
    asks = one.forward_asks(values(3, WIDTH))
    one.outputs([reply(torch.ones(2, WIDTH)) for _ in asks])
    back = one.backward_asks(torch.ones(3, 2, WIDTH))
    slopes = one.input_gradients([reply(bad(kind) if ask.uid == B else torch.ones(2, WIDTH)) for ask in back])
    assert slopes[:, 0].tolist() == [1, 1, 2]
    assert len(one.wrong) == 1


def test_too_few_answers_that_can_be_used_name_the_experts_asked_and_what_was_wrong() -> None:
    one = exchange(k_min=2)
    asks = one.forward_asks(values(3, WIDTH))
    with pytest.raises(TooFewExperts, match=r"0\.0\.1, 0\.2\.3: the answer of expert 0\.2\.3 .*not finite"):
        one.outputs([reply(bad("nan") if ask.uid == B else torch.ones(2, WIDTH)) for ask in asks])


def test_a_sample_for_which_no_expert_lives_is_an_error_too() -> None:
    one = Exchange(expert_run(top_k=2), [[A], []])
    one.forward_asks(values(2, WIDTH))
    with pytest.raises(TooFewExperts, match="none is alive"):
        one.outputs([reply(torch.ones(1, WIDTH))])


def test_gradients_that_are_not_finite_never_leave() -> None:
    one = exchange()
    asks = one.forward_asks(values(3, WIDTH))
    one.outputs([reply(torch.ones(2, WIDTH)) for _ in asks])
    with pytest.raises(ValueError, match="gradients"):
        one.backward_asks(torch.full((3, 2, WIDTH), math.nan))
