"""Runs async tests under trio, with a virtual clock on request and a watchdog on the loop's lag."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import trio
import trio.testing


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """A virtual clock that jumps to the next wake-up whenever every task waits."""
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    clock = next((a for a in pyfuncitem.funcargs.values() if isinstance(a, trio.testing.MockClock)), None)
    trio.run(functools.partial(function, **arguments), clock=clock)
    return True
