"""Totals that a stage peer keeps for others: how long, in how much memory, and when they lie in files."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import trio

from peerd.codec.tensors import state_digest
from peerd.log import EventLog
from peerd.messages.state import TensorSpec
from peerd.messages.swarm import MemberInfo, Position
from peerd.model import allocator
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import ModelSection, OptimizerSection, PipelineSection, RunFile
from peerd.state.catchup import catch_up, step_totals
from peerd.state.catchup.catch_up import CatchUp
from peerd.state.catchup.step_totals import StepTotal, StepTotals
from tests.worlds.network.hosts import keypair
from tests.worlds.simulation.clock import SimClock

COMPUTES = pytest.mark.no_watchdog("computes on the loop")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc, and hands pages back")
VALUES = 1000  # of a small total
STATE_VALUES = 10 * VALUES
BIG_BYTES = 32 << 20
RUN = RunFile(run="kept", model=ModelSection(d_model=16, heads=2, layers=1, context=8))


def at(step: int) -> Position:
    return Position(step, b"%d" % step)


def leap(step: int, values: int = VALUES) -> StepTotal:
    total = np.random.default_rng(step).standard_normal(values, np.float32)
    return StepTotal(at(step + 1), total, {"q": torch.full((3,), float(step))})


class Files:
    """A worker that computes at once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def run(self, job: Callable[[], Any], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        self.names.append(name)
        return job()


@dataclass
class Giving:
    """What others fetch from this peer. `in_use`: somebody fetches its state."""

    in_use: bool = False
    total_after: Any = None

    def offer(self, *_: object) -> None:
        pass

    def offer_named(self, run: bytes, stage: int, named: Any, worker: object) -> None:
        self.total_after = named

    def let_go(self) -> None:
        pass


@dataclass
class Donor:
    """A member of stage 0 that makes steps, and has a mate."""

    folder: Path
    run: RunFile = RUN
    files: Files = field(default_factory=Files)
    giving: Giving = field(default_factory=Giving)
    members: list[MemberInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = SimClock(1, "donor")
        host = SimpleNamespace(id=keypair("donor").peer_id)
        log = EventLog(clock)
        worker = {"files": self.files}.__getitem__
        ctx: Any = SimpleNamespace(log=log, data_dir=self.folder, clock=clock, worker=worker, host=host)
        snapshots = SimpleNamespace(giving=self.giving, totals=SimpleNamespace(), report=None)
        services: Any = SimpleNamespace(run=self.run, fingerprint=b"run", snapshots=lambda: snapshots)
        outline = [TensorSpec("param/w", "float32", (STATE_VALUES,))]
        joiner: Any = SimpleNamespace(model=SimpleNamespace(outline=lambda: outline), position=at(0), reached=None)
        self.catching = CatchUp(ctx, services, Files(), joiner, self)  # type: ignore[arg-type]
        self.catching.offer(0)
        self.mate_is(ready=True)

    def tell(self) -> None:
        pass

    def mate_is(self, *, ready: bool) -> None:
        """A peer of another stage is always behind, which is none of this stage's business."""
        self.members = [MemberInfo("mate", 0, [], ready, since=1.0), MemberInfo("other", 1, [], False, since=1.0)]

    def step(self, number: int) -> None:
        self.catching.keep(at(number), leap(number))

    async def kept(self) -> list[int]:
        """The steps whose totals others would get, with the values that they had."""
        found = []
        for number in range(20):
            if (told := await self.giving.total_after(at(number))) is not None:
                target, items = told
                assert target == at(number + 1)
                assert bytes(items[0].payload) == leap(number).total.tobytes()
                found.append(number)
        return found


@asynccontextmanager
async def donor(folder: Path, run: RunFile = RUN) -> AsyncIterator[Donor]:
    async with trio.open_nursery() as nursery:
        found = Donor(folder, run)
        nursery.start_soon(found.catching._tidy)
        yield found
        nursery.cancel_scope.cancel()


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("autojump_clock")
@pytest.mark.parametrize("beat_s", [0.0, 1.0, 2.9])
async def test_the_last_total_is_kept_for_a_mate_that_may_have_missed_the_step_and_then_given_up(
    tmp_path: Path, beat_s: float
) -> None:
    async with donor(tmp_path) as peer:
        await trio.sleep(beat_s)
        peer.step(0)
        await trio.sleep(catch_up._LATE_S)
        assert await peer.kept() == [0]
        await trio.sleep(catch_up._TIDY_S + 0.1)
        assert await peer.kept() == []


@pytest.mark.usefixtures("autojump_clock")
async def test_earlier_totals_go_with_the_next_step_while_nobody_is_behind(tmp_path: Path) -> None:
    async with donor(tmp_path) as peer:
        for number in range(3):
            peer.step(number)
        assert await peer.kept() == [2]
        assert peer.files.names == []


@pytest.mark.usefixtures("autojump_clock")
@pytest.mark.parametrize("fetched", [False, True])
async def test_totals_are_kept_while_a_mate_is_behind_or_fetches_our_state(tmp_path: Path, fetched: bool) -> None:
    async with donor(tmp_path) as peer:
        peer.mate_is(ready=fetched)
        peer.giving.in_use = fetched
        for number in range(3):
            peer.step(number)
        await trio.sleep(4 * catch_up._LATE_S)
        assert await peer.kept() == [0, 1, 2]
        peer.mate_is(ready=True)
        peer.giving.in_use = False
        await trio.sleep(catch_up._TIDY_S + 0.1)
        assert await peer.kept() == []


# --- in how much memory -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("autojump_clock")
async def test_the_room_for_totals_follows_the_memory_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, rooms = leap(0).nbytes, [3, 3, 3, 3, 1, 2]
    asked: list[int] = []

    def spare(run: RunFile, state_bytes: int, kept_bytes: int) -> int:
        assert state_bytes == 4 * STATE_VALUES
        asked.append(kept_bytes // each)
        return rooms[len(asked) - 1] * each

    monkeypatch.setattr(catch_up, "spare_bytes", spare)
    async with donor(tmp_path) as peer:
        peer.mate_is(ready=False)
        found = []
        for number in range(len(rooms)):
            peer.step(number)
            found.append(await peer.kept())
    assert found == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [4], [4, 5]]
    assert asked == [0, 1, 2, 3, 3, 1]  # those that were in memory then


@pytest.mark.usefixtures("autojump_clock")
async def test_each_total_but_the_newest_is_moved_to_a_file_once(tmp_path: Path) -> None:
    async with donor(tmp_path) as peer:
        peer.mate_is(ready=False)
        for number in range(3):
            peer.step(number)
        await trio.sleep(2 * catch_up._TIDY_S + 0.1)
        assert peer.files.names == ["write a total"] * 2
        peer.step(3)
        await trio.sleep(catch_up._TIDY_S)
        assert peer.files.names == ["write a total"] * 3
        assert await peer.kept() == [0, 1, 2, 3]


# --- files ------------------------------------------------------------------------------------------------------------


def kept_totals(count: int, values: int = VALUES) -> StepTotals:
    totals = StepTotals(1 << 40)
    for number in range(count):
        totals.keep(at(number), leap(number, values))
    return totals


@pytest.mark.parametrize("disk", ["there", "full", "missing"])
async def test_totals_that_were_moved_have_the_same_bits_whatever_the_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, disk: str
) -> None:
    def full(file: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if disk == "full":
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    folder = tmp_path / "none" if disk == "missing" else tmp_path
    totals, files = kept_totals(3), Files()
    newest = totals.after(at(2))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await totals.put_out(folder, files)
    assert files.names == ["write a total"] * 2
    assert caplog.text.count("it cannot be stored in") == (0 if disk == "there" else 2)
    assert totals.after(at(2)) is newest
    assert named(tmp_path) == []
    for number in range(3):
        found, expected = totals.after(at(number)), leap(number)
        assert found is not None
        assert found.target == expected.target
        assert [bytes(item.payload) for item in found.items()] == [bytes(item.payload) for item in expected.items()]


@COMPUTES
async def test_a_step_made_with_a_total_that_was_moved_ends_with_the_same_bits(tmp_path: Path) -> None:
    run = RunFile(
        run="kept",
        model=ModelSection(d_model=16, heads=2, layers=2, context=8),
        pipeline=PipelineSection(stages=1, microbatch=2),
        optimizer=OptimizerSection(name="adamw"),
    )
    plain, late = ServedStage(run, 0, "cpu"), ServedStage(run, 0, "cpu")
    totals = StepTotals(1 << 40)
    for number in range(2):
        made = leap(number, plain.module.layout.count)._replace(code={})
        made.make(plain, 8)
        totals.keep(at(number), made)
    await totals.put_out(tmp_path, Files())
    for number in range(2):
        found = totals.after(at(number))
        assert found is not None
        found.make(late, 8)
    assert state_digest(late.state()) == state_digest(plain.state())


def named(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def mapped(folder: Path) -> int:
    """Files of the folder that are mapped, those without a name as well."""
    gc.collect()
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@COMPUTES
@LINUX
@pytest.mark.slow
async def test_the_memory_of_totals_that_were_moved_is_free_again(tmp_path: Path) -> None:
    allocator.return_large_blocks()  # as a stage does when it starts: else the allocator may keep them for reuse
    totals = kept_totals(4, BIG_BYTES // 4)
    before = resident()
    await totals.put_out(tmp_path, Files())
    assert before - resident() > 2.5 * BIG_BYTES  # of three
    assert totals.memory_bytes < 1.01 * BIG_BYTES
    assert totals.nbytes > 4 * BIG_BYTES
    found = totals.after(at(1))
    assert found is not None
    assert np.array_equal(found.total, leap(1, BIG_BYTES // 4).total)


async def test_the_newest_total_leaves_the_memory_as_well_if_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = kept_totals(3)
    await totals.put_out(tmp_path, Files())
    assert totals.memory_bytes == leap(2).nbytes
    monkeypatch.setattr(step_totals, "WORTH_A_FILE_BYTES", 1)
    await totals.put_out(tmp_path, Files())
    assert totals.memory_bytes == 0
    found = totals.after(at(2))
    assert found is not None
    assert np.array_equal(found.total, leap(2).total)


@LINUX
async def test_a_file_goes_with_its_total_but_not_from_under_a_reader(tmp_path: Path) -> None:
    totals = kept_totals(4)
    await totals.put_out(tmp_path, Files())
    assert mapped(tmp_path) == 3
    totals.most_bytes = 3 * leap(0).nbytes
    totals.keep(at(4), leap(4))  # the two oldest make room
    assert mapped(tmp_path) == 1
    found = totals.after(at(2))
    assert found is not None
    payload = found.items()[0].payload
    del found
    totals.forget()
    assert mapped(tmp_path) == 1
    assert bytes(payload) == leap(2).total.tobytes()
    del payload
    assert mapped(tmp_path) == 0
