"""The control socket gives one snapshot to this user, and tells plainly when there is no daemon."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.core.errors import ConfigError, PeerdError
from peerd.daemon.control import socket
from peerd.run import home

pytestmark = pytest.mark.socket


@pytest.fixture(autouse=True)
def _own_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@contextlib.asynccontextmanager
async def daemon(data_dir: Path) -> AsyncIterator[Path]:
    """Something that answers as a daemon in `data_dir` would."""
    path = home.socket_path(home.make_private_dir(data_dir))

    async def snapshot() -> dict[str, Any]:
        return {"pid": os.getpid(), "data_dir": str(data_dir)}

    async with trio.open_nursery() as nursery:
        await nursery.start(socket.serve, path, snapshot)
        with home.noted(home.RunningDaemon(os.getpid(), str(data_dir), str(path), "tiny", ["stage"])):
            yield path
        nursery.cancel_scope.cancel()


async def ask(data_dir: Path | None) -> dict[str, Any]:
    return await trio.to_thread.run_sync(socket.ask, data_dir)


async def test_a_daemon_is_found_by_its_directory_and_when_it_is_the_only_one(tmp_path: Path) -> None:
    async with daemon(tmp_path / "a") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await ask(tmp_path / "a"))["pid"] == os.getpid()
        assert (await ask(None))["data_dir"] == str(tmp_path / "a")
    assert not path.exists()


async def test_several_daemons_are_listed_with_the_option_that_chooses(tmp_path: Path) -> None:
    async with daemon(tmp_path / "a"), daemon(tmp_path / "b"):
        with pytest.raises(ConfigError, match=r"2 daemons are running; choose one:\n.*--data-dir .*/a\n.*/b"):
            await ask(None)
        assert (await ask(tmp_path / "b"))["data_dir"] == str(tmp_path / "b")


def test_no_daemon_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(PeerdError, match="no peerd daemon of this user is running; start one with"):
        socket.ask(None)
    with pytest.raises(PeerdError, match=f"no peerd daemon is running in {tmp_path}"):
        socket.ask(tmp_path)
    with pytest.raises(ConfigError, match="there is no data directory"):
        socket.ask(tmp_path / "nowhere")


async def test_the_note_of_a_daemon_that_died_is_forgotten(tmp_path: Path) -> None:
    dead = home.RunningDaemon(1, str(tmp_path / "dead"), str(tmp_path / "dead.sock"), "tiny", ["stage"])
    home.runtime_dir()
    with home.noted(dead):
        async with daemon(tmp_path / "a"):
            assert (await ask(None))["data_dir"] == str(tmp_path / "a")
        assert home.notes() == []


async def test_a_caller_that_does_not_read_is_dropped_and_others_are_answered(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "s"
    big = {"text": "x" * (4 << 20)}

    async def snapshot() -> dict[str, Any]:
        return big

    async with trio.open_nursery() as nursery:
        await nursery.start(socket.serve, path, snapshot)
        silent = [await trio.open_unix_socket(str(path)) for _ in range(socket.CALLERS)]
        await trio.sleep(socket.ANSWER_TIMEOUT_S + 1)
        async with await trio.open_unix_socket(str(path)) as caller:
            assert len(await caller.receive_some(1 << 16)) > 0
        for stream in silent:
            await stream.aclose()
        nursery.cancel_scope.cancel()
