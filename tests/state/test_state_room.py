"""Room for a state in a file holds what was written, whatever is put out of memory; without a disk it is memory."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from peerd.state.state_room import StateRoom


@pytest.mark.parametrize("in_file", [True, False])
def test_what_was_written_stays_when_it_is_put_out(tmp_path: Path, in_file: bool) -> None:
    room = StateRoom(100_000, tmp_path if in_file else None)
    assert len(room.row) == 100_000
    assert not any(room.row)
    room.row[:] = bytes(range(250)) * 400
    room.put_out()
    room.used(1 << 30)
    assert bytes(room.row) == bytes(range(250)) * 400
    assert list(tmp_path.iterdir()) == []  # nothing is left of it when the process ends


def test_a_folder_that_takes_nothing_is_named_and_memory_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        room = StateRoom(5000, tmp_path / "missing")
    assert "missing" in caplog.text
    room.row[:] = b"x" * 5000
    room.put_out()
    assert bytes(room.row) == b"x" * 5000


def test_a_room_that_needs_a_file_takes_no_memory_instead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(FileNotFoundError):
        StateRoom(5000, tmp_path / "missing", needs_file=True)
    assert caplog.text == ""
    assert StateRoom(5000, tmp_path, needs_file=True)._is_file


def test_a_state_without_a_byte_has_room() -> None:
    assert len(StateRoom(0).row) == 0


_WRITER = """
import sys, time
from pathlib import Path
from peerd.state.state_room import StateRoom
room = StateRoom(1 << 20, Path(sys.argv[1]))
room.row[:] = b"x" * (1 << 20)
room.put_out()
print(room._is_file, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_file_behind(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "True\n"
        finally:
            writer.kill()
    assert list(tmp_path.iterdir()) == []
