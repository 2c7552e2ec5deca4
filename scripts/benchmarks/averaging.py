"""One averaging round of 2, 4 and 8 peers beside torch.distributed's gloo, and DeDLOC's Table 1 on slow lines.

Every peer is a process. A round of ours is encrypted and authenticated and every member ends with the same bits; gloo
sends in the clear. On loopback the two take turns, in the same processes, and the median counts. Coded: int8 in blocks
of 64 with error feedback. Table 1 is made in a network lab (see `_table1`), which needs Linux, root and iproute2; where
there is none, the output says why.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks._group import Peer, ask, gloo_s, met, round_s
from benchmarks._report import Figure, Report
from benchmarks._table1 import table1

CODED = "int8"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
NAMES = {1_000_000: "1e6", 10_000_000: "1e7", 30_000_000: "3e7"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    peers: Sequence[int]
    counts: Sequence[int]  # float32 values of the vector
    rounds: int
    table1: Mapping[str, int]  # rounds by way; none: no table


QUICK = Sizes((2, 4, 8), (1_000_000, 10_000_000, 30_000_000), 3, {"allreduce": 1, "ps": 1, "ours": 1})
FULL = Sizes((2, 4, 8), (1_000_000, 10_000_000, 30_000_000), 15, {"allreduce": 5, "ps": 2, "ours": 9})


@contextmanager
def group(count: int) -> Iterator[list[Peer]]:
    """Peers on loopback that know and reach each other."""
    with tempfile.TemporaryDirectory(prefix="peerd-averaging-") as folder:
        store = f"{folder}/store"
        peers = [Peer(subprocess.Popen, LOOPBACK, str(rank), str(count), store) for rank in range(count)]
        try:
            met(peers)
            yield peers
        finally:
            for peer in peers:
                peer.end()


def compared(peers: list[Peer], count: int, rounds: int) -> dict[str, float]:
    """Median seconds by way; the first round of each warms up."""
    taken: dict[str, list[float]] = {"gloo": [], "none": [], CODED: []}
    ask(peers, do="make", count=count)
    for _ in range(rounds + 1):
        for way, seconds in taken.items():
            seconds.append(gloo_s(peers, count) if way == "gloo" else round_s(peers, way))
    return {way: statistics.median(seconds[1:]) for way, seconds in taken.items()}


def section(name: str, text: str, found: dict[str, float], targets: tuple[float | None, float | None]) -> list[Figure]:
    return [
        Figure(f"{name}_gloo_s", f"{text}: gloo", found["gloo"], "s", 3),
        Figure(f"{name}_ours_s", "ours", found["none"], "s", 3),
        Figure(f"{name}_coded_s", f"ours, {CODED}", found[CODED], "s", 3),
        Figure(f"{name}_over", "ours / gloo", found["none"] / found["gloo"], at_most=targets[0]),
        Figure(f"{name}_coded_over", "coded / gloo", found[CODED] / found["gloo"], at_most=targets[1]),
    ]


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    sections: list[list[Figure]] = []
    extra: dict[str, Any] = {}
    note = f"loopback, {os.cpu_count()} cores, medians of {sizes.rounds} alternating rounds"
    for peer_count in sizes.peers:
        with group(peer_count) as peers:
            for count in sizes.counts:
                found = compared(peers, count, sizes.rounds)
                name = f"p{peer_count}_n{NAMES.get(count, str(count))}"
                extra[name] = {"ours_s": found["none"], "gloo_s": found["gloo"], "coded_s": found[CODED]}
                targets = (3.5, 2.5) if (peer_count, count) == (4, 10_000_000) else (None, None)
                sections.append(section(name, f"{peer_count} peers, {count:,} values", found, targets))
    if sizes.table1:
        rows, keys, about = table1(sizes.table1)
        sections += rows
        extra |= keys
        note = f"{note}; {about}"
    return Report("averaging", sections, note, extra)
