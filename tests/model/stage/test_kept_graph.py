"""Graphs that are kept from forward to backward: they save computing forward again, and change nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from peerd.model.stage.kept_graph import KeptGraph
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, OptimizerSection, PipelineSection, RunFile
from tests.kit.runs import changed

RUN = RunFile(
    run="graphs",
    model=ModelSection(d_model=16, heads=2, layers=3, context=8),
    pipeline=PipelineSection(stages=3, microbatch=2),
    optimizer=OptimizerSection(name="sgd", lr=0.1),
)
TOKENS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(1))
HIDDEN, GRADIENT = (torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(n)) for n in (2, 3))


@pytest.fixture(params=[0, 1], ids=["first", "middle"])
def stage(request: pytest.FixtureRequest) -> StageModule:
    return StageModule(RUN, request.param)


def input_of(stage: StageModule) -> Tensor:
    return TOKENS if stage.first else HIDDEN


def computed(stage: StageModule, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The forward passes of `stage` from now on."""
    passes: list[int] = []
    original = stage._compute
    monkeypatch.setattr(stage, "_compute", lambda x: passes.append(1) or original(x))
    return passes


def after(stage: StageModule, graph: KeptGraph | None) -> tuple[Tensor | None, Tensor]:
    """The input's gradient, and the sum, of one backward."""
    gradient, _ = stage.backward(input_of(stage), GRADIENT, graph=graph)
    return gradient, stage.gradient()


def assert_same(one: tuple[Tensor | None, Tensor], other: tuple[Tensor | None, Tensor]) -> None:
    assert (one[0] is None) == (other[0] is None)
    assert one[0] is None or torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_a_backward_with_a_graph_gives_the_same_bits_and_computes_forward_once(
    stage: StageModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = after(StageModule(RUN, stage.stage), None)
    passes = computed(stage, monkeypatch)
    graph = stage.forward_for_backward(input_of(stage))
    assert torch.equal(graph.y.detach(), StageModule(RUN, stage.stage).forward(input_of(stage), training=True))
    assert_same(after(stage, graph), expected)
    assert len(passes) == 1


def test_a_graph_is_used_once(stage: StageModule, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = stage.forward_for_backward(input_of(stage))
    after(stage, graph)
    stage.empty_sum()
    passes = computed(stage, monkeypatch)
    assert_same(after(stage, graph), after(StageModule(RUN, stage.stage), None))
    assert len(passes) == 1


@pytest.mark.parametrize("by", ["a step", "another state"])
def test_a_graph_of_other_parameters_is_not_used(stage: StageModule, by: str) -> None:
    other = StageModule(RUN, stage.stage)
    after(other, None)
    other.apply(other.gradient() / 2)
    graph = stage.forward_for_backward(input_of(stage))
    if by == "a step":
        after(stage, None)
        stage.apply(stage.gradient() / 2)
    else:
        stage.load_state(other.state())
    assert_same(after(stage, graph), after(other, None))


def test_what_a_graph_takes_is_measured_without_the_parameters(stage: StageModule) -> None:
    assert stage.graph_bytes == 0
    graph = stage.forward_for_backward(input_of(stage))
    per_token = 4 * RUN.model.d_model
    assert 5 * TOKENS.numel() * per_token < graph.bytes < 60 * TOKENS.numel() * per_token
    assert stage.forward_for_backward(input_of(stage)).bytes == graph.bytes == stage.graph_bytes
    half = stage.forward_for_backward(input_of(stage)[:1])
    assert graph.bytes / 3 < half.bytes < graph.bytes


def test_the_last_stage_and_scaled_16_bits_keep_none() -> None:
    scaled = changed(RUN, model={"precision": "fp16"})
    assert not StageModule(RUN, 2).keeps_graphs
    assert not StageModule(scaled, 0).keeps_graphs
    assert StageModule(RUN, 0).keeps_graphs


def test_a_graph_that_was_measured_and_is_not_used_is_freed(stage: StageModule) -> None:
    """Else a peer that sends inputs of another length each time fills the memory."""
    for length in (8, 7, 6):
        graph = stage.forward_for_backward(input_of(stage)[:, :length])
        kept = weakref.ref(graph.x)
        del graph
        gc.collect()
        assert kept() is None


def test_what_a_microbatch_takes_is_known_after_the_first(stage: StageModule) -> None:
    assert stage.activation_bytes == 0
    after(stage, None)
    most = stage.activation_bytes
    parameters = 4 * stage.layout.count
    assert parameters < most < parameters + 1_000_000
    stage.backward(input_of(stage)[:, :4], GRADIENT[:, :4])
    assert stage.activation_bytes == most
