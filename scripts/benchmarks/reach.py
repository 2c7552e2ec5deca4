"""Reachability through kinds of NAT; and a stream's rate, calls and first calls over long round trips.

Runs in a network lab (root, Linux). Two light peers of each kind of NAT: each pair of kinds meets once, with routers
that drop an unexpected SYN, and with routers that reject it. Before that, two hosts on lines of 500 Mb/s with round
trips of 100 and 300 ms; the line's rate counts Ethernet frames, of which TCP's headers take 4.4 %. All of it shares one
machine's cores: two peerd processes, the kernel's network for both, and the lab's WAN.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks._matrix import KINDS, Matrix, best, matrix, of_all_kinds
from scripts.benchmarks._ocean import Ocean, crossed
from scripts.benchmarks._report import Figure, Report
from scripts.lab import Unexpected, why_not_wide

WHY_NOT = why_not_wide
NOTE = (
    "Way of a pair: direct, punched, relayed or failed, the worse of what both sides see. Round trips between hosts of "
    "the matrix take 40 ms. Share of the rate: one stream, from 3 s after its beginning."
)
ROUTERS: dict[str, Unexpected] = {"matrix": "drop", "matrix_reset": "reset"}
PUNCHED_S = 3.0


def measure(full: bool) -> Report:
    oceans = [crossed(rtt_ms, seconds=20.0 if full else 12.0) for rtt_ms in (100, 300)]
    settled: dict[str, dict[str, float]] = {}
    found: dict[str, Matrix] = {}
    for key, unexpected in ROUTERS.items():
        with of_all_kinds(unexpected) as swarm:
            settled[key] = swarm.settled()
            found[key] = matrix(swarm)
    sections = [ocean_figures(oceans), *(matrix_figures(key, each) for key, each in found.items())]
    return Report("Reach", sections, NOTE, extra(oceans, found, settled))


def ocean_figures(oceans: Sequence[Ocean]) -> list[Figure]:
    near, far = oceans
    most_ms = 1.5 * near.rtt_ms + 20
    return [
        Figure("rate_share_100ms", "one stream, round trip 100 ms: share of 500 Mb/s", near.share, at_least=0.9),
        Figure("rate_share_300ms", "one stream, round trip 300 ms: share of 500 Mb/s", far.share, at_least=0.8),
        Figure("call_under_bulk_ms", "a call of 100 B meanwhile, median", near.call_ms, "ms", 0, at_most=most_ms),
        Figure("worst_call_under_bulk_ms", "the slowest of them", near.worst_call_ms, "ms", 0, at_most=most_ms),
        Figure("first_call_rtts", "first call to a new peer", near.first_call_rtts, "round trips", at_most=4.0),
    ]


def matrix_figures(key: str, found: Matrix) -> list[Figure]:
    """Figures of a matrix: the share of pairs on the best possible path, and the time until hole punching succeeded."""
    good = [each.way == best(*pair.split("/")) for pair, each in found.items()]
    times = [each.best_s for each in found.values() if each.way == "punched" and each.best_s is not None]
    figures = [Figure(f"{key}_best_share", f"{key}: pairs on the best way", sum(good) / len(good), at_least=1.0)]
    if times:
        figures += [
            Figure(f"{key}_punched_s", f"{key}: until a punched way is there, median", statistics.median(times), "s"),
            Figure(f"{key}_slowest_punched_s", f"{key}: the slowest", max(times), "s", at_most=PUNCHED_S),
        ]
    return figures


def extra(oceans: Sequence[Ocean], found: Mapping[str, Matrix], settled: Mapping[str, Any]) -> dict[str, Any]:
    """More keys for the JSON object."""
    first: dict[str, float] = {f"first_call_rtts_{each.rtt_ms:g}ms": round(each.first_call_rtts, 3) for each in oceans}
    late = {f"rate_share_{each.rtt_ms:g}ms_from_6s": round(each.late_share, 3) for each in oceans}
    worst = {f"worst_second_share_{each.rtt_ms:g}ms": round(each.worst_second, 3) for each in oceans}
    matrices: dict[str, Any] = {}
    for key, each in found.items():
        matrices[key] = {pair: met.way for pair, met in each.items()}
        matrices[f"{key}_seconds"] = {
            pair: None if met.best_s is None else round(met.best_s, 3) for pair, met in each.items()
        }
        matrices[f"{key}_settled_s"] = {name: round(at, 1) for name, at in settled[key].items()}
    ways = {f"{a}/{b}": best(a, b) for a in KINDS for b in KINDS}
    return {**matrices, "best": ways, **first, **late, **worst, "congestion_control": oceans[0].congestion_control}
