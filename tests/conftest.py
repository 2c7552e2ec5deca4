"""Runs async tests under trio: on a virtual clock with a repeatable order of tasks, or on the real one, watched.

A test that takes `autojump_clock` gets virtual time; the order in which trio runs tasks then follows from the seed.
Other async tests run on the real clock, and fail when one step blocks the loop (see tests/kit/watchdog.py; opt out
with `@pytest.mark.no_watchdog(reason)`). `PEERD_TEST_SEED` changes the seed of every test; a failure prints it.
Torch is set to one thread once something has imported it; this file never does.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import trio
import trio.testing

from tests.choice import durations, passed, schedule
from tests.choice.selection import select
from tests.choice.slices import parse_slice
from tests.choice.touched import BUDGET_S, Deadline
from tests.kit.amount import ALL, examples
from tests.kit.watchdog import LoopWatchdog
from tests.worlds.simulation.clock import deterministic_scheduling

if TYPE_CHECKING:
    from tests.kit.exact import Batches


WHOLE = pytest.StashKey[bool]()  # no files are named
SAID = pytest.StashKey[list[str]]()  # what was chosen, and what was left out
DEADLINE = Deadline()
DEFAULT_SEED = 17  # fixed: a run of the suite can be repeated as it is


def _session_seed() -> int:
    text = os.environ.get("PEERD_TEST_SEED", str(DEFAULT_SEED))
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"PEERD_TEST_SEED has to be a whole number, not {text!r}") from None


def pytest_configure(config: pytest.Config) -> None:
    parse_slice()  # here, where a wrong one is one sentence: processes that run tests would each fail in their own way
    # Simulated swarms make and drop far more objects than they keep: searched at each 700, they take a quarter longer.
    gc.set_threshold(50_000, 20)
    config.addinivalue_line("markers", "no_watchdog(reason): the test may block the trio loop for long")
    # Examples are derived from the test itself unless a seed is asked for; no deadline, for machines are shared.
    given = "PEERD_TEST_SEED" in os.environ
    hypothesis.settings.register_profile(
        "peerd", derandomize=not given, deadline=None, print_blob=True, max_examples=examples(100)
    )
    hypothesis.settings.load_profile("peerd")
    folder = Path(__file__).resolve().parent
    config.stash[WHOLE] = [(config.rootpath / arg).resolve() for arg in config.args] == [folder]
    if config.stash[WHOLE] and (worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")):
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args = [str(path) for path in schedule.collection_order(folder, int(worker), count)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tests of this run, and put them in order."""
    table = durations.read_table()
    chosen = select(items, table, config.stash[WHOLE])
    run = {item.nodeid for item in chosen.run}
    if left := [item for item in items if item.nodeid not in run]:
        config.hook.pytest_deselected(items=left)
    items[:] = chosen.run
    if "PYTEST_XDIST_WORKER" in os.environ:
        schedule.arrange(items, table, ranked=BUDGET_S > 0)
    config.stash[SAID] = chosen.said


def pytest_xdist_auto_num_workers() -> int:
    return schedule.workers()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with schedule.place(item):
        return (yield)


def pytest_runtest_setup() -> None:
    if DEADLINE.is_over(time.monotonic()):
        pytest.skip(f"left out, for the {BUDGET_S:.0f} s for what changed are over")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = schedule.plain_id(report.nodeid)
        passed.note(report)
        durations.note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        passed.write()
    else:
        output["said"] = session.config.stash.get(SAID, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker has chosen: all workers choose the same."""
    if said := getattr(node, "workeroutput", {}).get("said"):
        node.config.stash[SAID] = said


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print which tests were chosen and left out, and one line that counts skipped tests by reason."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for line in config.stash.get(SAID, []):
        terminalreporter.write_line(line)
    if told := [f"{count} x {reason}" for reason, count in reasons.most_common()]:
        terminalreporter.write_line(f"skipped: {'; '.join(told)}")
    if not ALL:
        terminalreporter.write_line("what takes long is left to `make test-all`")


@pytest.fixture
def seed() -> int:
    """The seed of this test; use it for everything drawn at random."""
    return _session_seed()


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """A virtual clock that jumps to the next wake-up whenever every task waits."""
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)
        torch.manual_seed(_session_seed())


@pytest.fixture(autouse=True)
def _own_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the priority of this process: a command that a test runs here would lower it for all tests that follow."""
    if hasattr(os, "setpriority"):
        monkeypatch.setattr(os, "setpriority", lambda which, who, priority: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call" and report.failed:
        report.sections.append(("seed", f"repeat with PEERD_TEST_SEED={_session_seed()}"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    function = pyfuncitem.obj
    watch = pyfuncitem.get_closest_marker("no_watchdog") is None
    if getattr(function, "is_hypothesis_test", False):
        inner = function.hypothesis.inner_test
        if inspect.iscoroutinefunction(inner):
            function.hypothesis.inner_test = _sync(inner, watch)
        return None
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    clock = next((a for a in pyfuncitem.funcargs.values() if isinstance(a, trio.testing.MockClock)), None)
    _run(functools.partial(function, **arguments), clock, watch)
    return True


def _sync(inner: Callable[..., Awaitable[None]], watch: bool) -> Callable[..., None]:
    """The body of an async property, as hypothesis wants it: each example runs on a clock of its own."""

    @functools.wraps(inner)
    def example(*args: Any, **kwargs: Any) -> None:
        clock = None
        for name, value in kwargs.items():
            if isinstance(value, trio.testing.MockClock):
                clock = kwargs[name] = trio.testing.MockClock(autojump_threshold=0)
        _run(functools.partial(inner, *args, **kwargs), clock, watch)

    return example


def _run(test: Callable[[], Awaitable[None]], clock: trio.testing.MockClock | None, watch: bool) -> None:
    try:
        if clock is not None:
            with deterministic_scheduling(_session_seed()):
                trio.run(test, clock=clock)
            return
        watchdog = LoopWatchdog()
        trio.run(test, instruments=[watchdog] if watch else [])
    except BaseExceptionGroup as group:
        verdict = _only_verdict(group)
        if verdict is None:
            raise
        raise verdict from None
    if watch and (complaint := watchdog.complaint()):
        pytest.fail(complaint, pytrace=False)


def _only_verdict(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The skip, fail or xfail that a test called inside a nursery, if nothing else went wrong."""
    verdicts = (pytest.skip.Exception, pytest.fail.Exception, pytest.xfail.Exception)
    if len(group.exceptions) != 1:
        return None
    (only,) = group.exceptions
    if isinstance(only, BaseExceptionGroup):
        return _only_verdict(only)
    return only if isinstance(only, verdicts) else None


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """The batch of every step of the test's swarm."""
    import torch

    from tests.kit.exact import Batches

    book = Batches()
    book.watch(monkeypatch)
    torch.set_num_threads(1)
    return book
