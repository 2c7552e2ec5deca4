"""A peer outside its hours, in virtual time: it leaves in order, rests, tells so, and comes back as the same peer."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console

from peerd.core.keys import Keypair
from peerd.daemon import daemon
from peerd.daemon.control import socket
from peerd.daemon.control.open_hours import OpenHours
from peerd.daemon.control.rester import Rester
from peerd.daemon.daemon import DaemonPlan
from peerd.daemon.launch import grounded, in_its_hours
from peerd.log import EventLog
from peerd.run import home
from peerd.run.runfile import LimitsSection
from peerd.status.snapshot import StatusSnapshot, decode_status
from peerd.status.view import status_view
from peerd.wire.clock import RealClock
from tests.daemon.test_daemon import Quiet
from tests.worlds.simulation.clock import EPOCH_S, SimClock

NOON_S = 12 * 3600.0
HOUR_S = 3600.0


class Night:
    """A peer with some minutes at night, from noon on; `press` sends it a signal."""

    def __init__(self, folder: Path, role: type[Any]) -> None:
        self.folder, self.role = folder, role
        self.press, self._signals = trio.open_memory_channel[int](4)
        self.ended = trio.Event()
        self.events: list[dict[str, Any]] = []

    async def run(self) -> None:
        limits = LimitsSection(hours="22:00-22:20")
        plan = DaemonPlan(
            roles=(self.role,), run=None, bootstrap=(), listen=(), data_dir=self.folder / "one", limits=limits
        )
        clock = SimClock(1, "one", skew_s=NOON_S - EPOCH_S % (24 * HOUR_S))
        hours = OpenHours(limits.hours, clock, lambda unix_s: int(unix_s // 60) % 1440)
        with grounded(plan, None) as ground:
            await in_its_hours(plan, dataclasses.replace(ground, clock=clock, hours=hours), self._signals)
            self.events = ground.log.recent()
        self.ended.set()

    @property
    def said(self) -> list[object]:
        return [event["name"] for event in self.events if str(event["name"]).startswith("daemon")]


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(daemon, "_end_process_after", lambda *_: None)


@contextlib.asynccontextmanager
async def night(folder: Path, role: type[Any]) -> AsyncIterator[Night]:
    one = Night(folder, role)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        yield one
        nursery.cancel_scope.cancel()


async def test_a_guest_works_in_its_hours_and_rests_outside_of_them(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Calm(Quiet):
        pass

    async with night(tmp_path, Calm) as one:
        await trio.sleep(9.9 * HOUR_S)
        assert Calm.happened == []
        await trio.sleep(0.2 * HOUR_S)
        assert Calm.happened == ["built"]
        await trio.sleep(0.4 * HOUR_S)
        assert Calm.happened == ["built", "left", "ended"]
        await trio.sleep(23.6 * HOUR_S)
        assert Calm.happened == ["built", "left", "ended", "built"]
        await one.press.send(signal.SIGINT)
        await one.ended.wait()
    assert Calm.happened[3:] == ["built", "left", "ended"]
    rest, night_, end = ["daemon.rests", "daemon.resumes"], ["daemon.stopping", "daemon.stopped"], []
    assert one.said == [*rest, *night_, *rest, *night_, *end]
    assert one.events[0]["until"] == "22:00"
    assert "rests until 22:00 (limits.hours 22:00-22:20)" in capsys.readouterr().out


async def test_a_guest_that_rests_ends_at_the_first_signal(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Idle(Quiet):
        pass

    async with night(tmp_path, Idle) as one:
        await trio.sleep(HOUR_S)
        await one.press.send(signal.SIGTERM)
        await one.ended.wait()
    assert Idle.happened == []


@pytest.mark.slow
async def test_a_signal_while_a_guest_leaves_for_the_day_ends_it_in_order(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Slow(Quiet):
        async def leave(self) -> None:
            await trio.sleep(3)
            self.happened.append("left")

    async with night(tmp_path, Slow) as one:
        await trio.sleep(10 * HOUR_S + 20 * 60 + 1)
        assert Slow.happened == ["built"]
        await one.press.send(signal.SIGINT)
        await one.ended.wait()
    assert Slow.happened == ["built", "left", "ended"]


async def test_status_of_a_guest_that_rests_says_until_when(tmp_path: Path) -> None:
    clock, limits = RealClock(), LimitsSection(hours="22:00-08:00")
    rester = Rester(
        home=home.make_private_dir(tmp_path / "one"),
        peer=Keypair.from_seed(b"o" * 32).peer_id,
        run="tiny",
        roles=["stage"],
        limits=limits,
        hours=OpenHours(limits.hours, clock, lambda unix_s: 12 * 60),
        log=EventLog(clock),
    )
    press, signals = trio.open_memory_channel[int](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rester.rest, signals)
        path = home.socket_path(tmp_path / "one")
        while not path.exists():
            await trio.lowlevel.checkpoint()
        found = await trio.to_thread.run_sync(socket.fetch, str(path))
        await press.send(signal.SIGINT)
    (role,) = found["roles"]
    assert (role["state"], role["waits_for"]) == ("resting", "22:00, when its hours begin (limits.hours)")
    assert found["limits"]["rests_until"] == "22:00"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_view.render(decode_status(found, StatusSnapshot)))
    shown = console.export_text()
    assert "resting" in shown
    assert "hours 22:00-08:00, rests until 22:00" in shown
