"""Peers that nobody can dial are reached over relays all the same, also when a relay is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from peerd.core.addr import is_relayed, parse_addr, with_peer
from peerd.core.ids import Key
from peerd.reach.messages.circuit_message import HOP
from peerd.reach.reachability import Kind
from peerd.swarm.directory import Directory
from peerd.wire.path_selection import PathKind
from tests.worlds.network.hosts import ask, echo
from tests.worlds.network.internet import Peers, internet
from tests.worlds.simulation import nat as sim

pytestmark = pytest.mark.usefixtures("autojump_clock")


async def until(true: Callable[[], bool], within_s: float) -> float:
    """Seconds until it was so."""
    began = trio.current_time()
    with trio.fail_after(within_s):
        while not true():  # noqa: ASYNC110  a look at several hosts at once, in virtual time
            await trio.sleep(0.05)
    return trio.current_time() - began


def circuits(peers: Peers, name: str) -> list[str]:
    return [str(addr) for addr in peers.hosts[name].addrs() if is_relayed(addr)]


async def backbones(peers: Peers, count: int = 2) -> list[str]:
    names = [f"backbone{number}" for number in range(count)]
    for number, name in enumerate(names):
        await peers.join_swarm(name, "public", *names[:number], relay=True)
    return names


@pytest.mark.parametrize("kind", ["port-restricted", "symmetric", "firewall"])
async def test_an_unreachable_peer_soon_holds_places_at_two_relays_and_is_reached_over_them(kind: sim.Kind) -> None:
    async with internet() as peers:
        relays = await backbones(peers)
        ways = await peers.join_swarm("new", kind, *relays)
        assert await until(lambda: len(ways.reserving.relays) == 2, 5.0) < 5.0
        await until(lambda: ways.reach.finding.kind not in (Kind.UNKNOWN, Kind.REACHABLE), 5.0)
        new = peers.hosts["new"]
        places = {peers.homes[name].router.outside for name in relays}
        assert {addr.split("/")[2] for addr in circuits(peers, "new")} == places
        assert new.takes_inbound
        assert set(ways.status()["relays"]) == {str(peers.hosts[name].id) for name in relays}
        new.handle("/echo/1", echo)
        other = await peers.join_swarm("other", "symmetric", *relays)
        peers.hosts["other"].learn(new.id, new.addrs())
        assert await ask(peers.hosts["other"], new, b"hello") == b"hello"
        link = peers.hosts["other"].links.best(new.id)
        assert link is not None
        assert link.way == PathKind.RELAYED
        assert other.reach.finding.kind in (Kind.UNKNOWN, Kind.SYMMETRIC)


async def test_a_lost_relay_is_replaced_at_once_and_the_peer_stays_reachable() -> None:
    async with internet() as peers:
        relays = await backbones(peers, 3)
        ways = await peers.join_swarm("new", "port-restricted", *relays)
        await until(lambda: len(ways.reserving.relays) == 2, 5.0)
        new = peers.hosts["new"]
        lost = next(name for name in relays if peers.hosts[name].id in ways.reserving.relays)
        await peers.stop(lost)
        await until(lambda: peers.hosts[lost].id not in new.connected(), 5.0)
        assert await until(lambda: len(ways.reserving.relays) == 2, 5.0) < 2.0
        assert new.takes_inbound
        assert all(peers.homes[lost].router.outside not in addr for addr in circuits(peers, "new"))


async def test_a_restarted_relay_is_asked_again_though_the_old_link_to_it_has_not_ended() -> None:
    """As where another path to it was looked for; it does not know of the place that it gave before."""
    async with internet() as peers:
        await backbones(peers, 1)
        ways = await peers.join_swarm("new", "port-restricted", "backbone0")
        await until(lambda: len(ways.reserving.relays) == 1, 5.0)
        new = peers.hosts["new"]
        new.handle("/echo/1", echo)
        await peers.join_swarm("restarted", "public", relay=True, key="backbone0")
        relay = peers.addr("restarted")
        link = await new.dial_at(parse_addr(peers.outside("restarted")), peers.hosts["backbone0"].id)
        assert new.links.best(link.peer) is link
        assert len(new.links.to(link.peer)) == 2
        await peers.join_swarm("other", "symmetric", "restarted")
        other = peers.hosts["other"]
        other.learn(new.id, [with_peer(parse_addr(f"{relay}/p2p-circuit"), new.id)])
        assert await ask(other, new, b"hello") == b"hello"
        assert any(peers.homes["restarted"].router.outside in addr for addr in circuits(peers, "new"))


@pytest.mark.slow
async def test_without_any_relay_a_peer_only_dials_until_one_comes() -> None:
    async with internet() as peers:
        await peers.join_swarm("plain", "public")
        await peers.join_swarm("other", "public", "plain")
        ways = await peers.join_swarm("new", "symmetric", "plain", "other")
        new = peers.hosts["new"]
        took_s = await until(lambda: not new.takes_inbound, 60.0)
        assert took_s > 10.0
        assert "only by connecting" in ways.status()["advice"]
        await peers.join_swarm("relay", "public", "plain", relay=True)
        await until(lambda: new.takes_inbound, 120.0)
        assert [str(peers.hosts["relay"].id)] == ways.status()["relays"]


@pytest.mark.slow
async def test_places_are_renewed_for_as_long_as_they_are_needed() -> None:
    async with internet() as peers:
        relays = await backbones(peers)
        ways = await peers.join_swarm("new", "port-restricted", *relays)
        await until(lambda: len(ways.reserving.relays) == 2, 5.0)
        ends = [place.expires_at for place in ways.circuits.reservations.values()]
        await trio.sleep(max(ends) - trio.current_time() + 60.0)
        assert len(ways.reserving.relays) == 2


async def test_reachable_peers_and_whole_networks_without_an_outside_need_no_relay() -> None:
    async with internet() as peers:
        relays = await backbones(peers, 3)
        await trio.sleep(30)
        assert [peers.ways[name].reserving.relays for name in relays] == [[], [], []]
        assert all(peers.ways[name].reach.finding.kind == Kind.REACHABLE for name in relays)


@pytest.mark.slow
async def test_peers_behind_routers_use_the_directory_without_serving_it_also_when_a_backbone_dies() -> None:
    async with internet() as peers:
        relays = await backbones(peers)
        for name in ("one", "two"):
            await peers.join_swarm(name, "port-restricted", *relays)
        await trio.sleep(20)
        ids = {peers.hosts[name].id for name in relays}
        assert all(set(peers.dhts[name].contacts()) <= ids for name in ("one", "two", *relays))
        key = Key.of("somewhere")
        assert await peers.dhts["one"].put(key, b"record", ttl_s=600.0) == 3  # both, and itself
        await peers.stop(relays[0])
        await trio.sleep(10)
        assert [record.value for record in await peers.dhts["two"].get(key)] == [b"record"]
        assert await peers.dhts["two"].put(key, b"other", ttl_s=600.0) >= 1
        assert len(await peers.dhts["one"].get(key)) == 2


async def test_a_peer_that_turns_out_to_be_unreachable_leaves_the_tables_of_others() -> None:
    async with internet() as peers:
        relays = await backbones(peers)
        await peers.join_swarm("walled", "firewall", *relays)
        walled = peers.hosts["walled"]
        await until(lambda: peers.ways["walled"].reach.finding.kind == Kind.FIREWALL, 10.0)
        assert not [addr for addr in walled.addrs() if not is_relayed(addr)]
        await trio.sleep(120)
        assert [walled.id in peers.dhts[name].contacts() for name in relays] == [False, False]
        assert all(peers.hosts[name].speaks(HOP) for name in relays)


@pytest.mark.slow
async def test_whoever_publishes_our_addresses_hears_at_once_that_they_have_changed() -> None:
    async with internet() as peers:
        relays = await backbones(peers)
        await peers.join_swarm("new", "port-restricted")
        new, changed = peers.hosts["new"], list[list[str]]()
        directory = Directory("run", 1, new, peers.dhts["new"])

        async def note() -> None:
            while True:
                await directory.moved_or(trio.Event())
                changed.append([addr for addr in directory.own_addrs() if "/p2p-circuit" in addr])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note)
            await trio.testing.wait_all_tasks_blocked()
            await peers.join("new", *relays)
            await until(lambda: len(peers.ways["new"].reserving.relays) == 2, 5.0)
            await trio.testing.wait_all_tasks_blocked()
            assert [len(addrs) for addrs in changed] == [1, 2]
            await peers.stop(relays[0])
            await until(lambda: len(peers.ways["new"].reserving.relays) == 1, 5.0)
            await trio.testing.wait_all_tasks_blocked()
            assert len(changed[-1]) == 1
            nursery.cancel_scope.cancel()


async def test_the_wait_for_new_addresses_ends_with_the_other_event_too() -> None:
    async with internet() as peers:
        await peers.join_swarm("one", "public")
        event = trio.Event()
        event.set()
        directory = Directory("run", 1, peers.hosts["one"], peers.dhts["one"])
        with trio.fail_after(1.0):
            await directory.moved_or(event)
        assert event.is_set()
