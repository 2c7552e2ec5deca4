"""Sets that a backbone keeps, without a network: whole ones only, over crashes; their schedule; invalid states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ConfigError
from peerd.messages.state import StateLayout
from peerd.messages.swarm import Position
from peerd.model.stage.served_stage import ServedStage, items_of
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.run.runfile import CheckpointSection, ModelSection, OptimizerSection, PipelineSection, RunFile
from peerd.state.catchup.validate import checked
from peerd.state.checkpoints.keeper import CheckpointKeeper
from peerd.state.snapshot import Fetched, StateItem
from peerd.state.state_room import StateRoom
from peerd.wire.budget.book import Book
from peerd.wire.clock import RealClock
from tests.worlds.machines.workers import InlineWorker

RUN = RunFile(
    run="kept",
    model=ModelSection(d_model=8, heads=2, layers=2, context=8),
    pipeline=PipelineSection(stages=2, microbatch=2),
    optimizer=OptimizerSection(name="sgd", total_steps=10),
    checkpoint=CheckpointSection(every_steps=4, keep=1),
)


def keeping(folder: Path, run: RunFile = RUN) -> CheckpointKeeper:
    nobody: Any = SimpleNamespace(id=None, gate=None, call=None, book=Book(), serve=lambda *_, **__: None)
    ctx = RoleContext(
        run=run,
        host=nobody,
        rpc=nobody,
        dht=nobody,
        clock=RealClock(seed=1),
        data_dir=folder,
        device="cpu",
        log=cast("Any", SimpleNamespace(event=lambda *_, **__: None)),
        worker=lambda _: InlineWorker(),
    )
    return CheckpointKeeper(ctx, RunServices(run, nobody, nobody, nobody, ctx.clock))


def states(step: int) -> dict[int, dict[str, torch.Tensor]]:
    return {stage: ServedStage(RUN, stage, "cpu").module.state() | {"step": torch.tensor(step)} for stage in range(2)}


def at(step: int, lineage: bytes = b"one") -> Position:
    return Position(step, lineage)


def names_in(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.rglob(pattern))


@pytest.mark.slow
@pytest.mark.no_watchdog("states are made, and files written, without a thread")
async def test_a_set_that_crashes_cut_short_costs_no_whole_one(tmp_path: Path) -> None:
    first = keeping(tmp_path)
    await first.open()
    assert await first._write(at(4), states(4))
    for step in (5, 6, 7):  # each of them got no further than the first stage
        crashed = keeping(tmp_path)
        await crashed.open()
        assert crashed.kept == [at(4)]
        await crashed._savings[0].save(at(step), states(step)[0])
        assert crashed.kept == [at(4)]
    last = keeping(tmp_path)
    await last.open()
    assert await last._write(at(8), states(8))
    assert (await last._savings[0].load(at(8)))["step"] == (await last._savings[1].load(at(8)))["step"] == 8
    assert names_in(tmp_path, "stage-0/*.json") == ["step-00000004.json", "step-00000008.json"]


@pytest.mark.slow
@pytest.mark.no_watchdog("states are made, and files written, without a thread")
async def test_sets_that_a_full_disk_cuts_short_cost_no_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeping(tmp_path)
    await kept.open()
    assert await kept._write(at(4), states(4))

    async def full(*_: object) -> None:
        raise ConfigError("No space left on device")

    monkeypatch.setattr(kept._savings[1], "save", full)
    for step in (5, 6, 7):
        with pytest.raises(ConfigError, match="No space left"):
            await kept._write(at(step), states(step))
        assert kept.kept == [at(4)]
    assert names_in(tmp_path, "step-*.json") == ["step-00000004.json"] * 2
    assert len(names_in(tmp_path, "*.safetensors")) == 2


@pytest.mark.slow
@pytest.mark.no_watchdog("states are made, and files written, without a thread")
async def test_a_list_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    kept = keeping(tmp_path)
    await kept.open()
    kept._list.path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"kept\.json: "):
        await kept._write(at(4), states(4))


@pytest.mark.slow
@pytest.mark.no_watchdog("states are made, and files written, without a thread")
async def test_two_branches_at_one_step_are_no_set(tmp_path: Path) -> None:
    first = keeping(tmp_path)
    await first.open()
    await first._savings[0].save(at(4, b"one"), states(4)[0])
    await first._savings[1].save(at(4, b"two"), states(4)[1])
    again = keeping(tmp_path)
    await again.open()
    assert again.kept == []
    assert not names_in(tmp_path, "*.safetensors")


class CountingRoom(StateRoom):
    """Room in a file that counts the bytes read or written."""

    count = 0

    def used(self, count: int) -> None:
        self.count += count
        super().used(count)


def fetched(folder: Path, stage: int, step: int) -> tuple[Fetched, CountingRoom]:
    """A fetched state, and the room that contains it."""
    items = [StateItem(*item) for item in items_of(states(step)[stage])]
    layout = StateLayout(items)
    room = CountingRoom(layout.total_bytes, folder, needs_file=True)
    views = layout.views(room.row)
    for item, view in zip(items, views, strict=True):
        view[:] = item.payload
    placed = [item._replace(payload=view) for item, view in zip(items, views, strict=True)]
    return Fetched(at(step), placed, room), room


@pytest.mark.no_watchdog("states are made, and files written, without a thread")
async def test_a_set_lies_in_files_while_it_is_fetched_checked_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, rooms = keeping(tmp_path), list[tuple[CountingRoom, int]]()
    await kept.open()
    for stage, fetcher in enumerate(kept._fetchers):
        assert (fetcher.folder, fetcher.needs_file) == (tmp_path, True)
        found, room = fetched(tmp_path, stage, 4)
        rooms.append((room, sum(item.payload.nbytes for item in found.items)))

        async def fetch(*_: object, found: Fetched = found) -> Fetched:
            await trio.lowlevel.checkpoint()
            return found

        monkeypatch.setattr(fetcher, "fetch", fetch)
    monkeypatch.setattr("peerd.model.stage.stage_module.build", None)  # the outline needs no stage to be built
    peer: Any = object()
    assert await kept._attempt(4, [[peer], [peer]]) == at(4)
    assert kept.kept == [at(4)]
    for stage, (room, size) in enumerate(rooms):
        assert room.count == 2 * size  # read once to check it and once to write it
        assert int((await kept._savings[stage].load(at(4)))["step"]) == 4


def test_what_is_no_state_of_its_step_is_refused() -> None:
    served = ServedStage(RUN, 0, "cpu")
    items = [StateItem(*item) for item in items_of(served.state())]
    assert checked(at(0), items).keys() == {item.name for item in items}
    with pytest.raises(ValueError, match="says it is of step 0"):
        checked(at(3), items)
    next(iter(served.module.state_views().values())).view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        checked(at(0), [StateItem(*item) for item in items_of(served.state())])


@pytest.mark.slow
@given(seen=st.lists(st.integers(0, 12), max_size=30), every=st.integers(0, 5), total=st.sampled_from([0, 10]))
def test_each_checkpoint_step_that_is_passed_is_kept_once(seen: list[int], every: int, total: int) -> None:
    run = RunFile(
        run="due",
        optimizer=OptimizerSection(name="sgd", total_steps=total),
        checkpoint=CheckpointSection(every_steps=every),
    )

    async def live() -> None:
        kept = keeping(Path("nowhere"), run)
        due = []
        for step in sorted(seen):
            if kept.due(step):
                due.append(step)
                kept._savings[0].positions.append(at(step))
        marks = [step // every if every else 0 for step in due if not total or step < total]
        assert marks == sorted(set(marks))
        assert every or not marks
        assert 0 not in due
        if total and any(step >= total for step in seen):
            assert due[-1] >= total

    trio.run(live)


async def test_the_step_that_a_run_ends_with_is_kept_once(autojump_clock: object) -> None:
    kept = keeping(Path("nowhere"), RunFile(run="loop", checkpoint=CheckpointSection(every_steps=50)))
    await trio.sleep(1.0)
    kept._savings[0].positions = [at(50), at(80)]  # the run once returned to a step before 80
    assert not kept.due(60)
    assert kept.due(60, 60)
    assert kept.due(58, 60), "trainers' records are older"
    kept._savings[0].positions.append(at(60))
    assert not kept.due(60, 60)
    assert not kept.due(58, 60)


async def test_attempts_that_fail_come_at_longer_and_longer_intervals(autojump_clock: object) -> None:
    kept, tried = keeping(Path("nowhere")), []
    begin = trio.current_time()
    for second in range(200):
        if kept.due(4 + second):
            tried.append(trio.current_time() - begin)
            assert await kept.keep(4 + second, [[], []]) is None
        await trio.sleep(1.0)
    assert tried == [0, 2, 6, 14, 30, 62, 122, 182]
