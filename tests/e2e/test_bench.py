"""Each benchmark measures what it says, prints a table for people and one JSON line for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peerd.codec.format.blockwise import CODES
from scripts import bench
from scripts.benchmarks import (
    _quantize_cuda,
    digits,
    gradients,
    grids,
    language,
    quantize,
    transport,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"
Run = Callable[[str], dict[str, Any]]
TRANSPORT = {"stream_mb_s", "raw_tcp_mb_s", "noise_frames_mb_s", "cpu_s_per_gb", "call_ms_median", "calls_per_s_64"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark: its figures, and under "printed" the table that people read."""

    def run(name: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["bench.py", name, "--json"])
        assert bench.main() == 0
        printed = capsys.readouterr()
        return {**json.loads(printed.out.splitlines()[-1]), "printed": printed.err}

    return run


@pytest.mark.slow
def test_the_list_of_benchmarks_loads_each_of_them_in_any_folder(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [sys.executable, str(SCRIPTS / "bench.py")]
    told = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert {line.split()[0] for line in told.stdout.splitlines()} >= {"digits", "language", "realsize", "transport"}


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.alone
def test_the_transport_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    few = transport.Sizes(rounds=1, bulk_bytes=4 << 20, calls=5, flood_s=0.05)
    monkeypatch.setattr(transport, "QUICK", few)
    found = run("transport")
    assert found.keys() >= TRANSPORT
    assert all(found[key] > 0 for key in TRANSPORT)
    assert found["stream_over_raw"] == pytest.approx(found["stream_mb_s"] / found["raw_tcp_mb_s"], rel=1e-3)
    assert "plain trio TCP" in found["printed"]


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.alone
def test_the_grids_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(grids, "COUNTS", (5,))
    monkeypatch.setattr(grids, "MEASURED", ((1000, False), (1000, True)))
    found = run("grids")
    assert found["cpu_5_1000_flat_ms"] > 0
    assert (found["links_64_flat"], found["links_64_grid"]) == (63, 14)
    assert found["model_128_at_1000_grid_s"] < found["model_128_at_1000_flat_s"]


@pytest.mark.slow
def test_the_digits_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(digits, "SIZES", (4,))
    monkeypatch.setattr(digits, "MICROBATCHES", 60)
    found = run("digits")
    curves = found["curves"]
    assert list(curves) == ["4 16 under way, 0.1 s", "4 64 under way, 1 s"]
    for at, accuracy in curves.values():
        assert len(at) == len(accuracy) == 21
        assert at[-1] >= 60
    assert max(curves["4 16 under way, 0.1 s"][1]) > 40  # a guess has 10
    assert found["dmoe4_64_expert_stale"] > found["dmoe4_16_expert_stale"]
    assert "points lost by the high delay" in found["printed"]


@pytest.mark.slow
def test_the_language_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(language, "GRIDS", {4: [4]})
    monkeypatch.setattr(language, "MICROBATCHES", 40)
    found = run("language")
    curves = found["curves"]
    assert list(curves) == ["4 64 under way, 1 s", "4 16 under way, 0.1 s"]
    at, losses = curves["4 16 under way, 0.1 s"]
    assert at[-1] >= 40
    assert losses[-1] < losses[0] - 0.3
    assert found["dmoe4_64_expert_stale"] > found["dmoe4_16_expert_stale"]


def absent(_count: int, _rounds: int) -> dict[str, Any]:
    raise ImportError("nobody wrote it")


@pytest.mark.slow
def test_the_quantize_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    cpu = {"rounds": 2, "large": 1 << 15, "small": 1 << 12, "small_repeats": 1, "slow_rounds": 1, "call_batches": 2}
    few = quantize.Sizes(**cpu, coded=1 << 15, gpu=1 << 20, gpu_rounds=1, gpu_repeats=1)
    monkeypatch.setattr(quantize, "QUICK", few)
    monkeypatch.setattr(quantize, "OTHERS", {"nobody": absent})
    found = run("quantize")
    assert found["memcpy_gb_s"] > 0
    assert list(found["cpu"]) == list(found["cpu_small"]) == list(CODES)
    for rates in found["cpu"].values():
        for way in ("quantize", "dequantize"):
            assert rates[f"{way}_over_memcpy"] == pytest.approx(rates[f"{way}_gb_s"] / found["memcpy_gb_s"], rel=1e-3)
    assert (found["cuda"] is None) == (not torch.cuda.is_available())
    assert found["nobody"] is None
    assert "pip install" in found["nobody_missing"]
    assert "dynamic8/256 quantize / copy" in found["printed"]


def test_the_quantize_benchmark_holds_a_gpu_to_the_bytes_that_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic, on a CPU and with made-up times: a device that moves 1 GB/s whatever it does."""

    def times(ways: dict[str, Any], _rounds: int, _repeats: int) -> dict[str, float]:
        for way in ways.values():
            way()
        return {name: (2 if name == "copy" else 1.25 if "dynamic8" in name else 2.5) * 4096e-9 for name in ways}

    monkeypatch.setattr(_quantize_cuda, "median_seconds", times)
    found = _quantize_cuda.rates(torch.ones(1024), 1, 1)
    assert found["copy_gb_s"] == pytest.approx(1.0)
    assert found["dynamic8"]["quantize_gb_s"] == pytest.approx(0.8)
    assert found["dynamic8"]["dequantize_over_bound"] == pytest.approx((1 + 1 / 4 + 1 / 256) / 1.25)
    assert found["int4"]["quantize_over_bound"] == pytest.approx((1 + 1 / 8 + 1 / 64) / 2.5)
    beside = _quantize_cuda.beside_computing(("int8",), 1, "cpu", 64)
    calls = _quantize_cuda.call_us(torch.device("cpu"), 1)
    section = quantize.gpu_section({**found, "bf16": found, "call_us": calls, "beside_computing": beside})
    met = {figure.key: figure.met for figure in section if figure.met is not None}
    assert section[0].key == "cuda_call_us_quantize"
    assert section[2].key == "cuda_beside_int8"
    assert section[2].value > 0
    assert met["cuda_dynamic8_quantize_over_bound"]
    assert not met["cuda_bf16_int4_dequantize_over_bound"]
    assert quantize.gpu_section(None) == []


@pytest.mark.slow
def test_the_gradients_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(gradients, "QUICK", gradients.Sizes(rounds=1, steps=3, samples=8, valid_samples=8))
    found = run("gradients")
    names = ["none", "int8", "int4", "powersgd_1", "powersgd_4", "powersgd_16"]
    assert found.keys() >= {f"{name}_{what}" for name in names for what in ("bytes", "ms", "loss")}
    assert found["int8_bytes"] == pytest.approx(found["none_bytes"] * 1.0625 / 4, rel=1e-3)
    vectors = [found[f"powersgd_{rank}_bytes"] for rank in (1, 4, 16)]
    assert vectors[1] - vectors[0] == 3 * (vectors[2] - vectors[1]) / 12  # each column costs the same
    assert all(1.0 < found[f"{name}_loss"] < 6.0 for name in names)
