"""Part of the averaging benchmark: DeDLOC's Table 1 in a network lab, with a tenth of its bandwidths and vector.

Each peer is a process on its own host, whose line is limited up and down. The same work is divided in three ways: equal
shares (butterfly all-reduce), everything on the fastest peer (parameter server), and peerd's shares. The bound is that
of `peerd.averaging.shares`, which counts one byte of the line per byte of the vector; Ethernet, IP and TCP take
another 5 %.

The paper does not give the length of its vector. This length takes the paper's 5.3 s in setup B at 20 Mb/s, so the
seconds can be compared. The part size is a tenth of the default, too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peerd.averaging.shares import MemberLine, bound_s_per_byte, shares
from scripts.benchmarks._group import Peer, ask, met, round_s
from scripts.benchmarks._report import Figure
from scripts.lab import Lab, why_not
from scripts.process_usage import cpu_s, others_s

VALUES = 1_770_000  # float32
PART_BYTES = (1 << 20) // 10
WARM_VALUES = 100_000
LEAD_S = 0.5  # from an order to the common start time; longer, since many processes read the order
BYTES_PER_S = 125_000  # of 1 Mb/s
WAYS = {"allreduce": "all-reduce", "ps": "parameter server", "ours": "ours"}
# Warm-up rounds of some ways, with a vector shorter by this factor. Without one, TCP knows the lines from the last way.
WARMED = {"allreduce": 4, "ours": 1}
WITHIN = 1.15  # target of peerd's time over the bound

Rates = tuple[float, ...]  # of each peer's line, up and down, in Mb/s


@dataclass(frozen=True, slots=True)
class Setup:
    """A row of the table. `paper` has its seconds in the paper, in the order of WAYS."""

    text: str
    rates: Rates
    paper: tuple[float, float, float]


FAST, SLOW = (100.0,) * 8, (20.0,) * 16
SETUPS = {
    "A": Setup("8 x 100 Mb/s", FAST, (1.19, 4.73, 1.20)),
    "B": Setup("16 x 20 Mb/s", SLOW, (5.3, 39.6, 5.3)),
    "C": Setup("8 x 100 + 16 x 20 Mb/s", FAST + SLOW, (5.69, 14.1, 2.96)),
    "D": Setup("16 x 20 + 1 x 250 Mb/s", (*SLOW, 250.0), (5.3, 3.22, 3.18)),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one way in one setup."""

    seconds: float  # median
    bound_s: float
    cpu_share: float  # of all cores, by the peers
    others_share: float  # by everything else, including the kernel's network


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor time used so far by the peers, and by everything else on this machine."""

    own_s: float
    others_s: float

    @classmethod
    def now(cls, peers: Sequence[Peer]) -> Spent:
        own = [peer.pid for peer in peers]
        return cls(sum(map(cpu_s, own)), others_s(own))


Row = dict[str, Cell]  # by way


@contextmanager
def in_lab(rates: Rates) -> Iterator[tuple[list[Peer], list[str]]]:
    """Context with connected peers behind lines of these rates, and their ids."""
    with Lab() as lab:
        hosts = [lab.host(f"p{i}", rate, rate) for i, rate in enumerate(rates)]
        peers = [Peer(host.popen, f"/ip4/{host.ip}/tcp/4001") for host in hosts]
        yield peers, met(peers)


def divisions(lines: Sequence[MemberLine]) -> dict[str, dict[str, float]]:
    """The share of each peer, for each way."""
    fastest = max(lines, key=lambda line: line.up_bytes_per_s or 0.0).peer
    return {
        "allreduce": {line.peer: 1 / len(lines) for line in lines},
        "ps": {line.peer: float(line.peer == fastest) for line in lines},
        "ours": shares(lines).fractions,
    }


def row(rates: Rates, rounds: Mapping[str, int], values: int = VALUES) -> Row:
    """Measure all ways in one setup, with `rounds` of each after warm-up."""
    found: Row = {}
    with in_lab(rates) as (peers, ids):
        speeds = [rate * BYTES_PER_S for rate in rates]
        lines = [MemberLine(peer, up_bytes_per_s=b, down_bytes_per_s=b) for peer, b in zip(ids, speeds, strict=True)]
        ask(peers, do="make", count=WARM_VALUES)
        round_s(peers, "none", LEAD_S, part_bytes=PART_BYTES)
        for way, split in divisions(lines).items():
            order = {"shares": split, "part_bytes": PART_BYTES, "s_per_byte": bound_s_per_byte(lines, split)}
            if way in WARMED:
                ask(peers, do="make", count=values // WARMED[way])
                round_s(peers, "none", LEAD_S, **order)
            ask(peers, do="make", count=values)
            before, began = Spent.now(peers), time.monotonic()
            taken = [round_s(peers, "none", LEAD_S, **order) for _ in range(rounds[way])]
            after, all_s = Spent.now(peers), (time.monotonic() - began) * (os.cpu_count() or 1)
            found[way] = Cell(
                seconds=statistics.median(taken),
                bound_s=bound_s_per_byte(lines, split) * values * 4,
                cpu_share=(after.own_s - before.own_s) / all_s,
                others_share=(after.others_s - before.others_s) / all_s,
            )
    return found


def section(name: str, setup: Setup, found: Row) -> list[Figure]:
    """Figures of one row: each way, with the paper's result."""
    figures = [
        Figure(
            f"table1_{name}_{way}_s",
            f"{name}: {setup.text}, {WAYS[way]} (paper {paper:g}, bound {found[way].bound_s:.2f})",
            found[way].seconds,
            "s",
        )
        for way, paper in zip(WAYS, setup.paper, strict=True)
    ]
    over = found["ours"].seconds / found["ours"].bound_s
    return [*figures, Figure(f"table1_{name}_over", "ours / bound", over, at_most=WITHIN)]


def as_json(found: Row) -> dict[str, float]:
    cells = {f"{way}_s": cell.seconds for way, cell in found.items()}
    bounds = {f"{way}_bound_s": cell.bound_s for way, cell in found.items() if way != "ours"}
    ours = found["ours"]
    cpu = {"cpu_share": ours.cpu_share, "others_share": ours.others_share}
    every = {**cells, **bounds, "bound_s": ours.bound_s, **cpu}
    return {key: round(value, 4) for key, value in every.items()}


def table1(rounds: Mapping[str, int]) -> tuple[list[list[Figure]], dict[str, Any], str]:
    """Measure the table. Returns figures, keys for the JSON object (`table1` is null without a lab), and a note."""
    reason = why_not()
    if reason is not None:
        return [], {"table1": None, "table1_why": reason}, f"no Table 1: {reason}"
    with Lab() as lab:
        rule = lab.host("probe").congestion_control
    sections, keys, busiest = [], {}, 0.0
    for name, setup in SETUPS.items():
        found = row(setup.rates, rounds)
        sections.append(section(name, setup, found))
        keys[name] = as_json(found)
        busiest = max(busiest, found["ours"].others_share)
    about = f"Table 1: {VALUES:,} float32 values, rounds of ours: {rounds['ours']}"
    busy = f"others and the kernel took up to {busiest:.0%} of the processor in rounds of ours"
    return sections, {"table1": keys, "congestion_control": rule}, f"{about}, TCP's {rule}, {busy}"
