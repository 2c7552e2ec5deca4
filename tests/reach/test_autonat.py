"""AutoNAT between real hosts on a simulated internet: the verdict is right, soon, and its consequences follow."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from peerd.core.addr import ip_of, parse_addr
from peerd.reach.autonat import AutoNat
from peerd.reach.messages.autonat_message import AUTONAT, DialRequest, DialResponse, DialStatus
from peerd.reach.reachability import Kind
from peerd.wire.host.host import Host
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.link.link_stream import Stream
from tests.worlds.network.internet import PORT, internet
from tests.worlds.simulation import nat as sim

pytestmark = pytest.mark.usefixtures("autojump_clock")


async def verdict(reach: AutoNat) -> tuple[Kind, float]:
    """The first verdict, and after how many seconds it came."""
    began, told = trio.current_time(), trio.Event()
    reach.on_change(lambda finding: told.set() if finding.kind != Kind.UNKNOWN else None)
    if reach.finding.kind == Kind.UNKNOWN:
        with trio.move_on_after(60):
            await told.wait()
    return reach.finding.kind, trio.current_time() - began


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("public", Kind.REACHABLE),
        ("full-cone", Kind.REACHABLE),
        ("port-restricted", Kind.KEEPS_PORTS),
        ("symmetric", Kind.SYMMETRIC),
        ("firewall", Kind.FIREWALL),
    ],
)
async def test_within_five_seconds_of_joining_the_verdict_is_right(kind: sim.Kind, expected: Kind) -> None:
    async with internet() as peers:
        for name in ("one", "two", "three"):
            await peers.judge(name)
        reach = await peers.judge("new", kind)
        await peers.join("new", "one", "two", "three")
        found, after_s = await verdict(reach)
        assert (found, after_s < 5.0) == (expected, True)
        host, outside = peers.hosts["new"], peers.homes["new"].router.outside
        assert host.speaks(AUTONAT) == (expected == Kind.REACHABLE)
        assert any(str(ip_of(addr)) == outside for addr in host.addrs()) == (expected == Kind.REACHABLE)
        assert [str(ip_of(addr)) for addr in host.whereabouts.candidates] == [outside] * (expected != Kind.SYMMETRIC)


async def test_a_forwarded_port_is_found_though_dials_leave_from_others() -> None:
    async with internet() as peers:
        for name in ("one", "two"):
            await peers.judge(name)
        reach = await peers.judge("new", "symmetric")
        peers.homes["new"].router.forward(PORT)
        await peers.join("new", "one", "two")
        assert (await verdict(reach))[0] == Kind.REACHABLE
        assert [str(addr) for addr in reach.finding.proven] == [peers.outside("new")]


async def test_the_backbone_learns_from_those_who_come_in_that_it_is_reachable() -> None:
    async with internet() as peers:
        backbone = await peers.judge("backbone")
        for name in ("one", "two"):
            await peers.start(name, kind="port-restricted")
            await peers.join(name, "backbone")
        assert (await verdict(backbone))[0] == Kind.REACHABLE


async def test_a_verdict_that_comes_and_goes_with_those_who_connect_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with internet() as peers:
        backbone, kinds = await peers.judge("backbone"), list[Kind]()
        backbone.on_change(lambda finding: kinds.append(finding.kind))
        with caplog.at_level(logging.INFO, logger="peerd.reach"):
            for name in ("one", "two", "three"):
                await peers.start(name, kind="port-restricted")
                await peers.join(name, "backbone")
                await trio.sleep(1)
                await peers.stop(name)
                await trio.sleep(120)
        told = [record.getMessage() for record in caplog.records if "reachability" in record.getMessage()]
    assert kinds == [Kind.REACHABLE, Kind.UNKNOWN] * 3
    assert told == ["reachability: reachable: peers from outside have connected"]


async def test_nobody_who_tests_leaves_the_verdict_open_with_its_reason() -> None:
    async with internet() as peers:
        await peers.start("one")
        reach = await peers.judge("new", "port-restricted")
        await peers.join("new", "one")
        await trio.sleep(10)
        assert (reach.finding.kind, reach.finding.needs_relays) == (Kind.UNKNOWN, True)
        assert "offers to test" in reach.finding.why


async def test_a_peer_that_stays_silent_or_talks_nonsense_does_not_hold_the_verdict_up() -> None:
    async def silent(stream: Stream) -> None:
        await trio.sleep_forever()

    async def nonsense(stream: Stream) -> None:
        await receive_message(stream, 4096)
        await send_message(stream, b"\x00\xff")

    async with internet() as peers:
        for name in ("one", "two", "three", "four"):
            await (peers.judge if name in ("three", "four") else peers.start)(name)
        peers.hosts["one"].handle(AUTONAT, silent)
        peers.hosts["two"].handle(AUTONAT, nonsense)
        reach = await peers.judge("new", "port-restricted")
        await peers.join("new", "one", "two", "three", "four")
        found, after_s = await verdict(reach)
        assert (found, after_s < 5.0) == (Kind.KEEPS_PORTS, True)


@pytest.mark.parametrize(("moves", "within_s"), [(False, 310), (True, 1)])
async def test_a_port_that_is_opened_is_noticed_at_the_next_look_or_when_the_machine_moves(
    moves: bool, within_s: float
) -> None:
    async with internet() as peers:
        for name in ("one", "two", "three"):
            await peers.judge(name)
        reach = await peers.judge("new", "port-restricted")
        await peers.join("new", "one", "two", "three")
        assert (await verdict(reach))[0] == Kind.KEEPS_PORTS
        peers.homes["new"].router.forward(PORT)
        if moves:
            peers.hosts["new"].whereabouts._relocations.unpark_all()
        await trio.sleep(within_s)
        assert reach.finding.kind == Kind.REACHABLE


async def ask(host: Host, other: Host, question: DialRequest) -> DialResponse:
    stream = await host.open_stream(other.id, AUTONAT)
    await send_message(stream, question.encode())
    return DialResponse.decode(await receive_message(stream, 4096))


async def test_the_server_dials_the_asker_and_nobody_else() -> None:
    async with internet() as peers:
        await peers.judge("server")
        await peers.start("victim")
        await peers.start("asker")
        await peers.join("asker", "server")
        asker, server, victim = (peers.hosts[name] for name in ("asker", "server", "victim"))
        bad = parse_addr(peers.outside("victim")).to_bytes()
        good = parse_addr(peers.outside("asker")).to_bytes()
        assert (await ask(asker, server, DialRequest(peer=asker.id, addrs=(bad,)))).status == DialStatus.DIAL_REFUSED
        assert (await ask(asker, server, DialRequest(peer=victim.id, addrs=(good,)))).status == DialStatus.BAD_REQUEST
        both = await ask(asker, server, DialRequest(peer=asker.id, addrs=(bad, good)))
        assert (both.status, both.addr) == (DialStatus.OK, good)
        assert len(victim.links) == 0
        statuses = [(await ask(asker, server, DialRequest(peer=asker.id, addrs=(good,)))).status for _ in range(8)]
        assert statuses[-1] == DialStatus.DIAL_REFUSED
