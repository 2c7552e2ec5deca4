"""One peer as a whole, over a simulated network in virtual time: supervision of roles, and stopping in order."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio
import trio.testing

from peerd.core.errors import ConfigError, PeerdError
from peerd.core.keys import Keypair
from peerd.daemon import daemon, launch
from peerd.daemon.control import socket
from peerd.daemon.control.connectivity import relaying
from peerd.daemon.daemon import Daemon, DaemonPlan, LocalResources
from peerd.log import EventLog
from peerd.role.peer_stack import peer_stack
from peerd.role.role import RoleContext
from peerd.run.home import socket_path
from peerd.run.runfile import LimitsSection, RunFile, fingerprint
from peerd.wire.tcp.rate_limit import LimitedLine
from tests.worlds.network.virtual import running_net, transport
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimNet

LISTEN = "/ip4/0.0.0.0/tcp/4001"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class Quiet:
    """Does nothing until it is stopped; notes what happens to it."""

    name: ClassVar[str] = "quiet"
    needs_run: ClassVar[bool] = False
    happened: ClassVar[list[str]]

    def __init_subclass__(cls) -> None:
        cls.happened = []

    def __init__(self, ctx: RoleContext) -> None:
        self.ctx = ctx
        self.happened.append("built")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            await self.work()
        finally:
            self.happened.append("ended")

    async def work(self) -> None:
        await trio.sleep_forever()

    async def leave(self) -> None:
        self.happened.append("left")

    def status(self) -> dict[str, object]:
        return {"waits_for": "somebody to talk to"}


class Peer:
    """A daemon in a test: its log, its signals, and how it ended."""

    def __init__(
        self,
        net: SimNet,
        name: str,
        home: Path,
        roles: tuple[type[Any], ...],
        listen: str = LISTEN,
        **more: Any,
    ) -> None:
        clock = SimClock(1, name)
        keypair = Keypair.generate(clock.secure_bytes)
        self.log = EventLog(clock)
        self.home = home
        home.mkdir(exist_ok=True)
        way = MemoryTransport(net, net.nodes[name]) if name in net.nodes else transport(net, name)
        settings: dict[str, Any] = {"run": None, "bootstrap": (), "listen": (listen,)}
        plan = DaemonPlan(roles=roles, data_dir=home, **settings | more)
        line = LimitedLine(LimitsSection(download_mbit=8))
        ground = LocalResources(home=home, keypair=keypair, clock=clock, log=self.log, line=line)
        self.daemon = Daemon(plan, ground, peer_stack(keypair, clock, [way]))
        self.press, self._signals = trio.open_memory_channel[int](4)
        self.ended = trio.Event()
        self.error: PeerdError | None = None

    async def run(self) -> None:
        try:
            await self.daemon.run(self._signals)
        except PeerdError as error:
            self.error = error
        except ExceptionGroup as group:
            found = daemon.leaf(group)
            assert isinstance(found, PeerdError)
            self.error = found
        finally:
            self.ended.set()

    def names(self) -> list[object]:
        return [event["name"] for event in self.log.recent()]


@contextlib.asynccontextmanager
async def peer(home: Path, *roles: type[Any]) -> AsyncIterator[Peer]:
    async with running_net() as net, trio.open_nursery() as nursery:
        one = Peer(net, "one", home / "one", roles)
        nursery.start_soon(one.run)
        yield one
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _no_hard_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort would end the test process."""
    monkeypatch.setattr(daemon, "_end_process_after", lambda *_: None)


