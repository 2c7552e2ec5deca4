"""Limits between pairs of peers count in every round of a grid, and are worked out once for each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import trio

from peerd.averaging.topology import GroupTopology
from peerd.averaging.work_split import Split, WorkSplitter
from peerd.messages.swarm import LineInfo
from peerd.swarm.conductor.orders import ConductingConfig, OrderContext, Orders
from peerd.swarm.events import SendPrepare
from peerd.swarm.steps.conductor import ConductorConfig
from tests.worlds.machines.grids import attempt_name, rounds_of

T = TypeVar("T")
NAMES = tuple(f"p{i}" for i in range(9))


class Counting:
    """Counts what it is asked for; computes in a thread, for the solver's first use loads it."""

    jobs = 0

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        self.jobs += 1
        return await trio.to_thread.run_sync(job)


def orders(pairs: dict[tuple[str, str], float]) -> list[SendPrepare]:
    lines = WorkSplitter()
    for name in NAMES:
        lines.tell(name, 0, LineInfo("node", 1e7, 1e7, 1000, "float32"))
    lines.limit_pairs(pairs)
    groups = rounds_of(GroupTopology(lines, 3), NAMES)
    found = [one for made in groups for one in made]
    return [
        SendPrepare(one.meeting.peers[0], attempt_name(0, at), b"", one.meeting.peers, (), one.split)
        for at, one in enumerate(found)
    ]


async def divided(given: list[SendPrepare]) -> tuple[list[Split | None], int]:
    """What each group is told."""
    config = ConductingConfig(bytes(16), ConductorConfig(stages=1, microbatches=1), 8, 60.0)
    orders = Orders(config, cast(Any, None))
    orders.solver = solver = Counting()
    told: dict[bytes, Split | None] = {}

    async def prepare(order: SendPrepare, reign: OrderContext) -> None:
        await trio.lowlevel.checkpoint()
        told[order.attempt] = order.split

    orders._prepare = prepare  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        orders.begin(nursery, given, OrderContext(1, 1, lambda event: None))
    return [told[order.attempt] for order in given], solver.jobs


@pytest.mark.slow
async def test_a_slow_pair_changes_the_shares_of_its_group_and_of_no_other() -> None:
    given = orders({("p0", "p1"): 1e5})
    found, jobs = await divided(given)
    assert jobs == 1
    assert len(given) == 6
    for before, after in zip(given, found, strict=True):
        assert (after != before.split) == ({"p0", "p1"} <= {*before.group})
        assert after is not None
        assert {party.peer for party in after.parties} == {*before.group}


async def test_without_limits_nothing_is_worked_out() -> None:
    given = orders({})
    assert await divided(given) == ([order.split for order in given], 0)
