"""The benchmark measures what it says, prints a table for people and one JSON line for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
KEYS = {"stream_mb_s", "raw_tcp_mb_s", "noise_frames_mb_s", "cpu_s_per_gb", "call_ms_median", "calls_per_s_64"}


@pytest.mark.slow
@pytest.mark.socket
def test_the_transport_benchmark_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench
    from benchmarks import transport

    few = transport.Sizes(rounds=1, bulk_bytes=4 << 20, calls=5, flood_s=0.05)
    monkeypatch.setattr(transport, "QUICK", few)
    monkeypatch.setattr("sys.argv", ["bench.py", "transport", "--json"])
    assert bench.main() == 0
    printed = capsys.readouterr()
    found: dict[str, Any] = json.loads(printed.out.splitlines()[-1])
    assert found.keys() >= KEYS
    assert all(found[key] > 0 for key in KEYS)
    assert found["stream_over_raw"] == pytest.approx(found["stream_mb_s"] / found["raw_tcp_mb_s"], rel=1e-3)
    assert "plain trio TCP" in printed.err


def test_the_benchmarks_are_listed_with_what_they_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench

    monkeypatch.setattr("sys.argv", ["bench.py"])
    assert bench.main() == 0
    assert "transport " in capsys.readouterr().out
