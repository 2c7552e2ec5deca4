"""Sizes of a run's stages: the figures that papers print, and how they grow."""

from __future__ import annotations

import pytest
from msgspec import structs

from peerd.core.errors import ConfigError
from peerd.model.shapes.model_size import boundary_bytes, factored_values, microbatches, stage_sizes
from peerd.run.runfile import AveragingSection, BatchSection, BoundarySection, ModelSection, PipelineSection, RunFile
from tests.kit.runs import changed

VOCAB = 256


def made(d_model: int = 768, layers: int = 12, stages: int = 4, **model: object) -> RunFile:
    section = structs.replace(ModelSection(d_model=d_model, heads=8, layers=layers, context=512), **model)
    return RunFile(run="sizes", model=section, pipeline=PipelineSection(stages=stages, microbatch=1))


@pytest.mark.parametrize(
    ("d_model", "millions"), [(768, 7.08), (4096, 201.0), (12288, 1812.0)], ids=["base", "xxlarge", "gpt3"]
)
def test_a_layer_has_twelve_squares_of_its_width(d_model: int, millions: float) -> None:
    size = stage_sizes(made(d_model), VOCAB)[1]
    assert size.layer_parameters == pytest.approx(12 * d_model**2, rel=1e-3)
    assert size.layer_parameters / 1e6 == pytest.approx(millions, rel=3e-3)
    assert size.parameters == len(size.blocks) * size.layer_parameters


@pytest.mark.parametrize("d_model", [4096, 12288])
def test_a_token_takes_six_flops_for_each_parameter_and_attention_besides(d_model: int) -> None:
    size = stage_sizes(made(d_model), VOCAB)[1]
    gains = 2 * d_model * len(size.blocks)
    attention = 6 * 512 * d_model * len(size.blocks)
    assert size.flops == 512 * (6 * (size.parameters - gains) + attention)
    assert size.flops == pytest.approx(6 * size.parameters * 512, rel=0.03)


def test_a_stage_of_twice_the_width_needs_half_the_line() -> None:
    narrow, wide = (stage_sizes(made(width), VOCAB)[1].saturating_rate(1e13) for width in (4096, 8192))
    assert narrow / wide == pytest.approx(2, rel=0.05)
    assert stage_sizes(made(), VOCAB)[1].saturating_rate(2e13) == 2 * stage_sizes(made(), VOCAB)[1].saturating_rate(
        1e13
    )


def test_the_line_carries_a_middle_stages_input_and_a_gradient() -> None:
    one, sizes = 512 * 768 * 4, stage_sizes(made(), VOCAB)
    assert [size.sent_bytes for size in sizes] == [one, one, one, 0]
    assert [size.line_bytes for size in sizes] == [one, 2 * one, 2 * one, one]
    alone = stage_sizes(made(stages=1), VOCAB)[0]
    assert (alone.sent_bytes, alone.line_bytes, alone.saturating_rate(1e13)) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("code", "bytes_of_1024"),
    [("none", 4096), ("auto", 4096), ("bf16", 2048), ("int8", 1024 + 64), ("dynamic8", 1024 + 16), ("nf4", 512 + 64)],
)
def test_codes_make_what_travels_smaller(code: str, bytes_of_1024: int) -> None:
    run = made(d_model=768)
    boundary = BoundarySection(code=code)  # type: ignore[arg-type]
    run = changed(run, pipeline={"boundary": boundary})
    assert boundary_bytes(run) == 512 * 768 * bytes_of_1024 // 1024


def test_gradients_travel_as_the_run_file_says() -> None:
    def averaged(code: str) -> int:
        averaging = AveragingSection(code=code, rank=4)  # type: ignore[arg-type]
        return stage_sizes(structs.replace(made(), averaging=averaging), VOCAB)[1].gradient_bytes

    parameters = stage_sizes(made(), VOCAB)[1].parameters
    assert averaged("none") == 4 * parameters
    assert averaged("fp16") == 2 * parameters
    assert averaged("powersgd") < 0.03 * averaged("none")
    assert factored_values((100, 10), 4) == 4 * 110
    assert factored_values((4, 4), 4) == 16
    assert factored_values((7,), 4) == 7


def test_microbatches_of_a_step_are_counted_up() -> None:
    run = structs.replace(made(), batch=BatchSection(target_samples=33), pipeline=PipelineSection(microbatch=8))
    assert microbatches(run) == 5


def test_a_model_of_ones_own_has_no_known_size() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind mine\.py:layers: only its own code knows"):
        stage_sizes(made(kind="mine.py:layers"), VOCAB)
