"""Break-even of a grid of small averaging groups: measured cost per peer, and times by the model of `topology`.

Measured is the processor time of one peer for one averaging attempt, flat and over a grid of two rounds. All peers are
in this process, each with its own host, over TCP on loopback. If the peers' lines are known, shares have smaller parts.
Modelled is the time of an attempt over equal lines by `averaging/topology`, which chooses the topology by it: a
time for the bytes, for each peer of a group and its parts, and for each round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import numpy as np
import trio

from peerd.averaging.allreduce import AllReduceService, Vector
from peerd.averaging.allreduce_round import AveragingPlan, MemberTerms, plan_of
from peerd.averaging.moshpit import grid_of
from peerd.averaging.topology import GroupTopology, OrderedGroup, round_s
from peerd.averaging.work_split import WorkSplitter
from peerd.core.addr import parse_addr
from peerd.messages.swarm import LineInfo, Mbs, Prepare
from peerd.wire.host.host import Host
from scripts.benchmarks._remote_process import new_stack
from scripts.benchmarks._report import Figure, Report
from tests.worlds.machines.workers import InlineWorker

TERMS = MemberTerms(part_bytes=4 << 20, patience_s=60.0)
MODELLED = (8, 16, 32, 64, 128, 192)
VECTOR_BYTES = 8 << 20
MEASURED = ((10_000, False), (200_000, True), (1_000_000, False))  # number of values, and True if lines are known
COUNTS = (8, 16)
LINES_MBIT_S = (100, 1000)
BYTES_PER_MBIT = 125_000


class Peers:
    """Connected peers that average."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._hosts: list[Host] = []
        self._averaging: dict[str, AllReduceService] = {}
        self._attempts = 0

    async def start(self, count: int) -> None:
        for number in range(count):
            stack = new_stack(number)
            await self._nursery.start(stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
            self._hosts.append(stack.host)
            self._averaging[stack.host.id.text] = AllReduceService(stack.rpc, stack.host.id)
        for number, host in enumerate(self._hosts):
            for other in self._hosts[:number]:
                await host.connect(other.id, other.addrs())

    async def attempt_s(self, elements: int, known: bool, size: int) -> float:
        """Run one attempt in groups of up to `size` peers. Returns the processor seconds per peer."""
        names, lines = tuple(sorted(self._averaging)), WorkSplitter()
        for name in names if known else ():
            lines.tell(name, 0, LineInfo("node", 1e7, 1e7, elements, "float32"))
        grouping = GroupTopology(lines, size)
        how = grouping.order(0, names)
        have = {name: np.ones(elements, dtype="float32") for name in names}
        clusters = [list(one.meeting.peers) for one in how.groups]
        began = time.process_time()
        await self._round(how.groups, have)
        for side in how.sides:
            runs = [clusters[at : at + side] for at in range(0, len(clusters), side)]
            await self._round([one for run in runs for one in grouping.meet(0, run)], have)
            clusters = [[peer for cluster in run for peer in cluster] for run in runs]
        return (time.process_time() - began) / len(names)

    async def _round(self, groups: Iterable[OrderedGroup], have: dict[str, Vector]) -> None:
        """Run a round of all groups: replaces each member's vector in `have` by its group's sum."""
        async with trio.open_nursery() as nursery:
            for one in groups:
                self._attempts += 1
                order = self._order(one, self._attempts.to_bytes(16, "big"))
                for name in one.meeting.peers:
                    nursery.start_soon(self._sum, name, plan_of(order, name, TERMS), have)

    async def _sum(self, name: str, plan: AveragingPlan, have: dict[str, Vector]) -> None:
        have[name] = await self._averaging[name].sum(plan, have[name], InlineWorker())  # processor time is measured

    def _order(self, one: OrderedGroup, attempt: bytes) -> Prepare:
        meeting, split = one.meeting, one.split
        listeners = list(meeting.listeners)
        order = Prepare(bytes(16), 1, 0, attempt, b"", list(meeting.peers), Mbs(), 1, 60.0, listeners=listeners)
        if split is None:
            return order
        return msgspec.structs.replace(order, split=list(split.parties), part_bytes=split.part_bytes)


async def _measured(count: int, elements: int, known: bool, repeats: int) -> tuple[float, float]:
    """Processor milliseconds of one peer, flat and over a grid of two rounds, as the minimum of `repeats` attempts."""
    async with trio.open_nursery() as nursery:
        peers = Peers(nursery)
        await peers.start(count)
        size = max(grid_of(count, 2))
        await peers.attempt_s(elements, known, count)
        flat = min([await peers.attempt_s(elements, known, count) for _ in range(repeats)])
        grid = min([await peers.attempt_s(elements, known, size) for _ in range(repeats)])
        nursery.cancel_scope.cancel()
    return 1e3 * flat, 1e3 * grid


def _round_s(peers: int, mbit_s: int) -> float:
    return round_s(peers, 2 * (peers - 1) / peers / (mbit_s * BYTES_PER_MBIT), VECTOR_BYTES)


def _modelled(count: int) -> list[Figure]:
    sides = grid_of(count, 2)
    shape, mates = " x ".join(map(str, sides)), sum(side - 1 for side in sides)
    found = [
        Figure(f"links_{count}_flat", f"{count} peers, links of each: flat", count - 1, digits=0),
        Figure(f"links_{count}_grid", f"{count} peers, links of each: {shape}", mates, digits=0),
        Figure(f"moved_{count}_flat", f"{count} peers, vectors that each sends: flat", 2 * (count - 1) / count),
        Figure(f"moved_{count}_grid", f"{count} peers, likewise: {shape}", sum(2 * (m - 1) / m for m in sides)),
    ]
    for mbit_s in LINES_MBIT_S:
        flat_s, grid_s = _round_s(count, mbit_s), sum(_round_s(side, mbit_s) for side in sides)
        text = f"{count} peers, {VECTOR_BYTES >> 20} MiB at {mbit_s} Mb/s"
        found += [
            Figure(f"model_{count}_at_{mbit_s}_flat_s", f"{text}: flat", flat_s, "s"),
            Figure(f"model_{count}_at_{mbit_s}_grid_s", f"{text}: {shape}", grid_s, "s"),
        ]
    return found


def measure(full: bool) -> Report:
    """Run the benchmark, which takes about ten seconds; with `full`, twice as long."""
    sections = []
    for elements, known in MEASURED:
        section = []
        for count in COUNTS:
            flat_ms, grid_ms = trio.run(_measured, count, elements, known, 8 if full else 3)
            shape = " x ".join(map(str, grid_of(count, 2)))
            text = f"{count} peers, {elements:,} values{', known lines' if known else ''}"
            section += [
                Figure(f"cpu_{count}_{elements}_flat_ms", f"{text}: flat", flat_ms, "ms"),
                Figure(f"cpu_{count}_{elements}_grid_ms", f"{text}: {shape}", grid_ms, "ms"),
                Figure(f"mate_{count}_{elements}_ms", f"{text}: for each mate, flat", flat_ms / (count - 1), "ms"),
            ]
        sections.append(section)
    sections += [_modelled(count) for count in MODELLED]
    note = "first measured: processor time of one peer for one attempt; then the model"
    return Report("averaging flat and over a grid", sections, note)
