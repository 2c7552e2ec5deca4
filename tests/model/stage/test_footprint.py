"""A user's limit of memory counts what the process holds already, and leaves the rest to what may be kept or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from peerd.core.errors import ConfigError
from peerd.model.shapes import averaged_vector
from peerd.model.stage import footprint as footprint_file
from peerd.model.stage.footprint import (
    footprint,
    lacking,
    lacking_for_call,
    refuse_if_not_averaged,
    refuse_if_too_large,
    room_for_activations,
    spare_bytes,
    state_outline,
)
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import (
    AveragingSection,
    ExpertsSection,
    LimitsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)

MB = 1_000_000


def limited(gb: float) -> RunFile:
    return RunFile(run="tiny", limits=LimitsSection(memory_gb=gb))


def held() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_stage_is_refused_where_it_and_the_process_together_need_more_than_allowed() -> None:
    taken = footprint(limited(0), 0)
    assert 0 < taken.machine_bytes < 100 * MB
    assert lacking(taken, "cpu") is None
    assert lacking(taken, "cpu", held() + 200 * MB) is None
    said = lacking(taken, "cpu", held() - 50 * MB)
    assert said is not None
    assert said.startswith("stage 0 (")
    assert "of memory beside the" in said
    assert "that this process holds, and limits.memory_gb allows" in said
    with pytest.raises(ConfigError, match=r"allows 0\.0 GB; give this peer a smaller stage"):
        refuse_if_too_large(limited(0.01), 0, "cpu")


@pytest.mark.parametrize(("d_model", "code", "vectors"), [(64, "int8", 3), (1024, "int8", 1), (1024, "powersgd", 3)])
def test_a_code_takes_a_gradient_and_its_residuals_which_lie_in_files_if_they_are_large(
    d_model: int, code: Any, vectors: int
) -> None:
    without, taken = (
        footprint(RunFile(run="tiny", model=ModelSection(d_model=d_model), averaging=AveragingSection(code=each)), 0)
        for each in ("none", code)
    )
    assert taken.machine_bytes - without.machine_bytes == 4 * vectors * taken.parameters


def test_what_may_be_kept_or_not_gets_what_the_limit_leaves() -> None:
    assert spare_bytes(limited(0), 7) == 7
    assert spare_bytes(limited(held() / 1e9 + 10), 7) == 7
    assert spare_bytes(limited(held() / 1e9 / 2), 7) == 0
    left = spare_bytes(limited((held() + 250 * MB) / 1e9), 100 * MB)
    assert 0 < left < 100 * MB


def test_what_is_kept_already_is_a_part_of_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_file, "_held_bytes", lambda: 500 * MB)
    run = limited(0.75)  # 250 MB are left
    assert spare_bytes(run, 100 * MB) == 50 * MB
    assert spare_bytes(run, 100 * MB, 30 * MB) == 80 * MB
    assert spare_bytes(run, 100 * MB, 90 * MB) == 100 * MB
    assert room_for_activations(run) == 125 * MB
    assert room_for_activations(run, 50 * MB) == 150 * MB
    own = RunFile(run="tiny", limits=LimitsSection(memory_gb=0.75, activations_mb=64))
    assert room_for_activations(own, 50 * MB) == 64 << 20


def test_a_call_fits_or_not_beside_what_the_process_holds_now() -> None:
    assert lacking_for_call(limited(0), 100 * MB) is None
    assert lacking_for_call(limited(held() / 1e9 + 1), 100 * MB) is None
    said = lacking_for_call(limited(held() / 1e9), 100_000 * MB)
    assert said is not None
    said = lacking_for_call(limited(held() / 1e9), 200 * MB)
    assert said is not None
    assert said.startswith("it takes 0.2 GB beside the ")
    assert lacking_for_call(limited(0.001), 0) is None  # before anything was measured
    assert "of the machine's memory are free" in (lacking_for_call(limited(0), 1 << 60) or "")


def wide(stages: int, **averaging: object) -> RunFile:
    """A run with 2.6e9 parameters in its layers."""
    return RunFile(
        run="wide",
        model=ModelSection(d_model=8192, heads=64, layers=4),
        pipeline=PipelineSection(stages=stages),
        averaging=AveragingSection(**averaging),  # type: ignore[arg-type]
    )


def test_a_stage_whose_gradient_rounds_cannot_carry_is_refused_before_it_is_built() -> None:
    told = r"^a stage's gradient has \d+ values; allowed: up to 2147483648: cut the model into more stages"
    with pytest.raises(ConfigError, match=told):
        refuse_if_too_large(wide(1), 0, "cpu")
    refuse_if_not_averaged(wide(2), 0)
    refuse_if_not_averaged(wide(1, code="powersgd", rank=4), 0)


@pytest.fixture
def normed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """A run whose layers are the user's own and have buffers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "normed.py").write_text(
        "from torch import nn\ndef layers(run):\n    return [nn.Embedding(256, 4), nn.BatchNorm1d(64)]\n"
    )
    return RunFile(run="normed", model=ModelSection(kind="normed.py:layers", d_model=4, heads=1, context=64))


def test_buffers_travel_with_the_gradient_and_count(normed: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    values = 256 * 4 + 2 * 64 + 1 + 2 * 64 + 1  # parameters; number of samples, mean, variance and number of batches
    monkeypatch.setattr(averaged_vector, "FRAME_ELEMENTS", values)
    refuse_if_not_averaged(normed, 0)
    monkeypatch.setattr(averaged_vector, "FRAME_ELEMENTS", values - 1)
    with pytest.raises(ConfigError, match=f"has {values} values"):
        refuse_if_not_averaged(normed, 0)


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": OptimizerSection()},
        {
            "optimizer": OptimizerSection(name="sgd", momentum=0.0),
            "averaging": AveragingSection(code="powersgd", rank=3),
        },
        {"optimizer": OptimizerSection(name="lars", momentum=0.9, delayed=True)},
        {"model": ModelSection(d_model=16, heads=2, layers=3, dtype="float64", share_layers=True)},
        {"experts": ExpertsSection(layers=1, grid=[2, 2]), "pipeline": PipelineSection(stages=1)},
    ],
    ids=["adamw", "powersgd", "lars", "shared layers", "experts"],
)
def test_the_outline_of_a_state_is_known_without_building_the_stage(sections: dict[str, Any]) -> None:
    small = {"model": ModelSection(d_model=16, heads=2, layers=3), "pipeline": PipelineSection(stages=2)}
    run = RunFile(**{"run": "outlined"} | small | sections)
    for stage in range(run.pipeline.stages):
        assert state_outline(run, stage) == ServedStage(run, stage, "cpu").outline()


def test_the_outline_of_a_state_has_the_buffers_of_ones_own_layers(normed: RunFile) -> None:
    assert state_outline(normed, 0) == ServedStage(normed, 0, "cpu").outline()
    assert "buffer/layer1.running_mean" in [spec.name for spec in state_outline(normed, 0)]


def test_the_outline_of_a_state_of_terabytes_takes_no_memory() -> None:
    run = RunFile(run="vast", model=ModelSection(d_model=1 << 15, heads=64, layers=100))
    assert sum(spec.nbytes for spec in state_outline(run, 0)) > 10e12
