"""A trainer's text while its source fails: the trainer waits longer and longer, and goes on with the same samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from peerd.core.errors import ConfigError
from peerd.core.work import read_at_once
from peerd.data.files.http_fetch import DataUnavailable
from peerd.log import EventLog
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.trainer.trainer_data import LONGEST_RETRY_S, RETRY_S, TrainerData
from peerd.role.role import RoleContext
from peerd.run.runfile import DataSection, ModelSection, PipelineSection, RunFile
from roles.trainer import TrainerRole
from tests.kit.runs import changed
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.simulation.clock import SimClock

T = TypeVar("T")
CODE = """
import os

def steady(split, seed):
    return (chr(65 + number % 26) * 9 for number in range(500))

def shaken(split, seed):
    for number, text in enumerate(steady(split, seed)):
        if number % 20 == 15 and os.path.exists("fails"):
            with open("asked", "a") as file:
                file.write("x")
            raise ConnectionError("reset")
        yield text
"""


def data_of(run: RunFile, folder: Path, reader: InlineWorker | None = None) -> tuple[TrainerData, EventLog]:
    log = EventLog(SimClock(1, "trainer"))
    folder.mkdir(exist_ok=True)
    ctx = SimpleNamespace(
        run=run,
        worker=lambda name: reader if reader is not None and name == "data" else InlineWorker(),
        read_in_turn=read_at_once,
        data_dir=folder,
        log=log,
        host=SimpleNamespace(id=SimpleNamespace(text="me")),
    )
    return TrainerData(cast(RoleContext, ctx)), log


class Reader(InlineWorker):
    """A worker that runs one job at a time; jobs named `held_up` block while `waits` is set."""

    def __init__(self, held_up: str = "take samples") -> None:
        self.waits, self._held_up, self._turn = False, held_up, trio.Lock()

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        async with self._turn:
            if self.waits and name == self._held_up:
                await trio.sleep_forever()
            return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)


def run_on(path: str, **data: object) -> RunFile:
    section = DataSection(path=path, holdout=0.0, shuffle_buffer=8, **data)  # type: ignore[arg-type]
    return RunFile(run="r", model=ModelSection(context=8), pipeline=PipelineSection(microbatch=4), data=section)


async def test_a_failing_source_is_asked_again_after_pauses_that_double(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    steady, _ = data_of(run_on("mine:steady", kind="dataset"), tmp_path / "steady")
    shaken, log = data_of(run_on("mine:shaken", kind="dataset"), tmp_path / "shaken")
    await steady.open()
    expected = [bytes((await steady.take()).tokens.payload) for _ in range(20)]
    (tmp_path / "fails").touch()
    found: list[bytes] = []

    async def take() -> None:
        await shaken.open()
        for _ in range(20):
            found.append(bytes((await shaken.take()).tokens.payload))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.sleep(RETRY_S * 100)
        assert shaken.problem == "data.path mine:shaken, document 15: the function raised ConnectionError: reset " + (
            f"({tmp_path / 'mine.py'}, line 12)"
        )
        assert len(found) < 20
        (tmp_path / "fails").unlink()
        await trio.sleep(LONGEST_RETRY_S)
    assert found == expected
    assert shaken.problem is None
    pauses = [event["again_in_s"] for event in log.recent(50) if event["name"] == "data.unavailable"]
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]


async def test_rows_left_out_are_told_once_and_when_they_have_doubled(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    good = '{"text": "0123456789abcdef"}\n'
    (tmp_path / "a.jsonl").write_text((good + "{}\n") * 40)
    data, log = data_of(run_on(str(tmp_path / "a.jsonl"), kind="jsonl"), tmp_path / "peer")
    await data.open()
    for _ in range(20):
        await data.take()
    assert data.skipped == 40
    told = [event for event in log.recent(50) if event["name"] == "data.rows_left_out"]
    assert 2 <= len(told) <= 6
    assert "a.jsonl, line " in str(told[0]["newest"])
    strict, _ = data_of(run_on(str(tmp_path / "a.jsonl"), kind="jsonl", strict=True), tmp_path / "strict")
    with pytest.raises(ConfigError, match="line 2: expected an object with text under 'text'"):
        await strict.open()


def files_of(folder: Path) -> Path:
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"text {number} " * 60)
    return folder


def damage(file: Path) -> None:
    file.write_bytes(b"PK\x03\x04" + b"x" * 400)  # as if it were a zip archive


async def test_the_position_is_saved_while_the_reader_waits_for_a_server(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    reader = Reader()
    data, _ = data_of(run_on(str(files_of(tmp_path / "texts"))), tmp_path / "peer", reader)
    await data.open()
    await data.take()
    reader.waits = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(data.take)
        await trio.sleep(1)
        with trio.fail_after(5):
            await data.save_position()
        nursery.cancel_scope.cancel()
    assert json.loads((tmp_path / "peer" / "r-position.json").read_text())["taken"] == 4


async def test_samples_are_taken_while_held_out_ones_wait_for_the_end_of_a_file(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    reader, run = Reader("take held-out samples"), run_on(str(files_of(tmp_path / "texts")))
    run = changed(run, data={"holdout": 0.1})
    data, _ = data_of(run, tmp_path / "peer", reader)
    await data.open()
    reader.waits = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(data.held_out)
        await trio.sleep(1)
        with trio.fail_after(5):
            taken = await data.take()
        assert taken.tokens.shape == (4, 8)
        nursery.cancel_scope.cancel()


async def test_a_problem_stays_until_the_job_that_has_it_succeeds(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = data_of(run_on(str(files_of(tmp_path / "texts"))), tmp_path / "peer")
    await data.open()
    down = True

    def held_out() -> list[Microbatch]:
        if down:
            raise DataUnavailable("the server is down")
        return []

    monkeypatch.setattr(data, "_take_held_out", held_out)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(data.held_out)
        await trio.testing.wait_all_tasks_blocked()
        await data.take()
        assert data.problem == "the server is down"
        down = False
    assert data.problem is None


async def test_a_trainer_that_leaves_says_goodbye_though_the_position_cannot_be_saved(
    autojump_clock: MockClock,
) -> None:
    done: list[str] = []

    async def note(what: str) -> None:
        done.append(what)

    role = object.__new__(TrainerRole)
    role.__dict__ |= {
        "_contributor": SimpleNamespace(hand_in=partial(note, "handed in"), say_goodbye=partial(note, "said goodbye")),
        "replica": SimpleNamespace(leave=partial(note, "left the stage")),
        "_data": SimpleNamespace(save_position=trio.sleep_forever),
    }
    with trio.fail_after(5):
        await role.leave()
    assert done == ["handed in", "left the stage", "said goodbye"]


async def test_a_position_in_a_file_that_is_damaged_now_begins_the_text_anew(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    texts = files_of(tmp_path / "texts")
    one, _ = data_of(run_on(str(texts)), tmp_path / "peer")
    await one.open()
    first = bytes((await one.take()).tokens.payload)
    for _ in range(39):
        await one.take()
    await one.save_position()
    place = json.loads((tmp_path / "peer" / "r-position.json").read_text())["place"]
    assert one._stream is not None
    (source,) = one._stream._streams
    damaged = Path(str(source._documents.files[source._order(place[0])[place[1]]]))
    damage(damaged)
    two, log = data_of(run_on(str(texts)), tmp_path / "peer")
    await two.open()
    (event,) = [event for event in log.recent(50) if event["name"] == "data.restarted"]
    assert damaged.name in str(event["reason"])
    assert bytes((await two.take()).tokens.payload) == first
