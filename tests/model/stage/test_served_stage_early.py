"""A served stage in a delayed run: two sums, of which the early one becomes the other's successor, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peerd.codec.frames import to_frame
from peerd.messages.swarm import Mb
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import ModelSection, OptimizerSection, RunFile


def stage(delayed: bool = True) -> ServedStage:
    run = RunFile(
        run="early",
        model=ModelSection(d_model=16, heads=2, layers=1, context=8, dtype="float64"),
        optimizer=OptimizerSection(name="adamw", lr=0.05, delayed=delayed),
    )
    return ServedStage(run, 0, "cpu")


def tokens(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, 256, (2, 9), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def add(served: ServedStage, step: int, number: int) -> Any:
    pair = tokens(number)
    return served.backward(step, Mb("t", number), pair, [to_frame(tensor) for tensor in pair])


def mean(served: ServedStage, number: int) -> Any:
    return np.random.default_rng(number).standard_normal(served.module.layout.count)


@pytest.fixture(autouse=True)
def _alone() -> None:
    torch.set_num_threads(1)


def test_early_microbatches_are_of_the_parameters_of_now_and_held_after_the_step() -> None:
    served, other = stage(), stage()
    add(served, 0, 1)
    add(served, 1, 2)
    assert (served.held, served.early) == ([Mb("t", 1)], [Mb("t", 2)])
    add(other, 0, 2)
    total = mean(served, 0)
    served.commit(0, total, 2)
    assert (served.held, served.early) == ([Mb("t", 2)], [])
    assert np.array_equal(served.vector(), other.vector())  # with the parameters of step 0
    other.commit(0, total, 2)
    add(served, 1, 3)
    add(other, 1, 3)
    added = served.vector() - other.vector()
    assert np.abs(added).max() > 0  # the same one on top of nothing: the early one is in the sum still
    assert other.held == [Mb("t", 3)]


def test_an_early_repeat_gets_the_kept_answer_before_and_after_the_step() -> None:
    served = stage()
    first = add(served, 1, 2)
    assert add(served, 1, 2) is first
    served.commit(0, mean(served, 0), 2)
    before = served.vector()
    assert add(served, 1, 2) is first
    assert np.array_equal(served.vector(), before)


def test_what_was_added_before_the_step_comes_out_with_the_parameters_of_then() -> None:
    served = stage()
    add(served, 1, 2)
    before = served.module.digest()
    served.commit(0, mean(served, 0), 2)
    assert served.module.digest() != before
    now = served.module.digest()
    add(served, 1, 3)
    alone = stage()
    alone.commit(0, mean(served, 0), 2)
    add(alone, 1, 3)
    assert served.keep_only(1, [Mb("t", 3)]) == []
    assert np.abs(served.vector() - alone.vector()).max() < 1e-13
    assert served.module.digest() == now


@pytest.mark.parametrize(("delayed", "step"), [(True, 2), (True, -1), (False, 1)])
def test_a_step_further_ahead_or_gone_by_is_refused(delayed: bool, step: int) -> None:
    served = stage(delayed)
    with pytest.raises(Stale):
        add(served, step, 1)
    with pytest.raises(Stale):
        served.forward(step, tokens(1)[0])
    assert (served.held, served.early) == ([], [])


def test_a_sum_is_averaged_and_used_up_only_in_its_own_step() -> None:
    served = stage()
    add(served, 1, 2)
    with pytest.raises(Stale):
        served.keep_only(1, [Mb("t", 2)])
    with pytest.raises(Stale):
        served.commit(1, mean(served, 0), 2)
    assert not served.vector().any()


def test_another_state_forgets_both_sums() -> None:
    served = stage()
    state = served.state()
    add(served, 0, 1)
    add(served, 1, 2)
    served.load(state)
    assert (served.held, served.early) == ([], [])
    assert not served.vector().any()
    served.commit(0, mean(served, 0), 2)
    assert not served.vector().any()
