"""Nobody trains alone unawares: with a bootstrap given, a peer's part in a run begins once somebody was reached.

Whole daemons over a simulated network, in virtual time; the lines are what the user reads.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio
import trio.testing

from peerd.core.addr import parse_addr, split_peer
from peerd.core.errors import Unreachable
from peerd.core.keys import Keypair
from peerd.daemon import daemon
from peerd.daemon.control.company import CompanyConfig
from peerd.run.runfile import RunFile
from peerd.status.snapshot import StatusSnapshot, decode_status
from peerd.status.status_board import StatusBoard
from peerd.status.view.status_view import render
from tests.daemon.test_daemon import Peer, Quiet
from tests.status.view.test_view import plain_text
from tests.worlds.network.virtual import addr_of, running_net, transport
from tests.worlds.simulation.simnet import SimNet

RUN = RunFile(run="tiny")
NOBODY = Keypair.from_seed(b"n" * 32).peer_id


class Works(Quiet):
    """A part in the run."""

    name: ClassVar[str] = "works"
    needs_run: ClassVar[bool] = True


class Entry(Quiet):
    name: ClassVar[str] = "entry"


class Net:
    """Peers of one test, each with a machine of its own."""

    def __init__(self, net: SimNet, nursery: trio.Nursery, folder: Path) -> None:
        self.net, self._nursery, self._folder = net, nursery, folder
        self._scopes: dict[Peer, trio.CancelScope] = {}

    def made(self, name: str, *roles: type[Any], **more: Any) -> tuple[Peer, str]:
        """A peer whose machine is up, while it does not run yet; and its address."""
        peer = Peer(self.net, name, self._folder / name, roles or (Works,), **{"run": RUN} | more)
        return peer, f"{addr_of(self.net, name)}/p2p/{peer.daemon.host.id}"

    def start(self, peer: Peer) -> Peer:
        scope = self._scopes[peer] = trio.CancelScope()

        async def run() -> None:
            with scope:
                await peer.run()

        self._nursery.start_soon(run)
        return peer

    def kill(self, peer: Peer) -> None:
        self._scopes[peer].cancel()

    def closed(self, name: str) -> str:
        """The address of a machine that is up, and where nothing listens."""
        transport(self.net, name)
        return f"{addr_of(self.net, name)}/p2p/{NOBODY}"


@contextlib.asynccontextmanager
async def network(folder: Path) -> AsyncIterator[Net]:
    async with running_net() as net, trio.open_nursery() as nursery:
        yield Net(net, nursery, folder)
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_end_process_after", lambda *_: None)
    Works.happened.clear()


def reasons(peer: Peer, event: str) -> list[str]:
    return [str(found["reason"]) for found in peer.log.recent() if found["name"] == event]


async def snapshot(peer: Peer) -> dict[str, Any]:
    one = peer.daemon
    return await one._snapshot(StatusBoard((one.host, one.rpc, one.dht), one._clock, peer.log, None))


async def test_a_peer_that_reaches_no_bootstrap_waits_and_says_rarely_what_it_tried(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        one, _ = net.made("one", bootstrap=(net.closed("dead"), net.closed("other")))
        net.start(one)
        await trio.sleep(3)
        assert Works.happened == []
        (said,) = reasons(one, "company.missing")
        print(said)
        dead, other = (addr_of(net.net, name) for name in ("dead", "other"))
        assert said == (
            f"reached none of the 2 bootstrap addresses: {dead}: connection refused; {other}: connection refused; "
            "retrying; give --alone to begin without"
        )
        role = (await snapshot(one))["roles"][0]
        assert (role["state"], role["waits_for"]) == ("starting", said)
        await trio.sleep(600)
        assert 3 <= len(reasons(one, "company.missing")) <= 5
        assert not {"role.blocked", "role.started"} & set(one.names()), "one line says it"
        assert Works.happened == []


async def test_it_begins_once_a_bootstrap_answers(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with network(tmp_path) as net:
        entry, addr = net.made("entry", Entry)
        one, _ = net.made("one", bootstrap=(addr, net.closed("dead")))
        net.start(one)
        await trio.sleep(20)
        assert Works.happened == []
        net.start(entry)
        await trio.sleep(31)
        assert Works.happened == ["built"]
        assert reasons(one, "company.found") == ["reached another peer"]
        assert (await snapshot(one))["roles"][0]["state"] == "running"


async def test_with_a_bootstrap_that_answers_nothing_is_said_and_nothing_is_late(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        entry, addr = net.made("entry", Entry)
        net.start(entry)
        await trio.sleep(1)
        one, _ = net.made("one", bootstrap=(net.closed("dead"), addr))
        net.start(one)
        with trio.fail_after(0.5):
            await one.daemon.company.wait()
        await trio.sleep(0.01)
        assert Works.happened == ["built"]
        await trio.sleep(100)
        assert not {name for name in one.names() if str(name).startswith("company.")}


async def test_told_to_begin_alone_it_does(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with network(tmp_path) as net:
        one, _ = net.made("one", bootstrap=(net.closed("dead"),), company=CompanyConfig(alone=True))
        net.start(one)
        await trio.sleep(0.1)
        assert Works.happened == ["built"]
        await trio.sleep(100)
        assert not {name for name in one.names() if str(name).startswith("company.")}


async def test_the_first_peer_whose_file_names_itself_does_not_wait(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        for name, with_id in (("one", True), ("two", False)):
            Works.happened.clear()
            one, addr = net.made(name)
            own = addr if with_id else addr.partition("/p2p/")[0]
            one.daemon._plan = replace(one.daemon._plan, bootstrap=(own,))
            net.start(one)
            await trio.sleep(2)
            assert Works.happened == ["built"], name


async def test_peers_that_wait_are_company_for_each_other_where_one_reaches_the_other(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Both have a dead bootstrap; a neighbour's link, as the local network's discovery makes it, is what they have."""
    async with network(tmp_path) as net:
        dead = net.closed("dead")
        (one, addr), (two, _) = (net.made(name, bootstrap=(dead,)) for name in ("one", "two"))
        net.start(one)
        net.start(two)
        await trio.sleep(20)
        assert Works.happened == []
        bare, peer = split_peer(parse_addr(addr))
        assert peer is not None
        await two.daemon.host.connect(peer, [bare])
        two.daemon.dht.meet(peer, bare)
        await trio.sleep(10)
        assert Works.happened == ["built", "built"]


