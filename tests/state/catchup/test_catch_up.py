"""Catch-up of one member without a network: which totals it keeps for others, and attempts that fail by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
import trio
import trio.testing
from trio.testing import MockClock

from peerd.core.errors import NoMemory
from peerd.core.keys import Keypair
from peerd.log import EventLog
from peerd.messages.state import TensorSpec
from peerd.messages.swarm import MemberInfo, Position
from peerd.model.frozen_state import MakeRoom
from peerd.model.stage.microbatch_books import Stale
from peerd.run.runfile import LimitsSection, RunFile
from peerd.state.catchup.catch_up import CatchUp
from peerd.state.catchup.step_totals import StepTotal
from peerd.state.snapshot import StateItem
from peerd.state.state_room import StateRoom
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.simulation.clock import SimClock

T = TypeVar("T")
ME, MATE = (Keypair(bytes([number]) * 32).peer_id.text for number in (1, 2))
TOTAL = TensorSpec("total", "float32", (4,))
STATE = [TensorSpec("p", "float32", (40,)), TensorSpec("step", "int64", ())]


def at(step: int) -> Position:
    return Position(step, b"%d" % step)


class Joiner:
    """A member at step 3. `faults` gives an error to raise in place of a job or a change, by its name, or None."""

    def __init__(self) -> None:
        self.position, self.moving = at(3), trio.Lock()
        self.model = SimpleNamespace(outline=lambda: STATE, vector_outline=lambda: TOTAL, low_rank=None)
        self.faults: Callable[[str], Exception | None] = lambda name: None
        self.changes: list[str] = []
        self.moved = trio.Event()

    async def work(self, job: Callable[[], T], name: str) -> T:
        self._fail(name)
        await trio.lowlevel.checkpoint()
        return job()

    async def take_over(self, before: Position, position: Position, state: object) -> None:
        self._change("state", position)

    async def step_on(self, before: Position, leap: StepTotal) -> None:
        self._change("step", leap.target)

    def _change(self, name: str, position: Position) -> None:
        self._fail(name)
        self.changes.append(name)
        self.position = position
        self.moved.set()

    def _fail(self, name: str) -> None:
        if (error := self.faults(name)) is not None:
            raise error


class Donor:
    """A mate that has made a step more, and gives state and total."""

    def __init__(self) -> None:
        self.report, self.notes, self.folder, self.chosen = None, None, None, lambda position: None
        self.giving = SimpleNamespace(in_use=False, let_go=lambda: None)
        self.totals = SimpleNamespace(fetch=self.fetch_total)

    async def fetch(self, *_: object) -> tuple[Position, list[StateItem], None]:
        await trio.lowlevel.checkpoint()
        self.chosen(at(4))
        parts = (np.zeros(40, "float32"), np.array(4, "int64"))
        return (
            at(4),
            [
                StateItem(s.name, s.dtype, s.shape, memoryview(bytearray(p.tobytes())))
                for s, p in zip(STATE, parts, strict=True)
            ],
            None,
        )

    async def fetch_total(self, *_: object) -> tuple[Position, list[StateItem], None]:
        await trio.lowlevel.checkpoint()
        return (
            at(4),
            [StateItem(TOTAL.name, TOTAL.dtype, TOTAL.shape, memoryview(bytearray(np.ones(4, "float32").tobytes())))],
            None,
        )


class Scene:
    def __init__(self, folder: Path, members: Sequence[MemberInfo]) -> None:
        torch.set_num_threads(1)
        clock = SimClock(1, "peer")
        self.log, self.joiner = EventLog(clock), Joiner()
        ctx = SimpleNamespace(
            data_dir=folder,
            worker=lambda name: InlineWorker(),
            log=self.log,
            clock=clock,
            host=SimpleNamespace(id=SimpleNamespace(text=ME)),
        )
        services = SimpleNamespace(run=RunFile(run="x"), fingerprint=b"f" * 32, snapshots=Donor)
        reports = SimpleNamespace(members=list(members), tell=lambda: None)
        context = cast(Any, ctx)
        self.catching_up = CatchUp(context, cast(Any, services), InlineWorker(), cast(Any, self.joiner), reports)
        self.catching_up._stage = 0

    async def catch_up(self) -> None:
        """To step 4."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.catching_up.run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(60):
                while self.joiner.position != at(4):
                    self.catching_up.swarm_at(at(4), self.joiner.position)
                    await trio.sleep(0.5)
            nursery.cancel_scope.cancel()


ONE = MemberInfo(ME, 0, [], True, since=1.0)
BEHIND = MemberInfo(MATE, 0, [], False, since=1.0)
HELPER = MemberInfo(MATE, 0, [], False)
RESTS = MemberInfo(MATE, 0, [], False, since=1.0, rests=True)
ELSEWHERE = MemberInfo(MATE, 1, [], False, since=1.0)


@pytest.mark.parametrize(
    ("mate", "kept"), [(BEHIND, 6), (HELPER, 1), (RESTS, 1), (ELSEWHERE, 1)], ids=["behind", "helper", "rests", "other"]
)
async def test_totals_are_kept_for_a_mate_that_is_behind_and_for_none_that_makes_no_steps(
    tmp_path: Path, mate: MemberInfo, kept: int
) -> None:
    scene = Scene(tmp_path, [ONE, mate])
    for step in range(6):
        scene.catching_up.keep(at(step), StepTotal(at(step + 1), np.ones(4, "float32")))
    assert scene.catching_up._totals is not None
    assert len(scene.catching_up._totals) == kept


@pytest.mark.parametrize("job", ["outline the state", "check the downloaded state", "state", "step"])
async def test_an_attempt_that_finds_no_memory_is_repeated_after_a_pause(
    tmp_path: Path, autojump_clock: MockClock, job: str
) -> None:
    scene = Scene(tmp_path, [ONE, MemberInfo(MATE, 0, [], True, since=1.0)])
    if job != "step":
        scene.joiner.model.vector_outline = lambda: TensorSpec("total", "float32", (400,))  # a state is fewer bytes
    left = [job]

    def fault(name: str) -> Exception | None:
        return NoMemory("none left") if name in left and not left.remove(name) else None  # type: ignore[func-returns-value]

    scene.joiner.faults = fault
    await scene.catch_up()
    failed = [event for event in scene.log.recent(50) if event["name"] == "stage.download_failed"]
    assert [event["reason"] for event in failed] == ["none left"]
    assert scene.joiner.changes == ["step" if job == "step" else "state"]


async def test_a_member_whose_parameters_are_of_another_step_than_thought_takes_a_whole_state(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    scene = Scene(tmp_path, [ONE, MemberInfo(MATE, 0, [], True, since=1.0)])
    scene.joiner.faults = lambda name: Stale("the call is at 3") if name == "step" else None
    await scene.catch_up()
    assert scene.joiner.changes == ["state"]


async def test_what_a_newcomer_has_not_read_is_copied_to_the_donors_folder_under_a_limit_of_memory(
    tmp_path: Path,
) -> None:
    scene, made = Scene(tmp_path, [ONE]), list[MakeRoom]()
    run = RunFile(run="x", limits=LimitsSection(memory_gb=100))
    cast(Any, scene.catching_up._services).run = run
    scene.joiner.model.freeze = made.append
    await scene.catching_up.freeze()
    room = made[0](4096)
    assert isinstance(room, StateRoom)
    assert room._is_file
