"""On lines where averaging takes about as long as computing, a delayed run does not wait for it."""

from __future__ import annotations

import pytest

from scripts.benchmarks import delayed as bench

BUSY = 0.25  # of the processor, by others: then it is not the lines that are waited for

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_delayed_run_is_faster_than_a_synchronous_one_on_slow_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.RUN, "batch", {"target_samples": 256})
    alone = bench.measured(bench.halves(), None, 3)
    rate_mbit = bench.line_mbit(alone)
    delayed, synchronous = (bench.measured([bench.run_file(d)] * bench.REPLICAS, rate_mbit, 3) for d in (True, False))
    speedup = delayed.tokens_per_s / synchronous.tokens_per_s
    if speedup <= 1.15 and max(delayed.others_share, synchronous.others_share) > BUSY:
        pytest.skip(f"this machine is busy with other things, speeds mean nothing: {delayed} {synchronous}")
    assert speedup > 1.15, (delayed, synchronous)
