"""Part of the reach benchmark: two hosts of a lab on lines of 500 Mb/s with a long round trip.

Measures the rate of one stream after its first 3 s, as a share of the line's rate in Ethernet frames; the time of calls
of 100 bytes during that transfer; and the first call to an unconnected peer, in round trips.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks._remote_process import RemoteProcess, module
from scripts.lab import WideLab
from scripts.process_usage import others_s

RATE_MBIT = 500
FOUND_S = 3.0  # from when on the rate counts
LATE_S = 6.0
QUEUE_MS = 100.0  # queue at each end of a line, at least as long as a home router's
PORT = 4001


@dataclass(frozen=True, slots=True)
class Ocean:
    """Results for one round-trip time. Shares are of the line's rate."""

    rtt_ms: float
    share: float  # from 3 s on
    late_share: float  # from 6 s on
    worst_second: float  # lowest share in a whole second from 3 s on
    calls_ms: Sequence[float]  # during the transfer
    first_call_rtts: float  # median
    others_share: float  # of all cores during the transfer, used by other processes and the kernel's network
    congestion_control: str  # of the lab's TCP

    @property
    def call_ms(self) -> float:
        return statistics.median(self.calls_ms)

    @property
    def worst_call_ms(self) -> float:
        return max(self.calls_ms)


def crossed(rtt_ms: float, seconds: float = 12.0, first_calls: int = 5) -> Ocean:
    """Build a lab with lines of this round-trip time, and measure."""
    with WideLab(up_mbit=RATE_MBIT, down_mbit=RATE_MBIT, delay_ms=rtt_ms / 4, queue_ms=QUEUE_MS) as lab:
        near, far = (lab.host(name) for name in ("near", "far"))
        server = RemoteProcess(far.popen, module("_ocean_peer", f"/ip4/{far.ip}/tcp/{PORT}"))
        client = RemoteProcess(near.popen, module("_ocean_peer", f"/ip4/{near.ip}/tcp/{PORT}"))
        addr = server.answer()["addr"]
        client.answer()
        calls = [client.ask(do="call", addr=addr)["seconds"] for _ in range(first_calls)]
        own = [server.pid, client.pid, *lab.wan.pids()]
        before, began = others_s(own), time.monotonic()
        found = client.ask(do="bulk", addr=addr, seconds=seconds)
        rule = near.congestion_control
        others = (others_s(own) - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
    marks = [(at, total) for at, total in found["marks"] if at <= seconds]
    shares = [share(marks, at, at + 1.0) for at in whole_seconds(marks)]
    return Ocean(
        rtt_ms,
        share(marks, FOUND_S, marks[-1][0]),
        share(marks, LATE_S, marks[-1][0]),
        min(shares),
        [1000 * each for each in found["calls"]],
        1000 * statistics.median(calls) / rtt_ms,
        others,
        rule,
    )


def whole_seconds(marks: Sequence[tuple[float, int]]) -> list[float]:
    return [FOUND_S + second for second in range(int(marks[-1][0] - FOUND_S))]


def share(marks: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Share of the line's rate between two times, by the marks nearest to them."""
    (began, before), (ended, after) = (min(marks, key=lambda mark: abs(mark[0] - at)) for at in (begin_s, end_s))
    return (after - before) * 8e-6 / (ended - began) / RATE_MBIT
