"""Links to stage-mates stand before the round in which they are needed, and long steps are let pass without them."""

from __future__ import annotations

from typing import Any, cast

import trio
from trio.testing import MockClock

from peerd.messages.swarm import Forecast, MemberInfo
from peerd.pipeline.preconnect import Preconnector
from peerd.rpc.rpc import Rpc
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.directory import Directory
from peerd.wire.host.host import Host
from tests.worlds.machines.fakehost import FakeHost, TrioClock, fake_net


class Trusting:
    """A directory that believes every list."""

    def learn_members(self, members: list[MemberInfo]) -> list[MemberInfo]:
        return members


def following(host: FakeHost) -> ConductorClient:
    return ConductorClient(Rpc(host, TrioClock()), host.id, cast(Directory, Trusting()))


class Net:
    """A host that counts dials."""

    takes_inbound = True

    def __init__(self, host: FakeHost) -> None:
        self.id, self.dialled, self.links = host.id, list[tuple[float, Any]](), list[Any]()

    def connected(self) -> list[Any]:
        return self.links

    async def connect(self, peer: Any) -> None:
        self.dialled.append((trio.current_time(), peer))
        await trio.sleep(0.2)
        self.links.append(peer)


async def test_in_a_grid_links_are_made_to_the_own_groups_only(autojump_clock: MockClock) -> None:
    async with fake_net() as net, trio.open_nursery() as nursery:
        hosts = sorted((net.host(f"peer {number}") for number in range(10)), key=lambda host: host.id.text)
        helper = hosts.pop()
        own, follows = Net(hosts[0]), following(hosts[0])
        nursery.start_soon(Preconnector(cast(Host, own), follows, group_size=3).run, 0)
        members = [MemberInfo(host.id.text, 0, [], host is not helper) for host in (*hosts, helper)]
        follows.note_members(members)
        await trio.sleep(10.0)
        assert sorted(peer.text for _, peer in own.dialled) == [hosts[i].id.text for i in (1, 2, 3, 6)]
        nursery.cancel_scope.cancel()


async def test_links_are_made_before_the_step_is_due(autojump_clock: MockClock) -> None:
    async with fake_net() as net, trio.open_nursery() as nursery:
        hosts = sorted((net.host(f"peer {number}") for number in range(4)), key=lambda host: host.id.text)
        own, follows = Net(hosts[0]), following(hosts[0])
        nursery.start_soon(Preconnector(cast(Host, own), follows).run, 1)
        began = trio.current_time()
        follows.note_forecast(Forecast(100.0, 103.0))
        follows.note_members([MemberInfo(host.id.text, int(host is not hosts[3]), [], True) for host in hosts])
        await trio.sleep(80.0)
        assert own.dialled == []
        follows.note_forecast(Forecast(20.0, 23.0))
        await trio.sleep(19.0)
        assert [peer for _, peer in own.dialled] == [hosts[1].id, hosts[2].id]  # of our stage only
        assert all(85.0 <= at - began <= 95.0 for at, _ in own.dialled)
        nursery.cancel_scope.cancel()


async def test_a_new_list_of_members_is_acted_on_at_once_when_nobody_knows_the_end(autojump_clock: MockClock) -> None:
    async with fake_net() as net, trio.open_nursery() as nursery:
        hosts = sorted((net.host(f"peer {number}") for number in range(2)), key=lambda host: host.id.text)
        own, follows = Net(hosts[0]), following(hosts[0])
        nursery.start_soon(Preconnector(cast(Host, own), follows).run, 0)
        await trio.sleep(0.5)
        follows.note_members([MemberInfo(host.id.text, 0, [], True) for host in hosts])
        began = trio.current_time()
        await trio.sleep(0.5)
        assert own.dialled == [(began, hosts[1].id)]
        nursery.cancel_scope.cancel()


async def test_a_forecast_is_counted_down_and_forgotten_with_its_conductor(autojump_clock: MockClock) -> None:
    async with fake_net() as net:
        follows = following(net.host("a"))
        assert follows.step_in_s is None
        follows.note_forecast(Forecast(5.0, 7.0))
        await trio.sleep(4.0)
        assert follows.forecast == Forecast(1.0, 3.0)
        await trio.sleep(4.0)
        assert follows.forecast == Forecast(0.0, 0.0)
        follows.note_forecast(None)
        assert follows.step_in_s is None