async def test_a_signal_lets_roles_leave_before_they_are_cancelled(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Calm(Quiet):
        pass

    async with peer(tmp_path, Calm) as one:
        await trio.sleep(5)
        await one.press.send(signal.SIGINT)
        await one.ended.wait()
    assert Calm.happened == ["built", "left", "ended"]
    assert one.error is None
    assert one.names()[-2:] == ["daemon.stopping", "daemon.stopped"]
    assert not socket_path(one.home).exists()


@pytest.mark.thorough
async def test_what_a_role_fetches_by_itself_keeps_to_the_limits(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Fetching(Quiet):
        name = "fetching"
        took_s = 0.0

        async def work(self) -> None:
            began = trio.current_time()
            await trio.to_thread.run_sync(lambda: [self.ctx.read_in_turn(bytes, 4000) for _ in range(500)])
            Fetching.took_s = trio.current_time() - began

    async with peer(tmp_path, Fetching) as one:
        await one.ended.wait()
    assert Fetching.took_s > 1.8  # two megabytes, at one in a second


async def test_the_daemon_ends_when_all_roles_have_finished(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Brief(Quiet):
        name = "brief"

        async def work(self) -> None:
            await trio.sleep(3)

    class Longer(Quiet):
        name = "longer"

        async def work(self) -> None:
            await trio.sleep(8)

    async with peer(tmp_path, Brief, Longer) as one:
        before = trio.current_time()
        await one.ended.wait()
        assert 8 <= trio.current_time() - before < 9
    assert one.error is None
    assert Brief.happened == Longer.happened == ["built", "ended"]


async def test_a_role_that_fails_is_built_anew_after_growing_pauses_and_then_given_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Bad(Quiet):
        name = "bad"

        async def work(self) -> None:
            self.happened.append(str(round(trio.current_time() - began)))
            raise ValueError("boom")

    class Calm(Quiet):
        name = "calm"

    began = trio.current_time()
    async with peer(tmp_path, Bad, Calm) as one:
        await one.ended.wait()
    assert [text for text in Bad.happened if text.isdigit()] == ["0", "1", "3", "7", "15", "31"]
    assert str(one.error).startswith("role bad failed 6 times, last: ValueError: boom; details are in")
    assert "ValueError: boom" in (one.home / "failure.txt").read_text()
    assert Calm.happened == ["built", "left", "ended"], "the other role leaves well"


@pytest.mark.slow
async def test_a_role_that_ran_long_starts_again_with_the_first_pause(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Tired(Quiet):
        name = "tired"

        async def work(self) -> None:
            await trio.sleep(daemon.HEALTHY_S + 1)
            raise OSError("tired")

    async with peer(tmp_path, Tired) as one:
        await trio.sleep(20 * daemon.HEALTHY_S)
        assert not one.ended.is_set()
        pauses = {event["again_in_s"] for event in one.log.recent() if event["name"] == "role.failed"}
        assert pauses == {daemon.RESTART_PAUSES_S[0]}


async def test_wrong_configuration_found_by_a_role_stops_at_once_with_its_message(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Wrong(Quiet):
        name = "wrong"

        async def work(self) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep, 1)
                raise ConfigError("checkpoint x is damaged")

    async with peer(tmp_path, Wrong) as one:
        await one.ended.wait()
    assert isinstance(one.error, ConfigError)
    assert str(one.error) == "checkpoint x is damaged"
    assert Wrong.happened == ["built", "ended"]


async def test_a_role_that_does_not_leave_is_not_waited_for_long(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Stuck(Quiet):
        name = "stuck"

        async def leave(self) -> None:
            await trio.sleep_forever()

    async with peer(tmp_path, Stuck) as one:
        await trio.sleep(1)
        await one.press.send(signal.SIGTERM)
        before = trio.current_time()
        await one.ended.wait()
        assert trio.current_time() - before < daemon.DRAIN_S
    assert one.error is None
    assert "role.left_late" in one.names()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_role_that_saves_what_nobody_else_has_is_waited_for_unless_the_process_failed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    class Saves(Quiet):
        name = "saves"
        unsaved: str | None = None

        async def leave(self) -> None:
            self.unsaved = "saving step 7 of stage 0, which no other peer is known to have"
            await trio.sleep(100)
            self.unsaved = None
            self.happened.append("left")

    async with peer(tmp_path, Saves) as one:
        await trio.sleep(1)
        if fails:
            one.daemon._failure = ConfigError("it takes more memory than it may")
        await one.press.send(signal.SIGINT)
        await one.ended.wait()
    assert ("left" in Saves.happened) != fails
    assert ("role.left_late" in one.names()) == fails
    told = "saving step 7 of stage 0, which no other peer is known to have; press Ctrl+C again to stop without it"
    assert (told in capsys.readouterr().out) != fails


async def test_a_second_signal_stops_at_once(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    class Slow(Quiet):
        name = "slow"

        async def leave(self) -> None:
            await trio.sleep(5)
            self.happened.append("left")

    async with peer(tmp_path, Slow) as one:
        await trio.sleep(1)
        await one.press.send(signal.SIGINT)
        await trio.sleep(0.5)
        await one.press.send(signal.SIGINT)
        before = trio.current_time()
        await one.ended.wait()
        assert trio.current_time() - before < daemon.STOP_S
    assert "stopped at once by a second SIGINT" in str(one.error)
    assert "left" not in Slow.happened


async def test_a_role_whose_leave_and_status_fail_harms_nobody(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Rude(Quiet):
        name = "rude"

        async def leave(self) -> None:
            raise KeyError("no")

        def status(self) -> dict[str, object]:
            raise RuntimeError("not now")

    class Calm(Quiet):
        name = "calm"

    async with peer(tmp_path, Rude, Calm) as one:
        await trio.sleep(2)
        await one.press.send(signal.SIGINT)
        await one.ended.wait()
    assert one.error is None
    assert "role.leave_failed" in one.names()
    assert Calm.happened == ["built", "left", "ended"]


async def test_status_tells_each_role_and_what_it_waits_for(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Calm(Quiet):
        name = "calm"

    async with peer(tmp_path, Calm) as one:
        await trio.sleep(2)
        async with await trio.open_unix_socket(str(socket_path(one.home))) as stream:
            raw = b"".join([chunk async for chunk in stream])
        snapshot = socket.json.loads(raw)
    (role,) = snapshot["roles"]
    assert (role["role"], role["state"], role["waits_for"]) == ("calm", "running", "somebody to talk to")
    assert snapshot["peer"]["addrs"][0].endswith(snapshot["peer"]["id"])
    assert {"network", "dht", "rpc", "events", "uptime_s", "data_dir"} <= set(snapshot)
    assert "role.blocked" in [event["name"] for event in snapshot["events"]]


async def test_an_address_that_cannot_be_had_ends_the_start(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_net() as net:
        one = Peer(net, "one", tmp_path / "one", (Quiet,), listen="/ip4/203.0.113.9/tcp/1")
        await one.run()
    assert isinstance(one.error, ConfigError)
    assert "203.0.113.9" in str(one.error)


@pytest.mark.parametrize(
    ("role", "told", "carries"),
    [("backbone", None, True), ("backbone", False, False), ("stage", None, False), ("stage", True, True)],
)
def test_backbones_carry_others_circuits_and_whoever_is_told_to(
    role: str, told: bool | None, carries: bool, tmp_path: Path
) -> None:
    class Some(Quiet):
        name = role

    run = RunFile(run="r", limits=LimitsSection(relay=told, upload_mbit=100, download_mbit=40))
    plan = DaemonPlan(roles=(Some,), run=run, bootstrap=(), listen=(), data_dir=tmp_path)
    assert daemon._relays(plan) is carries
    assert relaying(run.limits).bytes_per_s == pytest.approx(0.9 * 40 * 125_000)
    assert fingerprint(run) == fingerprint(RunFile(run="r"))


class Counts(Quiet):
    """Has finished when it knows how many objects a full collection searches."""

    name = "counts"
    searched: ClassVar[int] = 0

    async def work(self) -> None:
        Counts.searched = len(gc.get_objects())


@pytest.mark.socket
def test_a_process_that_is_the_peers_own_never_searches_its_modules_for_garbage(tmp_path: Path) -> None:
    held = len(gc.get_objects())
    try:
        plan = DaemonPlan(roles=(Counts,), run=None, bootstrap=(), listen=(LOOPBACK,), data_dir=tmp_path)
        trio.run(launch.main, plan)
    finally:
        gc.unfreeze()
    assert 0 < Counts.searched < held / 4, "a full collection would stop the loop and every worker for long"
