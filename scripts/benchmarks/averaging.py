"""One averaging round of 2, 4 and 8 peers on loopback beside torch.distributed's gloo, in the same processes.

Every peer is a process. A round of ours is encrypted and authenticated and every member ends with the same bits; gloo
sends in the clear. The two take turns; a round lasts from its common beginning until the last member has the sum, and
the median counts. Coded: int8 in blocks of 64 with error feedback.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Figure, Report

LEAD_S = 0.05  # from an order to its common beginning
CODED = "int8"
NAMES = {1_000_000: "1e6", 10_000_000: "1e7", 30_000_000: "3e7"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    peers: Sequence[int]
    counts: Sequence[int]  # float32 values of the vector
    rounds: int


QUICK = Sizes((2, 4, 8), (1_000_000, 10_000_000, 30_000_000), 5)
FULL = Sizes((2, 4, 8), (1_000_000, 10_000_000, 30_000_000), 15)


class Peer:
    """A peer's process."""

    def __init__(self, rank: int, count: int, store: str) -> None:
        scripts = Path(__file__).parents[1]
        path = os.pathsep.join([str(scripts), str(scripts.parent)])
        command = [sys.executable, "-m", "benchmarks._averager", str(rank), str(count), store]
        environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer of the benchmark ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def group(count: int) -> Iterator[list[Peer]]:
    """Peers that know and reach each other."""
    with tempfile.TemporaryDirectory(prefix="peerd-averaging-") as folder:
        peers = [Peer(rank, count, f"{folder}/store") for rank in range(count)]
        try:
            places = {found["peer"]: found["addr"] for found in (peer.hear() for peer in peers)}
            ask(peers, do="meet", peers=places)
            yield peers
        finally:
            for peer in peers:
                peer.end()


def ask(members: list[Peer], **order: Any) -> list[dict[str, Any]]:
    for peer in members:
        peer.tell(**order)
    return [peer.hear() for peer in members]


def round_s(peers: list[Peer], count: int, way: str) -> float:
    """Seconds of one round by `way`: "gloo", "none" or a code."""
    if way == "gloo":
        found = ask(peers, do="gloo", count=count)
        begin = max(answer["begin"] for answer in found)
    else:
        begin = time.monotonic() + LEAD_S
        found = ask(peers, do="sum", count=count, code=way, attempt=secrets.token_hex(16), at=begin)
    if not all(answer["right"] for answer in found):
        raise RuntimeError(f"a wrong sum by {way}")
    return max(answer["end"] for answer in found) - begin


def compared(peers: list[Peer], count: int, rounds: int) -> dict[str, float]:
    """Median seconds by way; the first round of each warms up."""
    taken: dict[str, list[float]] = {"gloo": [], "none": [], CODED: []}
    ask(peers, do="make", count=count)
    for _ in range(rounds + 1):
        for way, seconds in taken.items():
            seconds.append(round_s(peers, count, way))
    return {way: statistics.median(seconds[1:]) for way, seconds in taken.items()}


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    sections, extra = [], {}
    for peer_count in sizes.peers:
        with group(peer_count) as peers:
            for count in sizes.counts:
                found = compared(peers, count, sizes.rounds)
                name = f"p{peer_count}_n{NAMES.get(count, str(count))}"
                extra[name] = {"ours_s": found["none"], "gloo_s": found["gloo"], "coded_s": found[CODED]}
                target = (3.5, 2.5) if (peer_count, count) == (4, 10_000_000) else (None, None)
                text = f"{peer_count} peers, {count:,} values"
                sections.append(
                    [
                        Figure(f"{name}_gloo_s", f"{text}: gloo", found["gloo"], "s", 3),
                        Figure(f"{name}_ours_s", "ours", found["none"], "s", 3),
                        Figure(f"{name}_coded_s", f"ours, {CODED}", found[CODED], "s", 3),
                        Figure(f"{name}_over", "ours / gloo", found["none"] / found["gloo"], at_most=target[0]),
                        Figure(f"{name}_coded_over", "coded / gloo", found[CODED] / found["gloo"], at_most=target[1]),
                    ]
                )
    note = f"loopback, {os.cpu_count()} cores, medians of {sizes.rounds} alternating rounds"
    return Report("averaging", sections, note, extra)
