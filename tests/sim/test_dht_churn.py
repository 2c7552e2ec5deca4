"""Look-ups in a large swarm, a fifth of which is replaced meanwhile."""

from __future__ import annotations

import pytest

from tests.worlds.simulation.dht_churn import ChurnPlan, measure_churn


@pytest.mark.slow
def test_a_small_churn_run_repeats_exactly_and_finds_everything() -> None:
    plan = ChurnPlan(nodes=60, values=20, lookups=60, seconds=30.0)
    one, other = measure_churn(3, plan), measure_churn(3, plan)
    assert one == other
    assert one.success == 1.0


@pytest.mark.slow
@pytest.mark.thorough
def test_a_thousand_nodes_find_99_percent_while_a_fifth_of_them_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    report = measure_churn(1)
    with capsys.disabled():
        print(f"\n{report}")
    assert report.lookups >= 500
    assert report.success >= 0.99
    assert report.messages_per_lookup <= 8
    assert report.copies == 8
