"""What is said of a model's size without torch is what torch builds, parameter by parameter and byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.codec.flat import FlatLayout
from peerd.codec.powersgd import sort_out
from peerd.model.shapes.averaged_vector import vector_sizes
from peerd.model.shapes.model_shapes import stage_shapes
from peerd.model.shapes.model_size import factored_values, stage_sizes
from peerd.model.stage.footprint import footprint
from peerd.model.stage.partition import build, outline
from peerd.run.runfile import AveragingSection, ExpertsSection, ModelSection, OptimizerSection, PipelineSection, RunFile

VOCAB = 256  # of bytes

optimizers = st.sampled_from(
    [
        OptimizerSection(),
        OptimizerSection(name="sgd"),
        OptimizerSection(name="lars", momentum=0.9),
        OptimizerSection(offload=True),
        OptimizerSection(delayed=True),
    ]
)


@st.composite
def runs(draw: st.DrawFn) -> RunFile:
    layers = draw(st.integers(1, 9))
    model = ModelSection(
        d_model=draw(st.integers(1, 40)) * 2,
        heads=1,
        layers=layers,
        share_layers=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "float64"])),
    )
    stages = PipelineSection(stages=draw(st.integers(1, layers)))
    return RunFile(run="sizes", model=model, pipeline=stages, optimizer=draw(optimizers))


def check_that_torch_agrees(run: RunFile) -> None:
    """Assert that sizes from the run file alone are those of the modules that torch builds."""
    for size in stage_sizes(run, VOCAB):
        built = outline(run, [size.stage])
        assert stage_shapes(run, size.stage, VOCAB) == {n: tuple(p.shape) for n, p in built.named_parameters()}
        assert size.parameters == sum(p.numel() for p in built.parameters())
        assert size.footprint == footprint(run, size.stage)
        assert size.memory_bytes == sum(footprint(run, size.stage).on("cpu"))


@given(runs())
def test_shapes_and_memory_are_those_of_the_model_that_torch_builds(run: RunFile) -> None:
    check_that_torch_agrees(run)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_layers_whose_feed_forward_experts_do_have_a_gate(layers: int) -> None:
    model = ModelSection(d_model=16, heads=2, layers=3)
    check_that_torch_agrees(RunFile(run="sizes", model=model, experts=ExpertsSection(layers=layers, grid=[4, 3])))


def test_a_stage_with_values_has_as_many_parameters() -> None:
    run = RunFile(run="sizes", model=ModelSection(d_model=16, heads=2), pipeline=PipelineSection(stages=2))
    counts = [sum(p.numel() for p in build(run, [stage]).parameters()) for stage in range(2)]
    assert [size.parameters for size in stage_sizes(run, VOCAB)] == counts


@given(runs(), st.integers(1, 130))
def test_powersgd_averages_as_many_values(run: RunFile, rank: int) -> None:
    shapes = [p.shape for p in outline(run, [0]).parameters()]
    layout = FlatLayout(tuple(map(str, range(len(shapes)))), tuple(shapes))
    sizes = sort_out(layout, rank)[2]
    assert sum(sizes) == sum(factored_values(tuple(shape), rank) for shape in shapes)
    assert sizes == vector_sizes(AveragingSection(code="powersgd", rank=rank), shapes)
    assert vector_sizes(AveragingSection(rank=rank), shapes) == (layout.count, 0)
