"""Contract of both workers: order, results, exceptions, and jobs that end whatever happens to their callers."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import trio
import trio.testing

from peerd.core.errors import LocalError, NoMemory
from peerd.core.work import Worker
from peerd.model.worker import DeviceWorker, use_threads
from tests.worlds.roles.inline_worker import InlineWorker


def raise_it(error: BaseException) -> None:
    raise error


def no_memory_of_the_cpu() -> RuntimeError:
    """The error of torch's CPU allocator for more bytes than any machine has."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("a machine with 2^60 bytes")


async def check_promises(worker: Worker) -> None:
    """Check the contract of every Worker: results, exceptions, order."""
    assert await worker.run(lambda: 41 + 1, name="sum") == 42

    def fail() -> None:
        raise ValueError("a bad microbatch")

    with pytest.raises(ValueError, match="a bad microbatch"):
        await worker.run(fail, name="fail")
    for error in (torch.OutOfMemoryError("CUDA out of memory\nand more"), MemoryError(), no_memory_of_the_cpu()):
        with pytest.raises(NoMemory, match="there is no memory for the job “lack”: "):
            await worker.run(partial(raise_it, error), name="lack")
    order: list[int] = []
    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(lambda n=number: worker.run(lambda: order.append(n), name="append"))
            await trio.testing.wait_all_tasks_blocked()
    assert order == sorted(order)
    assert len(order) == 5
    await check_urgency(worker)


async def check_urgency(worker: Worker) -> None:
    """Urgent jobs go before those that have not begun, in their own order; whoever gives up is not waited for."""
    order: list[str] = []

    async def job(name: str, urgent: bool) -> None:
        await worker.run(lambda: order.append(name), name=name, cost_s=1.0, urgent=urgent)

    begun, go_on = threading.Event(), threading.Event()
    async with trio.open_nursery() as nursery:
        if isinstance(worker, DeviceWorker):
            nursery.start_soon(lambda: worker.run(lambda: (begun.set(), go_on.wait(60)), name="first"))
            await trio.to_thread.run_sync(begun.wait)
        else:
            nursery.start_soon(job, "first", False)
            await trio.testing.wait_all_tasks_blocked()
        gone = trio.CancelScope()

        async def give_up() -> None:
            with gone:
                await job("gone", True)

        for name, urgent in (("a", False), ("b", False), ("u", True), ("v", True)):
            nursery.start_soon(job, name, urgent)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(give_up)
        await trio.testing.wait_all_tasks_blocked()
        gone.cancel()
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert [name for name in order if name != "first"] == ["u", "v", "a", "b"]


async def test_a_device_worker_keeps_the_promises_of_a_worker() -> None:
    async with DeviceWorker() as worker:
        await check_promises(worker)
        assert worker.jobs_done == 15
        assert worker.queued == 0


async def test_an_inline_worker_keeps_the_promises_of_a_worker(autojump_clock: trio.testing.MockClock) -> None:
    await check_promises(InlineWorker())


async def test_all_jobs_of_a_device_run_in_one_thread_that_is_not_the_loop() -> None:
    async with DeviceWorker() as worker:
        idents = {await worker.run(threading.get_ident, name="ident") for _ in range(3)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


async def test_a_running_job_goes_on_to_its_end_when_its_caller_is_cancelled() -> None:
    started, go_on, ended = threading.Event(), threading.Event(), []

    def job() -> None:
        started.set()
        go_on.wait(60)
        ended.append(True)

    async with DeviceWorker() as worker:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: worker.run(job, name="long"))
                await trio.to_thread.run_sync(started.wait)
                assert (worker.current, worker.queued) == ("long", 1)
                scope.cancel()
        assert ended == []
        go_on.set()
        await worker.run(lambda: None, name="after")
        assert ended == [True]


async def test_a_job_whose_caller_left_before_its_turn_is_skipped() -> None:
    go_on, ran = threading.Event(), []
    async with DeviceWorker() as worker, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: worker.run(lambda: go_on.wait(60), name="first"))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0):
            await worker.run(lambda: ran.append(True), name="second")
        go_on.set()
        await worker.run(lambda: None, name="third")
    assert ran == []


async def test_closing_waits_for_the_running_job_and_fails_those_that_wait() -> None:
    started, go_on, ended, refused = threading.Event(), threading.Event(), [], []

    def first() -> None:
        started.set()
        go_on.wait(60)
        ended.append("first")

    async def second() -> None:
        with pytest.raises(LocalError, match="closed before second could run"):
            await worker.run(lambda: ended.append("second"), name="second")
        refused.append(True)

    async def let_go_once_the_worker_closes() -> None:
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

    worker = DeviceWorker()
    async with trio.open_nursery() as nursery, worker:
        nursery.start_soon(lambda: worker.run(first, name="first"))
        await trio.to_thread.run_sync(started.wait)
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(let_go_once_the_worker_closes)
    assert (ended, refused) == (["first"], [True])
    with pytest.raises(LocalError, match="is not open: cannot run late"):
        await worker.run(lambda: None, name="late")


async def test_the_loop_is_free_while_a_job_runs() -> None:
    go_on, heard = threading.Event(), []

    async def wait_for_the_loop(worker: DeviceWorker) -> None:
        heard.append(await worker.run(lambda: go_on.wait(60), name="wait for the loop"))

    async with DeviceWorker() as worker, trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_the_loop, worker)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert heard == [True]


async def test_a_worker_limits_torchs_threads_in_its_own_thread() -> None:
    async with DeviceWorker(threads=1) as worker:
        assert await worker.run(torch.get_num_threads, name="threads") == 1
        await worker.run(lambda: use_threads(0), name="at least one")
        assert await worker.run(torch.get_num_threads, name="threads") == 1


async def test_an_inline_worker_charges_costs_one_job_after_another(autojump_clock: trio.testing.MockClock) -> None:
    worker, ends = InlineWorker(slowness=2.0), []

    async def job(cost_s: float) -> None:
        await worker.run(lambda: None, name="job", cost_s=cost_s)
        ends.append(trio.current_time() - start)

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for cost_s in (1.0, 2.0, 0.5):
            nursery.start_soon(job, cost_s)
            await trio.testing.wait_all_tasks_blocked()
    assert ends == pytest.approx([2.0, 6.0, 7.0])
    assert worker.busy_s == pytest.approx(7.0)


async def test_a_cancelled_caller_leaves_the_virtual_device_busy(autojump_clock: trio.testing.MockClock) -> None:
    worker, done = InlineWorker(), []
    start = trio.current_time()
    with trio.move_on_after(1.0):
        await worker.run(lambda: done.append(True), name="first", cost_s=3.0)
    assert done == [True]
    await worker.run(lambda: None, name="second", cost_s=1.0)
    assert trio.current_time() - start == pytest.approx(4.0)


async def test_a_caller_cancelled_as_its_turn_comes_leaves_the_virtual_device_to_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = InlineWorker()

    async def job(scope: trio.CancelScope) -> None:
        with scope:
            await worker.run(lambda: None, name="job", cost_s=1.0)

    for count in range(1, 21):  # who of those that are cancelled together runs first is trio's choice
        scopes = [trio.CancelScope() for _ in range(4)]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for scope in scopes:
                    nursery.start_soon(job, scope)
                    await trio.testing.wait_all_tasks_blocked()
                scopes[1].cancel()  # its turn has come, but the device is busy
                scopes[2].cancel()  # the next in line
        assert worker.jobs_done == 2 * count
