"""A move to another stage takes as long as its state does, however large; what brings nothing is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.signals import Signal
from peerd.training.stage.moving import Relocating


def mover(post: Any) -> Any:
    """A move's driver with nothing but a member that enters `post`, and a conductor that lists it as ready at last."""

    async def enter(stage: int) -> Any:
        return post

    made: Any = Relocating.__new__(Relocating)
    made._member, made._following = SimpleNamespace(enter=enter), SimpleNamespace(told=Signal(), members=[])
    made._is_ready = lambda stage: post.ready
    return made


@pytest.mark.parametrize(("pieces", "told"), [(20, None), (3, "nothing of its state came for 600 s")])
async def test_a_state_that_keeps_coming_is_waited_for(
    autojump_clock: MockClock, pieces: int, told: str | None
) -> None:
    post = SimpleNamespace(progress=0, ready=False)

    async def download() -> None:
        for _ in range(pieces):
            await trio.sleep(500.0)
            post.progress += 1
        post.ready = told is None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(download)
        began = trio.current_time()
        assert await mover(post)._settle(1) == told
    assert trio.current_time() - began == pytest.approx(500.0 * pieces + (600.0 if told else 0.0), abs=10.0)
