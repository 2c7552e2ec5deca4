"""Steps made with another's totals: the same bits as its own, for stages and for users' models, whatever the code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peerd.codec.tensors import state_digest
from peerd.messages.swarm import Position
from peerd.model.stage.served_stage import Model, ServedStage
from peerd.model.stage.user_model import UserModel
from peerd.run.runfile import AveragingSection, ModelSection, OptimizerSection, PipelineSection, RunFile
from peerd.state.catchup.step_totals import StepTotal

SAMPLES = 8


def stage(averaging: AveragingSection) -> Model:
    run = RunFile(
        run="leaps",
        model=ModelSection(d_model=16, heads=2, layers=2, context=8),
        pipeline=PipelineSection(stages=1, microbatch=2),
        optimizer=OptimizerSection(name="adamw"),
        averaging=averaging,
    )
    return ServedStage(run, 0, "cpu")


def user(averaging: AveragingSection) -> Model:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 10)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return UserModel(optimizer, module.named_parameters(), averaging=averaging)


@pytest.mark.slow
@pytest.mark.parametrize("make", [stage, user])
@pytest.mark.parametrize("code", ["none", "powersgd"])
def test_steps_made_with_others_totals_end_with_the_same_bits(make: object, code: str) -> None:
    averaging = AveragingSection(code=code)  # type: ignore[arg-type]
    ahead, late = make(averaging), make(averaging)  # type: ignore[operator]
    rng = np.random.default_rng(1)
    spec = ahead.vector_outline()
    for step in range(4):
        total = rng.standard_normal(spec.shape).astype(spec.dtype)
        code_of = ahead.low_rank
        if code_of is not None:
            code_of.begin(total.copy())
            ready = code_of.finish(code_of.project(code_of.begin(total.copy())))
            total = ready.total
        ahead.commit(step, total, SAMPLES)
        if code_of is not None:
            code_of.settle(ready)
        made = StepTotal.made(ahead, Position(step + 1, b"x"), total)
        items = made.items()
        assert [(i.name, i.dtype, i.shape) for i in items] == [
            (s.name, s.dtype, s.shape) for s in StepTotal.outline(late)
        ]
        StepTotal.of(made.target, items).make(late, SAMPLES)
        assert state_digest(late.state()) == state_digest(ahead.state())


def test_what_is_not_finite_changes_nothing() -> None:
    model = user(AveragingSection(code="powersgd"))
    before = state_digest(model.state())
    spec = model.vector_outline()
    total = np.ones(spec.shape, spec.dtype)
    assert model.low_rank is not None
    code = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.low_rank.state().items()}
    for leap in (StepTotal(Position(1, b""), total * np.nan), StepTotal(Position(1, b""), total, code)):
        with pytest.raises(ValueError, match="not finite"):
            leap.make(model, SAMPLES)
    assert state_digest(model.state()) == before