async def test_a_neighbour_of_another_run_is_no_company(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with network(tmp_path) as net:
        dead = net.closed("dead")
        one, addr = net.made("one", Works, run=RunFile(run="another"))
        two, _ = net.made("two", bootstrap=(dead,))
        net.start(one)
        net.start(two)
        await trio.sleep(5)
        assert Works.happened == ["built"]
        bare, peer = split_peer(parse_addr(addr))
        assert peer is not None
        await two.daemon.host.connect(peer, [bare])
        two.daemon.dht.meet(peer, bare)
        await trio.sleep(60)
        assert Works.happened == ["built"]


async def test_silence_is_told_of_before_the_time_for_an_answer_has_passed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        one, _ = net.made("one", bootstrap=(net.closed("hole"),))
        net.net.kill("hole", silent=True)
        hole = addr_of(net.net, "hole")
        net.start(one)
        await trio.sleep(6)
        (said,) = reasons(one, "company.missing")
        print(said)
        assert said.startswith(f"reached no peer at the bootstrap address {hole}: no answer yet; retrying")
        await trio.sleep(60)
        assert f"{hole}: no answer within" in reasons(one, "company.missing")[1]


async def test_patience_that_ends_is_an_error_that_names_what_was_tried(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        one, _ = net.made("one", bootstrap=(net.closed("dead"),), company=CompanyConfig(patience_s=7))
        await one.run()
        assert isinstance(one.error, Unreachable)
        print(one.error)
        tried = f"reached no peer at the bootstrap address {addr_of(net.net, 'dead')}: connection refused"
        assert str(one.error) == f"{tried}; waited for 7 s"
        assert Works.happened == []


async def test_a_signal_ends_the_wait(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with network(tmp_path) as net:
        one, _ = net.made("one", bootstrap=(net.closed("dead"),))
        net.start(one)
        await trio.sleep(20)
        await one.press.send(signal.SIGINT)
        with trio.fail_after(2):
            await one.ended.wait()
        assert one.error is None


async def test_who_loses_everybody_is_told_so_with_the_time_and_goes_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        entry, addr = net.made("entry", Entry)
        one, _ = net.made("one", bootstrap=(addr,))
        net.start(entry)
        net.start(one)
        await trio.sleep(10)
        assert (await snapshot(one))["alone"] is None
        net.kill(entry)
        await trio.sleep(40)
        lost = "lost the links to all other peers; continuing alone"
        assert reasons(one, "company.lost") == [lost]
        alone = (await snapshot(one))["alone"]
        print(alone)
        assert alone in [f"alone for {seconds} s: no other peer can be reached" for seconds in (37, 38, 39, 40)]
        assert plain_text(render(decode_status(await snapshot(one), StatusSnapshot))).startswith(alone), (
            "the first that the user sees"
        )
        assert Works.happened == ["built"]
        again, same = net.made("entry", Entry)
        assert same == addr
        net.start(again)
        await trio.sleep(40)
        assert (await snapshot(one))["alone"] is None
        assert reasons(one, "company.found") == ["reached another peer again"]


async def test_a_backbone_serves_without_company_and_warns(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with network(tmp_path) as net:
        one, _ = net.made("one", Entry, bootstrap=(net.closed("dead"),))
        net.start(one)
        await trio.sleep(20)
        assert "role.started" in one.names()
        (said,) = [event for event in one.log.recent() if event.get("part") == "network"]
        assert (said["name"], said["level"]) == ("role.blocked", "warn")
        assert "connection refused" in str(said["reason"])


async def test_a_backbone_whose_address_is_announced_says_that_one_to_newcomers(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    async with network(tmp_path) as net:
        outer = "/dns/backbone.example.org/tcp/31338"
        entry, _ = net.made("entry", Entry, announced=(outer,))
        net.start(entry)
        await trio.sleep(1)
        said = capsys.readouterr().out
        peer = entry.daemon.host.id
        assert f"announced as {outer}/p2p/{peer}" in said
        assert f"--bootstrap {outer}/p2p/{peer}" in said
        assert str(entry.daemon.host.addrs()[0]) == f"{outer}/p2p/{peer}"


async def test_a_peer_whose_clock_is_off_says_so_first(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with network(tmp_path) as net:
        entry, addr = net.made("entry", Entry)
        net.start(entry)
        await trio.sleep(1)
        one, _ = net.made("one", bootstrap=(addr,))
        clock = one.daemon._clock
        monkeypatch.setattr(clock, "skew_s", 3600.0)
        net.start(one)
        await trio.sleep(30)
        assert Works.happened == []
        (said,) = reasons(one, "company.missing")
        assert said.startswith("this machine's clock is 60 min ahead of that of the only peer that was compared: set")
        shown = plain_text(render(decode_status(await snapshot(one), StatusSnapshot)))
        assert shown.splitlines()[0].startswith("takes no part yet, waits for: this machine's clock is 60 min ahead")
        monkeypatch.setattr(clock, "skew_s", 0.0)
        await trio.sleep(30)
        assert Works.happened == ["built"]
