"""A checkpoint that nobody waits for any more: its writer stops, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trio
from trio.testing import MockClock

from peerd.messages.swarm import Position
from peerd.model.frozen_state import FrozenState
from peerd.run.runfile import RunFile
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints


class SlowState(FrozenState):
    """A state whose reader waits for `goes` before each piece."""

    def __init__(self) -> None:
        super().__init__({"a": torch.zeros(1000), "b": torch.zeros(1000)})
        self.begun, self.goes = threading.Event(), threading.Event()

    def read(self, tensor: int, begin: int, end: int) -> memoryview:
        self.begun.set()
        assert self.goes.wait(30)
        return super().read(tensor, begin, end)


class Files:
    """A worker with a thread for each job."""

    async def run(self, job: Callable[[], Any], *, name: str) -> Any:
        return await trio.to_thread.run_sync(job)


async def test_a_checkpoint_under_way_is_given_up_and_one_that_waits_is_forgotten(tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    log = SimpleNamespace(event=lambda name, **facts: told.append((name, facts)))
    ctx: Any = SimpleNamespace(run=RunFile(run="left"), data_dir=tmp_path, worker=lambda name: Files(), log=log)
    saving, first, second = StageCheckpoints(ctx, bytes(32)), SlowState(), SlowState()
    await saving.open(0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saving.run)
        saving.hand_in(Position(3, bytes(8)), first)
        await trio.to_thread.run_sync(first.begun.wait, 30)
        saving.hand_in(Position(4, bytes(8)), second)
        saving.give_up()
        first.goes.set()
        with trio.fail_after(30):
            await saving.written()
        nursery.cancel_scope.cancel()
    assert [(name, facts["step"]) for name, facts in told] == [("checkpoint.given_up", 3), ("checkpoint.given_up", 4)]
    assert "0.0 MB" in told[0][1]["reason"]
    assert not second.begun.is_set()
    assert saving.positions == []
    assert list((tmp_path / "checkpoints" / "left" / "stage-0").iterdir()) == []


async def test_a_large_checkpoint_is_no_problem_while_its_bytes_may_take_so_long(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    ctx: Any = SimpleNamespace(run=RunFile(run="large"), data_dir=tmp_path, worker=lambda name: Files())
    saving, state = StageCheckpoints(ctx, bytes(32)), SimpleNamespace(nbytes=5_000_000_000)
    saving._writing = Position(3, bytes(8)), trio.current_time(), state  # type: ignore[assignment]
    await trio.sleep(500)
    assert saving.problem is None
    await trio.sleep(100)
    assert saving.problem is not None
    assert "the checkpoint of step 3 is not yet written to" in saving.problem
    assert saving.problem.endswith(" after 600 s")
