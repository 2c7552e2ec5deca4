"""`peerd plan --model`: what a run asks of devices and lines, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peerd.cli.cli import invoke
from peerd.cli.plan.size_report import mbit, operations

ROOT = Path(__file__).resolve().parents[3]
BIG = """run: big
model: {d_model: 4096, heads: 32, layers: 12, context: 512}
pipeline: {stages: 4, microbatch: 1, boundary: {code: int8}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(BIG)
    return str(file)


def out_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert invoke(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_object_has_each_stages_figures(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(out_of(capsys, "--model", run_file, "--speed", "20", "--json"))
    assert told["boundary_bytes"] == 512 * 4096 * 17 // 16
    stages = told["stages"]
    assert [stage["layers"] for stage in stages] == [3, 3, 3, 3]
    assert all(round(stage["layer_parameters"] / 1e6) == 201 for stage in stages)
    second = stages[1]
    assert second["work_flops"] == second["flops"]
    work_s = second["work_flops"] / 20e12
    assert second["saturating_mbit"] == pytest.approx(2 * told["boundary_bytes"] * 8e-6 / work_s)


def test_the_screen_has_a_row_for_each_stage_at_80_columns(
    run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = out_of(capsys, "--model", run_file).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line[:5].strip().isdigit()] == ["0", "1", "2", "3"]
    assert any(line.startswith("  all") for line in lines)
    assert "about 12 x 4,096²" in " ".join(lines)


def test_the_memory_of_a_trunk_is_said_to_be_mostly_that_of_microbatches_under_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = " ".join(out_of(capsys, "--model", str(ROOT / "configs/moe.yaml")).split())
    assert "are for 64 microbatches in flight and 33 copies of earlier parameters, the most at once" in out


def test_a_model_of_ones_own_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(out_of(capsys, "--model", str(ROOT / "configs/own_model.yaml")).split())
    assert "65.5 kB a microbatch over each boundary" in out
    assert "parameters, work and memory: only the code of" in out


@pytest.mark.parametrize("speed", ["0", "-1", "nan", "inf"])
def test_a_speed_that_is_none_is_refused(speed: str, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["plan", "--model", run_file, f"--speed={speed}"]) == 2
    assert "allowed: a number above 0" in capsys.readouterr().err


def test_figures_keep_three_digits() -> None:
    assert [operations(flops) for flops in (2.5e6, 4.21e10, 1.234e12, 5e15)] == ["2.5 M", "42.1 G", "1.23 T", "5 P"]
    assert [mbit(rate * 125_000) for rate in (0.01234, 12.34, 1234.0)] == ["0.0123", "12.3", "1,234"]
