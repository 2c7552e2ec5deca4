"""A move to another stage takes as long as its state does, however large; what brings nothing is given up. A peer that
stays says why.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Refused
from peerd.core.keys import Keypair
from peerd.core.signals import Signal
from peerd.model.shapes.stage_memory import StageFootprint
from peerd.pipeline.stage.post import Post
from peerd.pipeline.stage.stage_move import StageMove
from peerd.run.runfile import PipelineSection, PlanSection

STATE_BYTES = 1_000_000_000  # 8,000 s on a line of 1 Mb/s


def mover(post: Any) -> Any:
    """A move's driver with nothing but a member that enters `post`, and a conductor that lists it as ready at last."""

    async def enter(stage: int) -> Any:
        return post

    async def size_of(stage: int) -> StageFootprint:
        return StageFootprint(stage, STATE_BYTES // 12, 0, 0, STATE_BYTES)

    made: Any = StageMove.__new__(StageMove)
    made._member, made._following = SimpleNamespace(enter=enter), SimpleNamespace(told=Signal(), members=[])
    made._is_ready, made._size_of = lambda stage: post.ready, size_of
    return made


@pytest.mark.parametrize(
    ("pieces", "takes_s", "told"),
    [
        (15, 7500.0, None),
        (3, 2100.0, "nothing of its state arrived for 600 s"),
        (1000, 8600.0, "its state did not arrive within 8600 s"),
    ],
)
async def test_a_state_that_keeps_coming_is_waited_for(
    autojump_clock: MockClock, pieces: int, takes_s: float, told: str | None
) -> None:
    post: Any = SimpleNamespace(stage=1, catching_up=SimpleNamespace(received_bytes=0), ready=False)

    async def download() -> None:
        for _ in range(pieces):
            await trio.sleep(500.0)
            post.catching_up.received_bytes += 1
        post.ready = told is None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(download)
        began = trio.current_time()
        assert await mover(post)._settle(1) == told
        assert trio.current_time() - began == pytest.approx(takes_s, abs=10.0)
        nursery.cancel_scope.cancel()


PEER = Keypair(bytes(32)).peer_id.text


@pytest.mark.parametrize(
    ("stages", "limits", "why"),
    [
        ([[PEER], []], [], "the run's plan assigns it"),
        ([[], [PEER]], [], "its user chose it"),
        ([[PEER], []], [0], "its user chose it"),
    ],
    ids=["planned", "planned elsewhere", "pinned"],
)
async def test_a_peer_that_stays_names_the_plan_or_its_user(stages: Any, limits: Any, why: str) -> None:
    post: Any = object.__new__(Post)
    post.stage, post.moves_to = 0, None
    plan, pipeline = PlanSection(stages=stages), PipelineSection(stages=2, placement="plan")
    limits = SimpleNamespace(stages=limits)
    post._run = SimpleNamespace(plan=plan, pipeline=pipeline, limits=limits)
    post._ctx = SimpleNamespace(host=SimpleNamespace(id=SimpleNamespace(text=PEER)))
    with pytest.raises(Refused, match=f"^this peer serves stage 0, because {why}$"):
        await post.transfer(SimpleNamespace(body=SimpleNamespace(target=1, why=""), peer=None))
