"""Q is a part of a model's state: in what newcomers get and checkpoints keep, and checked as all of it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peerd.codec.powersgd import PowerSgd
from peerd.messages.state import TensorSpec
from peerd.model.stage.served_stage import ServedStage, items_of, state_of
from peerd.model.stage.user_model import UserModel
from peerd.run.runfile import AveragingSection, ModelSection, OptimizerSection, PipelineSection, RunFile, fingerprint

AVERAGING = AveragingSection(code="powersgd", rank=2)


def served(averaging: AveragingSection = AVERAGING) -> ServedStage:
    run = RunFile(
        run="state",
        model=ModelSection(d_model=16, heads=2, layers=2, context=16),
        pipeline=PipelineSection(stages=2, microbatch=2),
        optimizer=OptimizerSection(name="adamw"),
        averaging=averaging,
    )
    return ServedStage(run, 1, "cpu")


def user(averaging: AveragingSection = AVERAGING) -> UserModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return UserModel(optimizer, model.named_parameters(), averaging=averaging)


MODELS = pytest.mark.parametrize("make", [served, user])


def count(model: Any) -> int:
    layout = model.module.layout if isinstance(model, ServedStage) else model.layout
    return int(layout.count)


def step(model: Any, number: int) -> None:
    """One global step of a swarm of one, as far as the code goes."""
    code: PowerSgd = model.low_rank
    vector = model.vector().copy()  # with what travels behind the gradients
    vector[: count(model)] = np.random.default_rng(number).standard_normal(count(model))
    ready = code.finish(code.project(code.begin(vector)))
    model.commit(number, ready.total, 4)
    code.settle(ready)


def bits(model: Any) -> dict[str, bytes]:
    return {name: bytes(data) for name, _, _, data in items_of(model.state())}


@MODELS
def test_an_outline_is_what_describe_gives_and_has_q(make: Any) -> None:
    model = make()
    given = items_of(model.state())
    assert model.outline() == [TensorSpec(name, dtype, shape) for name, dtype, shape, _ in given]
    found = {name: shape for name, _, shape, _ in given if name.startswith("powersgd/")}
    assert found == {name: tuple(q.shape) for name, q in model.low_rank.state().items()}
    assert found
    assert not any(spec.name.startswith("powersgd/") for spec in make(AveragingSection()).outline())


@MODELS
def test_a_newcomer_goes_on_with_the_same_bits(make: Any) -> None:
    old, new = make(), make()
    for number in range(3):
        step(old, number)
    assert bits(old) != bits(new)
    new.load(state_of(items_of(old.state())))
    assert bits(old) == bits(new)
    step(new, 3)
    old.low_rank.forget()  # a residual is each peer's own: the newcomer has none
    step(old, 3)
    assert bits(old) == bits(new)


@MODELS
def test_a_state_is_a_copy_and_loading_one_forgets_the_residual(make: Any) -> None:
    model = make()
    before = bits(model)
    state = model.state()
    step(model, 0)
    assert model.low_rank.residual().any()
    assert all(bits(model)[name] != before[name] for name in model.low_rank.state())
    model.load(state)
    assert bits(model) == before
    assert not model.low_rank.residual().any()


@MODELS
@pytest.mark.parametrize("fault", ["missing", "shape", "nan"])
def test_a_state_whose_q_does_not_fit_is_refused_and_changes_nothing(make: Any, fault: str) -> None:
    model = make()
    state, before = model.state(), bits(model)
    name = next(name for name in state if name.startswith("powersgd/"))
    if fault == "missing":
        del state[name]
    elif fault == "shape":
        state[name] = state[name][:-1]
    else:
        state[name][0, 0] = torch.nan
    with pytest.raises(ValueError, match=name):
        model.load(state)
    assert bits(model) == before


def test_the_rank_is_one_of_the_settings_that_peers_must_share() -> None:
    marks = {fingerprint(RunFile(run="x", averaging=AveragingSection(code="powersgd", rank=rank))) for rank in (2, 4)}
    assert len(marks | {fingerprint(RunFile(run="x"))}) == 3
