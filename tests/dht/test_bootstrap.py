"""Entry points: three of many are kept, whichever answer, and a full one is not asked over and over."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import trio
import trio.testing
from multiaddr import Multiaddr
from trio.testing import MockClock

from peerd.core.addr import split_peer, tcp_addr, with_peer
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.dht.bootstrap import KEPT, BootstrapPeers


def address(number: int) -> Multiaddr:
    keypair = Keypair(number.to_bytes(32, "big"))
    return with_peer(tcp_addr(f"9.9.{number}.1", 4001), keypair.peer_id)


class FakeHost:
    """Connects to every address but the dead ones, and loses connections when it is told to."""

    def __init__(self) -> None:
        self.id = Keypair(bytes(32)).peer_id
        self.dead: set[Multiaddr] = set()
        self.links: set[PeerId] = set()
        self.dialed: list[tuple[float, Multiaddr]] = []

    async def connect_addr(self, addr: Multiaddr) -> PeerId:
        await trio.lowlevel.checkpoint()
        self.dialed.append((trio.current_time(), addr))
        if addr in self.dead:
            raise Unreachable(f"{split_peer(addr)[0]}: connection refused")
        peer = split_peer(addr)[1]
        assert peer is not None
        self.links.add(peer)
        return peer

    def connected(self) -> set[PeerId]:
        return self.links

    def tries(self, addr: Multiaddr) -> list[float]:
        return [at for at, one in self.dialed if one == addr]


class Scene:
    def __init__(self, nursery: trio.Nursery, seed: int, addrs: list[Multiaddr], dead: list[Multiaddr]) -> None:
        self.host: Any = FakeHost()
        self.host.dead.update(dead)
        self.met = trio.Event()
        self.points = BootstrapPeers(self.host, lambda *_: self.met.set(), 1.0, 30.0, random.Random(seed))
        self.points.start(nursery, addrs)

    async def lose(self, peer: PeerId) -> None:
        self.host.links.discard(peer)
        self.points.lost(peer)
        await trio.testing.wait_all_tasks_blocked()

    async def connected(self) -> PeerId:
        """A peer that we are connected to, once there is one."""
        while not self.points.peers():
            self.met = trio.Event()
            await self.met.wait()
        return self.points.peers()[0]

    def states(self) -> dict[str, list[str]]:
        """Addresses by what the user sees of them."""
        found: dict[str, list[str]] = {"connected": [], "in reserve": [], "problem": []}
        for row in self.points.status():
            state = "connected" if row["connected"] else "in reserve" if row["in_reserve"] else "problem"
            found[state].append(row["addr"])
        return found


@asynccontextmanager
async def entries(seed: int, addrs: list[Multiaddr], dead: list[Multiaddr] | None = None) -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        yield Scene(nursery, seed, addrs, dead or [])
        nursery.cancel_scope.cancel()


TEN = [address(number) for number in range(1, 11)]


async def test_of_many_addresses_three_are_connected_and_each_peer_draws_its_own(autojump_clock: MockClock) -> None:
    drawn = set[str]()
    for seed in range(20):
        async with entries(seed, TEN) as scene:
            await trio.sleep(100)
            states = scene.states()
            assert [len(states[name]) for name in ("connected", "in reserve")] == [KEPT, 10 - KEPT]
            assert len(scene.host.dialed) == KEPT
            drawn.update(states["connected"])
    assert drawn == {str(addr) for addr in TEN}


async def test_where_some_do_not_answer_others_take_their_place_at_once(autojump_clock: MockClock) -> None:
    async with entries(1, TEN, dead=TEN[:6]) as scene:
        await trio.sleep(0.5)
        assert len(scene.states()["connected"]) == KEPT
        assert not scene.points.failed.is_set()
        await scene.lose(scene.points.peers()[0])
        await trio.sleep(40)
        assert len(scene.points.peers()) == KEPT


async def test_when_none_answers_every_address_is_tried_and_this_is_known(autojump_clock: MockClock) -> None:
    async with entries(1, TEN, dead=TEN) as scene:
        await trio.sleep(0.5)
        assert scene.points.failed.is_set()
        assert {addr for _, addr in scene.host.dialed} == set(TEN)
        scene.host.dead.clear()
        await trio.sleep(40)
        assert len(scene.points.peers()) == KEPT


async def test_a_connection_that_ends_at_once_is_sought_ever_more_rarely_and_one_that_stood_soon(
    autojump_clock: MockClock,
) -> None:
    only = TEN[0]
    async with entries(1, [only]) as scene:
        for _ in range(8):
            await scene.lose(await scene.connected())
        await scene.connected()
        pauses = [later - earlier for earlier, later in pairwise(scene.host.tries(only))]
        assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
        await trio.sleep(100)
        await scene.lose(await scene.connected())
        await trio.sleep(1.5)
        assert len(scene.host.tries(only)) == 10


async def test_our_own_address_counts_for_nothing(autojump_clock: MockClock) -> None:
    async with entries(1, [with_peer(tcp_addr("9.9.9.9", 1), Keypair(bytes(32)).peer_id)]) as scene:
        await trio.sleep(1)
        assert scene.host.dialed == []
        assert scene.points.settled.is_set()
        assert scene.points.reached.is_set()
