"""Rounds over lines of unequal rates, in virtual time: as fast as the model says, with DeDLOC's four set-ups.

Real hosts, calls and averaging over a simulated network, at a tenth of the paper's bandwidths and of its vector.
Receiving, summing and returning must overlap, or a round would take twice as long as the model allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import trio

from peerd.averaging.allreduce import AllReduceService, Vector
from peerd.averaging.allreduce_round import AveragingPlan
from peerd.averaging.shares import bound_s_per_byte
from peerd.averaging.work_split import Split, WorkSplitter
from peerd.messages.swarm import LineInfo
from tests.kit.amount import thorough
from tests.kit.virtual_time import virtual
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.simulation.programs import stack_on
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import Node, World, WorldConfig

ELEMENTS = 2_560_000  # float32: a tenth of ResNet-50
SETUPS = {
    "A: 8 x 100 Mb/s": (100.0,) * 8,
    "B: 16 x 20 Mb/s": (20.0,) * 16,
    "C: A + B": (100.0,) * 8 + (20.0,) * 16,
    "D: B + 1 x 250 Mb/s": (20.0,) * 16 + (250.0,),
}


async def program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    await stack_on(node).run([node.addr], task_status=task_status)


def split_of(names: Sequence[str], rates: Sequence[float], helpers: int = 0) -> Split:
    """As a conductor divides the work; the last `helpers` only sum."""
    lines = WorkSplitter()
    for i, (name, mbit_s) in enumerate(zip(names, rates, strict=True)):
        mode = "aux" if i >= len(names) - helpers else "node"
        lines.tell(name, 0, LineInfo(mode, mbit_s * 1e6 / 8, mbit_s * 1e6 / 8, ELEMENTS, "float32"))  # type: ignore[arg-type]
    split = lines.split(0, tuple(names[: len(names) - helpers]))
    assert split is not None
    return split


async def one_round(rates: Sequence[float], helpers: int) -> tuple[float, float]:
    """Seconds that the slowest peer took, and that the model allows."""
    config = WorldConfig(line=lambda _: SimLine(latency_s=0.005))
    async with World(1, program, config).running() as world:
        nodes = []
        for mbit_s in rates:
            nodes.append(await world.start(line=SimLine(latency_s=0.005, up_mbit_s=mbit_s, down_mbit_s=mbit_s)))
        names = [node.id.text for node in nodes]
        averaging = [AllReduceService(node.rpc, node.id) for node in nodes]
        split = split_of(names, rates, helpers)
        vectors = [np.full(ELEMENTS, i + 1, dtype="float32") for i in range(len(nodes) - helpers)]
        for i, node in enumerate(nodes):
            for other in nodes:
                node.host.learn(other.id, [other.addr])
            async with trio.open_nursery() as nursery:
                for other in nodes[:i]:
                    nursery.start_soon(node.host.connect, other.id)
        plan = AveragingPlan(
            attempt=b"round".ljust(16),
            group=tuple(party.peer for party in split.parties),
            part_bytes=split.part_bytes,
            patience_s=10.0,
            senders=tuple(names[: len(names) - helpers]),
            shares=tuple(party.share for party in split.parties),
            length=ELEMENTS,
            dtype="float32",
        )
        began = trio.current_time()
        results: dict[int, Vector] = {}

        async def take_part(i: int) -> None:
            if names[i] in plan.group:
                vector = vectors[i] if i < len(vectors) else None
                results[i] = await averaging[i].sum(plan, vector, InlineWorker())

        async with trio.open_nursery() as nursery:
            for i in range(len(nodes)):
                nursery.start_soon(take_part, i)
        took_s = trio.current_time() - began
        expected = len(vectors) * (len(vectors) + 1) / 2
        assert all((results[i] == expected).all() for i in range(len(vectors)))
        shares = {party.peer: party.share for party in split.parties}
        lines_ = [line for line in split.lines if line.peer in shares]
        return took_s, bound_s_per_byte(lines_, shares) * ELEMENTS * 4


@pytest.mark.slow
@virtual
async def test_a_helper_makes_a_round_as_short_as_sending_once() -> None:
    """Four peers with a wide helper: each line carries one vector, where it would be one and a half without."""
    took_s, bound_s = await one_round((20.0,) * 4 + (200.0,), 1)
    once_s = ELEMENTS * 4 / 2.5e6
    assert bound_s == pytest.approx(once_s, rel=1e-3)
    assert bound_s <= took_s <= 1.15 * bound_s


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setup", [next(iter(SETUPS)), *map(thorough, [*SETUPS][1:])])
@virtual
async def test_a_round_takes_little_longer_than_the_model_allows(setup: str) -> None:
    took_s, bound_s = await one_round(SETUPS[setup], 0)
    print(f"{setup}: {took_s:.3f} s, the model allows {bound_s:.3f} s: {took_s / bound_s:.3f}")
    assert bound_s <= took_s <= 1.15 * bound_s
