"""Blocking calls to experts: threads wait for their own calls, errors reach them, and nobody waits for a lost peer.

In real time, for the virtual clock knows no threads; nothing sleeps: all wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import trio

from peerd.core.errors import LocalError, TooFewExperts, Unreachable
from peerd.experts.calls.blocking import BlockingExperts
from peerd.run.expert_network import ExpertCall, ExpertCaller, ExpertReply, ServedBy
from peerd.run.grid import Uid
from tests.worlds.network.expertworld import asks_for, frame

A = Uid(0, (1, 2))
SCORES = [np.zeros((1, 4), np.float32)] * 2


class Network:
    """Answers a forward once `together` of them wait at the same time."""

    def __init__(self, together: int = 1) -> None:
        self.together, self.waiting, self.all_wait = together, 0, trio.Event()

    async def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        await trio.lowlevel.checkpoint()
        return [[A] * k for _ in range(scores[0].shape[0])]

    async def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        self.waiting += 1
        if self.waiting == self.together:
            self.all_wait.set()
        await self.all_wait.wait()
        return [ExpertReply(ask.frames[0], ServedBy("host", 0, samples)) for ask in asks]

    async def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        await trio.lowlevel.checkpoint()
        raise TooFewExperts("sample 0 has none")


async def test_threads_wait_for_their_own_calls_many_at_once() -> None:
    caller: ExpertCaller = BlockingExperts(Network(together=8))
    found = dict[int, list[ExpertReply | None]]()

    def one(number: int) -> None:
        assert caller.choose(0, SCORES, 2) == [[A, A]]
        found[number] = caller.forward(asks_for([A]), number)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(trio.to_thread.run_sync, one, number)
    assert found == {n: [ExpertReply(frame(2), ServedBy("host", 0, n))] for n in range(8)}


async def test_what_a_call_raises_is_raised_in_its_thread() -> None:
    caller = BlockingExperts(Network())

    def one() -> None:
        with pytest.raises(TooFewExperts, match="sample 0 has none"):
            caller.backward([])

    with trio.fail_after(10):
        await trio.to_thread.run_sync(one)


async def test_a_thread_that_waits_is_told_when_its_peer_leaves() -> None:
    network = Network(together=2)
    caller, waits = BlockingExperts(network), threading.Event()

    def one() -> None:
        with pytest.raises(Unreachable, match="this peer has left the run"):
            caller.forward(asks_for([A]), 1)
        waits.set()
        with pytest.raises(Unreachable, match="this peer has left the run"):
            caller.choose(0, SCORES, 1)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, one)
            while not network.waiting:
                await trio.lowlevel.checkpoint()
            caller.close()
    assert waits.is_set()


def test_a_call_after_the_trio_run_has_ended_is_told_so_and_one_under_way_ends_with_it() -> None:
    told, begun = list[str](), threading.Event()

    def ask(caller: BlockingExperts) -> None:
        begun.set()
        try:
            caller.forward(asks_for([A]), 1)
        except Unreachable as error:
            told.append(str(error))

    async def peer() -> BlockingExperts:
        network = Network(together=2)
        caller = BlockingExperts(network)
        thread = threading.Thread(target=ask, args=(caller,))
        threads.append(thread)
        thread.start()
        while not network.waiting:
            await trio.lowlevel.checkpoint()
        return caller

    threads = list[threading.Thread]()
    caller = trio.run(peer)
    threads[0].join(60)
    later = threading.Thread(target=ask, args=(caller,))
    later.start()
    later.join(60)
    assert told == ["this peer has left the run"] * 2


async def test_a_call_in_the_thread_of_the_trio_run_itself_is_refused_rather_than_waited_for() -> None:
    with pytest.raises(LocalError, match="in the trio thread"):
        BlockingExperts(Network()).choose(0, SCORES, 1)
    token = trio.lowlevel.current_trio_token()
    given = BlockingExperts(Network(), token)
    assert await trio.to_thread.run_sync(given.choose, 0, SCORES, 1) == [[A]]
