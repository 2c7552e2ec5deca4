"""The desk between a user's thread and the loop: who may touch the tensors when, and which gradients count."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
import trio

from peerd.core.errors import PeerdError, Refused
from peerd.library.roles.handoff import GradientHandoff, Gradients
from peerd.messages.swarm import Position

HERE = Position(3, b"here")


class User:
    """A thread that hands gradients in, one for each `go`, and notes what it hears."""

    def __init__(self, desk: GradientHandoff) -> None:
        self.desk = desk
        self.heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._go: queue.SimpleQueue[Gradients | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self, gradients: Gradients | None = None) -> None:
        self._go.put(gradients)

    async def hears(self) -> object:
        with trio.fail_after(60):
            return await trio.to_thread.run_sync(self.heard.get, abandon_on_cancel=True)

    def _run(self) -> None:
        try:
            self.desk.wait()
            self.heard.put("go")
            while (gradients := self._go.get()) is not None:
                self.desk.hand_in(gradients, 4)
                self.heard.put("go")
        except PeerdError as error:
            self.heard.put(error)


def desk() -> GradientHandoff:
    made = GradientHandoff(patience_s=0.05)
    made.open(trio.lowlevel.current_trio_token())
    return made


async def test_the_user_goes_when_his_place_is_there_and_his_gradient_comes_back() -> None:
    d = desk()
    user = User(d)
    gradient: Gradients = [torch.ones(1)]

    async def hand_in() -> None:
        assert await user.hears() == "go"
        user.go(gradient)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hand_in)
        async with d.gradients(lambda: [HERE], 3) as found:
            assert (found.gradients, found.samples) == (gradient, 4)
            assert user.heard.empty()  # he stays while his tensors are read
    user.go()


async def test_a_gradient_is_late_when_the_swarm_has_gone_on_without_it() -> None:
    d = desk()
    user = User(d)
    stands = HERE
    async with trio.open_nursery() as nursery:

        async def hand_in_late() -> None:
            nonlocal stands
            assert await user.hears() == "go"
            stands = Position(4, b"there")
            dropped.cancel()
            user.go([torch.zeros(1)])
            assert await user.hears() == "go"
            user.go([torch.ones(1)])

        nursery.start_soon(hand_in_late)
        with trio.CancelScope() as dropped:
            async with d.gradients(lambda: [stands], 3):
                raise AssertionError("there is no such gradient")
        async with d.gradients(lambda: [stands], 4) as found:
            assert found.gradients[0] is not None
            assert found.gradients[0].item() == 1
    assert d.counts.late == 1
    user.go()


async def test_a_gradient_without_a_place_counts_when_one_comes_before_the_step_ends() -> None:
    d = desk()
    user = User(d)
    async with trio.open_nursery() as nursery:

        async def hand_in() -> None:
            await user.hears()
            dropped.cancel()
            user.go([torch.ones(1)])

        nursery.start_soon(hand_in)
        with trio.CancelScope() as dropped:
            async with d.gradients(lambda: [HERE], 3):
                raise AssertionError("this place was taken back")
        async with d.gradients(lambda: [HERE], 3) as found:
            assert found.gradients[0] is not None
    assert d.counts.late == 0
    user.go()


async def test_in_a_delayed_run_a_gradient_counts_one_step_later_too_but_not_two_nor_after_a_jump() -> None:
    d = GradientHandoff(patience_s=60, delay=1)
    d.open(trio.lowlevel.current_trio_token())
    user = User(d)
    there, beyond = Position(4, b"there"), Position(5, b"beyond")
    origins = [HERE]

    async def goes_out() -> None:
        """He computes with the parameters of now."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_take_with, d, lambda: origins)
                assert await user.hears() == "go"
                scope.cancel()

    for now, step, late in (([there, HERE], 4, 0), ([beyond, there], 5, 1), ([there], 4, 2)):
        origins[:] = [HERE]
        await goes_out()
        origins[:] = now
        user.go([torch.ones(1)])
        with trio.move_on_after(0.05) as waited:
            async with d.gradients(lambda: origins, step):
                pass
        assert d.counts.late == late
        if late:
            assert waited.cancelled_caught
            assert await user.hears() == "go"  # he was let go with the new ones
            user.go([torch.ones(1)])
            async with d.gradients(lambda: origins, step):
                pass
    user.go()


async def _take_with(d: GradientHandoff, origins: Callable[[], list[Position]]) -> None:
    async with d.gradients(origins, 3):
        pass


async def test_parameters_change_only_while_the_user_is_inside() -> None:
    d = desk()
    user = User(d)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_take, d)
        assert await user.hears() == "go"
        with pytest.raises(Refused, match=r"has not come back for 0\.05 s"):
            async with d.changing(patient=False):
                raise AssertionError("he is outside")
        user.go([torch.ones(1)])
        async with d.changing(patient=True):
            nursery.start_soon(_take, d)
            await trio.testing.wait_all_tasks_blocked()
            assert user.heard.empty()  # he is not let go meanwhile
        assert await user.hears() == "go"
        nursery.cancel_scope.cancel()
    user.go()


async def _take(d: GradientHandoff) -> None:
    async with d.gradients(lambda: [HERE], 3):
        pass


async def test_who_waits_hears_of_a_failure_and_so_does_who_comes_later() -> None:
    d = desk()
    user = User(d)
    d.fail(PeerdError("broken"))
    assert str(await user.hears()) == "broken"
    with pytest.raises(PeerdError, match="broken"):
        d.hand_in([], 4)
