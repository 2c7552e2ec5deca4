"""Contributions of a peer: counted, kept over restarts, published now and then, and never a reason to fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Unreachable
from peerd.core.ids import Key
from peerd.dht.dht import Dht
from peerd.messages.contributions import Contributed, contributions_key, decode_contributed
from peerd.swarm.contributions import ContributionOf, ContributionTally
from tests.worlds.machines.fakehost import TrioClock
from tests.worlds.machines.workers import InlineWorker


class Directory:
    """Notes what is put."""

    def __init__(self) -> None:
        self.puts: list[Contributed] = []
        self.fails = False

    async def put(self, key: Key, value: bytes, *, ttl_s: float, suffix: bytes) -> int:
        await trio.lowlevel.checkpoint()
        assert (key, suffix, ttl_s > 60) == (contributions_key("tiny"), b"stage", True)
        if self.fails:
            raise Unreachable("nobody is there")
        self.puts.append(decode_contributed(value))
        return 1


def tally(directory: Directory, file: Path | None = None) -> ContributionTally:
    return ContributionTally(
        ContributionOf("tiny", "stage", file, InlineWorker()), cast(Dht, directory), TrioClock(), None
    )


async def test_totals_are_published_now_and_then_also_after_the_directory_failed(autojump_clock: MockClock) -> None:
    directory = Directory()
    mine = tally(directory)
    async with trio.open_nursery() as nursery:
        mine.add(samples=2, bytes_aggregated=10)
        nursery.start_soon(mine.run)
        await trio.sleep(0.5)
        for _ in range(59):
            mine.add(samples=2, bytes_aggregated=10)
            await trio.sleep(1)
        assert [told.samples for told in directory.puts] == [2, 42, 82]
        assert [told.seconds for told in directory.puts] == [0, 20, 40]
        assert directory.puts[-1].bytes_aggregated == 410
        directory.fails = True
        await trio.sleep(20)
        assert len(directory.puts) == 3
        directory.fails = False
        await trio.sleep(20)
        assert directory.puts[-1].samples == 120
        nursery.cancel_scope.cancel()


async def test_totals_outlive_the_process(autojump_clock: MockClock, tmp_path: Path) -> None:
    directory, file = Directory(), tmp_path / "given.json"
    first = tally(directory, file)
    await trio.sleep(100)
    first.add(samples=5, bytes_aggregated=7)
    await first.publish()
    await trio.sleep(1000)
    second = tally(directory, file)
    second.add(samples=1)
    await second.publish()
    assert second.samples == 6
    assert (directory.puts[-1].bytes_aggregated, directory.puts[-1].seconds) == (7, 100)
    assert directory.puts[-1].since == directory.puts[0].since
    assert os.listdir(tmp_path) == ["given.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"tiny": 1}', '{"tiny": {"samples": "x", "bytes": 0, "s": 0, "since": 0}}', "[" * 99999]
)
async def test_a_file_that_makes_no_sense_costs_the_past_and_no_more(
    autojump_clock: MockClock, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "given.json"
    file.write_text(text)
    directory: Any = Directory()
    mine = tally(directory, file)
    mine.add(samples=1)
    await mine.publish()
    assert directory.puts[-1].samples == 1
    assert tally(directory, file).samples == 1
    unwritable = tally(directory, tmp_path / "nowhere" / "given.json")
    unwritable.add(samples=3)
    await unwritable.publish()
    assert directory.puts[-1].samples == 3


async def test_a_disk_that_takes_nothing_is_named_once_and_nothing_is_left_on_it(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "given.json"
    mine = tally(Directory(), file)
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(os, "replace", full)
        for _ in range(3):
            await mine.publish()
    said = f"contributions could not be saved: {file} can't be written: No space left on device"
    assert caplog.messages == [said]
    assert os.listdir(tmp_path) == []
    await mine.publish()
    assert os.listdir(tmp_path) == ["given.json"]
