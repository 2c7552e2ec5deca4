"""Whole sessions of calls with a hostile caller; see rpc_sessions."""

from __future__ import annotations

import pytest

from tests.fuzz.rpc_sessions import session
from tests.worlds.simulation.clock import run_virtual

FEW, MANY = 500, 20_000


def run(seeds: range) -> None:
    for seed in seeds:
        run_virtual(session, seed, seed=seed)


@pytest.mark.parametrize("start", range(0, FEW, 10))
def test_a_hostile_caller_leaves_nothing_behind(start: int) -> None:
    run(range(start, start + 10))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("start", range(FEW, MANY, 500))
def test_many_hostile_callers_leave_nothing_behind(start: int) -> None:
    run(range(start, start + 500))
