"""One averaging round of 2, 4 and 8 peers, compared with torch.distributed's gloo; and DeDLOC's Table 1 on slow lines.

Each peer is a process. peerd's rounds are encrypted and authenticated, and all members get the same bits; gloo sends
plaintext. On loopback both take turns in the same processes, and the median counts. Coded rounds use int8 in blocks of
64 with error feedback. `group_s` is the overhead of a round before any data: from the conductor's decision, through its
orders to all members and a round of one element per peer, until it knows that all take part. Table 1 is measured in a
network lab (see `_table1`), which needs Linux, root and iproute2; without one, the output has the reason.
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

from scripts.benchmarks._group import Peer, ask, gloo_s, group_s, met, round_s
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._table1 import table1

CODED = "int8"
FORMED = {4: 0.05, 8: 0.1}  # target of `group_s`, by number of peers
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
WARM_ROUNDS = 2
NAMES = {1_000_000: "1e6", 10_000_000: "1e7", 30_000_000: "3e7"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the measurement."""

    peers: Sequence[int]
    counts: Sequence[int]  # float32 values of the vector
    rounds: int
    table1: Mapping[str, int]  # rounds by way; empty: no table


QUICK = Sizes((2, 4, 8), (1_000_000, 10_000_000, 30_000_000), 3, {"allreduce": 1, "ps": 1, "ours": 3})
FULL = Sizes((2, 4, 8), (1_000_000, 10_000_000, 30_000_000), 15, {"allreduce": 5, "ps": 2, "ours": 9})


@contextmanager
def group(count: int) -> Iterator[list[Peer]]:
    """Context with connected peers on loopback."""
    with tempfile.TemporaryDirectory(prefix="peerd-averaging-") as folder:
        store = f"{folder}/store"
        peers = [Peer(subprocess.Popen, LOOPBACK, str(rank), str(count), store) for rank in range(count)]
        try:
            met(peers)
            yield peers
        finally:
            for peer in peers:
                peer.dismiss()
            for peer in peers:
                peer.end()


def compared(peers: list[Peer], count: int, rounds: int) -> dict[str, float]:
    """Median seconds by way, after two warm-up rounds: coded rounds still allocate memory in the second one."""
    ways = {
        "group": lambda: group_s(peers),
        "gloo": lambda: gloo_s(peers, count),
        "none": lambda: round_s(peers, "none"),
        CODED: lambda: round_s(peers, CODED),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    ask(peers, do="make", count=count)
    for _ in range(WARM_ROUNDS + rounds):
        for way, once in ways.items():
            taken[way].append(once())
    return {way: statistics.median(seconds[WARM_ROUNDS:]) for way, seconds in taken.items()}


def section(peers: int, count: int, found: dict[str, float]) -> list[Figure]:
    name, text = f"p{peers}_n{NAMES.get(count, str(count))}", f"{peers} peers, {count:,} values"
    targets = (3.5, 2.5) if (peers, count) == (4, 10_000_000) else (None, None)
    return [
        Figure(f"{name}_gloo_s", f"{text}: gloo", found["gloo"], "s", 3),
        Figure(f"{name}_ours_s", "ours", found["none"], "s", 3),
        Figure(f"{name}_coded_s", f"ours, {CODED}", found[CODED], "s", 3),
        Figure(f"{name}_over", "ours / gloo", found["none"] / found["gloo"], at_most=targets[0]),
        Figure(f"{name}_coded_over", "coded / gloo", found[CODED] / found["gloo"], at_most=targets[1]),
        Figure(f"{name}_group_s", "to form a group", found["group"], "s", 3, at_most=FORMED.get(peers)),
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
                keys = {"ours": "none", "gloo": "gloo", "coded": CODED, "group": "group"}
                extra[name] = {f"{key}_s": found[way] for key, way in keys.items()}
                sections.append(section(peer_count, count, found))
    if sizes.table1:
        rows, keys, about = table1(sizes.table1)
        sections += rows
        extra |= keys
        note = f"{note}; {about}"
    return Report("averaging", sections, note, extra)
