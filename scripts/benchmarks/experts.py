"""Experts on other machines: throughput under delays (Learning@home, Figure 4), and rates of remote and local calls."""

from __future__ import annotations

from scripts.benchmarks._blocks_afar import DELAYS_MS, SAMPLES, measure_blocks
from scripts.benchmarks._expert_calls import CALLERS, local_rate, remote_rates
from scripts.benchmarks._report import Figure, Report

EFFICIENCY = {"1": 0.75, "8": 0.85, "32": 0.9}
WORDS = {"feedforward": "feed-forward", "transformer": "transformer"}


def measure(full: bool) -> Report:
    seconds = 20.0 if full else 6.0
    blocks = measure_blocks(full)
    before = local_rate(seconds)
    remote = remote_rates(seconds)
    local = (before + local_rate(seconds)) / 2  # the machine's speed changes
    efficiency = {str(count): remote[str(count)] / local for count in CALLERS}
    return Report(
        "experts on other machines",
        [*map(_delays, SAMPLES, [blocks] * len(SAMPLES)), _calls(efficiency)],
        note="figure 4 in virtual time: real hosts and calls, the devices' time is charged; the rest on loopback",
        extra={
            "throughput": blocks["asynchronous"],
            "model_parallel": blocks["model_parallel"],
            "efficiency": efficiency,
            "local_batches_per_s": local,
            "remote_batches_per_s": remote,
        },
    )


def _delays(kind: str, blocks: dict[str, dict[str, dict[str, float]]]) -> list[Figure]:
    """Figures of one kind of blocks: the share of throughput kept at each delay."""
    rates, parallel = blocks["asynchronous"][kind], blocks["model_parallel"][kind]
    figures = [Figure(f"{kind}_0ms", f"224 {WORDS[kind]} blocks, 64 callers, no delay", rates["0"], "samples/s")]
    for ms in DELAYS_MS[1:]:
        share = rates[str(ms)] / rates["0"]
        goal = 0.95 if ms == DELAYS_MS[-1] else None
        figures.append(Figure(f"{kind}_{ms}ms", f"  share kept at {ms} ms", share, digits=3, at_least=goal))
    for ms in DELAYS_MS:
        figures.append(
            Figure(f"{kind}_parallel_{ms}ms", f"  model parallel at {ms} ms", parallel[str(ms)], "samples/s")
        )
    return figures


def _calls(efficiency: dict[str, float]) -> list[Figure]:
    return [
        Figure(f"efficiency_{count}", f"remote over local, {count} callers", efficiency[count], at_least=goal)
        for count, goal in EFFICIENCY.items()
    ]
