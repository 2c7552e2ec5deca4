"""SWARM's Table 1: its closed form, and cells of it with real roles, as `bench.py pipeline` measures all of them."""

from __future__ import annotations

import pytest

from scripts.benchmarks import pipeline


@pytest.mark.parametrize("layers", pipeline.LAYERS)
def test_the_papers_column_follows_the_closed_form(layers: str) -> None:
    for rtt_ms, percent in zip(pipeline.RTT_MS, pipeline.PAPER[layers], strict=True):
        assert 100 * pipeline.blocking(layers, rtt_ms) == pytest.approx(percent, abs=0.7), rtt_ms


@pytest.mark.slow
@pytest.mark.thorough
def test_stages_stay_as_busy_at_200_ms_as_without_delay() -> None:
    near, far = (pipeline.measured(pipeline.Cell("gpt3", rtt_ms)) for rtt_ms in (0, 200))
    assert far.utilization >= pipeline.LEAST[200] * near.utilization
    assert far.wire_over_payload <= 1.05
