"""Limits between pairs of peers count in every round of a grid, and are worked out once for each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import trio

from peerd.core.messages.swarm import LineInfo
from peerd.machine.averaging.topology import Grouping
from peerd.machine.averaging.work_split import Lines
from peerd.machine.conductor.conductor import ConductorConfig
from peerd.machine.swarm.events import SendPrepare
from peerd.service.conductor.orders import ConductingConfig, Orders

T = TypeVar("T")
NAMES = tuple(f"p{i}" for i in range(9))


class Counting:
    """Counts what it is asked for; computes in a thread, for the solver's first use loads it."""

    jobs = 0

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        self.jobs += 1
        return await trio.to_thread.run_sync(job)


def orders(pairs: dict[tuple[str, str], float]) -> list[SendPrepare]:
    lines = Lines()
    for name in NAMES:
        lines.tell(name, 0, LineInfo("node", 1e7, 1e7, 1000, "float32"))
    lines.limit_pairs(pairs)
    found = Grouping(lines, 3).order(0, NAMES)
    return [SendPrepare(name, bytes(16), b"", NAMES, (), found.split, found.rounds[name]) for name in NAMES]


async def divided(given: list[SendPrepare]) -> tuple[list[SendPrepare], int]:
    config = ConductingConfig(bytes(16), ConductorConfig(stages=1, microbatches=1), 8, 60.0)
    orders = Orders(config, cast(Any, None))
    orders.solver = solver = Counting()
    return await orders._all_divided(given), solver.jobs


@pytest.mark.slow
async def test_a_slow_pair_changes_the_shares_of_its_group_and_of_no_other() -> None:
    given = orders({("p0", "p1"): 1e5})
    found, jobs = await divided(given)
    assert jobs == 1
    for before, after in zip(given, found, strict=True):
        of_the_pair = "p0" in before.rounds[0].meeting.peers
        assert (after.rounds[0] != before.rounds[0]) == of_the_pair
        assert after.rounds[1] == before.rounds[1]
        split = after.rounds[0].split
        assert split is not None
        assert {party.peer for party in split.parties} == set(after.rounds[0].meeting.peers)
    assert len({order.rounds[0] for order in found if "p0" in order.rounds[0].meeting.peers}) == 1


async def test_without_limits_nothing_is_worked_out() -> None:
    given = orders({})
    assert await divided(given) == (given, 0)
