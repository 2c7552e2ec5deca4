"""A plain thread and a trio loop: what the thread asks runs on the loop, what the loop says ends the thread's wait."""

from __future__ import annotations

import threading

import pytest
import trio

from peerd.library.roles.bridge import LoopBridge


async def test_a_job_of_the_thread_runs_on_the_loop_and_the_answer_lets_it_go() -> None:
    bridge, ran_in = LoopBridge(lambda gone: None), list[int]()
    bridge.open(trio.lowlevel.current_trio_token())

    def job() -> None:
        ran_in.append(threading.get_ident())
        bridge.let_go()

    def thread() -> None:
        bridge.call(job)
        bridge.wait()

    await trio.to_thread.run_sync(thread)
    assert ran_in == [threading.get_ident()]


async def test_a_failure_ends_the_wait_and_every_later_call() -> None:
    bridge = LoopBridge(lambda gone: None)
    bridge.open(trio.lowlevel.current_trio_token())
    bridge.fail(FloatingPointError("the loop has ended"))

    def thread() -> None:
        for act in (bridge.wait, lambda: bridge.call(lambda: None)):
            with pytest.raises(FloatingPointError, match="the loop has ended"):
                act()
        bridge.send(lambda: None)  # a farewell is no call

    await trio.to_thread.run_sync(thread)


async def test_a_permission_that_is_taken_back_is_gone_and_a_failure_stays() -> None:
    bridge = LoopBridge(lambda gone: None)
    bridge.let_go()
    bridge.fail(KeyError("first"))
    bridge.let_go()
    bridge.take_back()
    with pytest.raises(KeyError, match="first"):
        await trio.to_thread.run_sync(bridge.wait)


async def test_an_interrupted_thread_asks_the_loop_to_be_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[threading.Event]()

    def leaves(gone: threading.Event) -> None:
        left.append(gone)
        gone.set()

    bridge = LoopBridge(leaves)
    bridge.open(trio.lowlevel.current_trio_token())

    class Interrupted:
        def get(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(bridge, "_answers", Interrupted())

    def thread() -> None:
        with pytest.raises(KeyboardInterrupt):
            bridge.wait()

    await trio.to_thread.run_sync(thread)
    assert len(left) == 1
