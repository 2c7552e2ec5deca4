"""Rooms for copies of a state and for residuals.

With a memory limit, a copy is stored in a file, or in spare memory if the disk cannot store it. A large residual is
stored in a file, too, except while rounds are short.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from peerd.core.errors import NoMemory
from peerd.model.stage import footprint
from peerd.run.runfile import LimitsSection, RunFile
from peerd.state.catchup.copy_room import room_for_copy, room_for_residual

MB = 1_000_000


def limited(gb: float) -> RunFile:
    return RunFile(run="tiny", limits=LimitsSection(memory_gb=gb))


@pytest.fixture(autouse=True)
def _holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_held_bytes", lambda: 500 * MB)


def test_without_a_limit_a_small_copy_goes_to_memory_and_a_large_one_to_a_file(tmp_path: Path) -> None:
    assert room_for_copy(limited(0), tmp_path, 3 * MB) is None
    room = room_for_copy(limited(0), tmp_path, 80 * MB)
    assert room is not None
    assert room._is_file
    assert room_for_copy(limited(0), tmp_path / "missing", 80 * MB) is None


def test_a_copy_that_the_machine_has_no_memory_for_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerd.state.catchup.copy_room.lacking_for_call", lambda *_: "no memory")
    room = room_for_copy(limited(0), tmp_path, 3 * MB)
    assert room is not None
    assert room._is_file
    with pytest.raises(NoMemory, match=r"takes 3\.0 MB, the machine has no memory left, and .*missing: No such file"):
        room_for_copy(limited(0), tmp_path / "missing", 3 * MB)


def test_under_a_limit_a_copy_goes_to_a_file(tmp_path: Path) -> None:
    room = room_for_copy(limited(10), tmp_path, 3 * MB)
    assert room is not None
    assert room._is_file
    assert len(room.row) == 3 * MB


def test_under_a_limit_and_without_a_disk_a_copy_goes_to_memory_that_is_surely_left(tmp_path: Path) -> None:
    assert room_for_copy(limited(0.6), tmp_path / "missing", 30 * MB) is None
    with pytest.raises(NoMemory, match=r"takes 40\.0 MB, limits\.memory_gb allows 0\.6 GB, and .*: No such file"):
        room_for_copy(limited(0.6), tmp_path / "missing", 40 * MB)


LARGE = 80 * MB


def test_a_large_residual_lies_in_a_file_unless_rounds_are_short_and_memory_is_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_file(gb: float, size: int, round_s: float) -> bool:
        room = room_for_residual(limited(gb), tmp_path, size, round_s)
        assert room is None or len(room.row) == size
        return room is not None and room._is_file

    assert not in_file(0, 3 * MB, 600)
    assert in_file(0, LARGE, math.inf)  # no round has ended yet
    assert in_file(0, LARGE, 90)
    assert not in_file(0, LARGE, 20)
    assert in_file(10, LARGE, 20)
    monkeypatch.setattr("peerd.state.catchup.copy_room.lacking_for_call", lambda *_: "no memory")
    assert in_file(0, LARGE, 20)


def test_a_disk_that_cannot_take_a_residual_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        room_for_residual(limited(0), tmp_path / "missing", LARGE, 90)
