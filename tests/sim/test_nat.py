"""Every kind of router against every other: who ends up connected how, and how fast. Virtual time."""

from __future__ import annotations

import itertools

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.core.ids import PeerId
from peerd.wire.host.host import PeerUp
from peerd.wire.path_selection import PathKind
from tests.worlds.network.homes import Neighbourhood, Peer, neighbourhood
from tests.worlds.network.hosts import ask
from tests.worlds.simulation.nat import KINDS, Kind

MIXED = [pytest.param(pair, marks=pytest.mark.slow) for pair in ((False, True), (True, False))]
RESETS = [(False, False), (True, True), *MIXED]
CONES = ("firewall", "full-cone", "port-restricted")


def best_ways(a: Kind, b: Kind) -> set[str]:
    """The ways that `a` may end on after dialing `b` over a relay, which it need not do when `b` is public."""
    if a == "public":
        return {"direct"}
    if b == "public":
        return {"direct", "punched"}
    if "symmetric" not in (a, b) or "full-cone" in (a, b):
        return {"punched"}
    return {"relayed"}


def moves(a: Peer, b: Peer) -> list[tuple[float, PathKind]]:
    """The times at which `a` changes its link to `b`, each with the new way; a list that grows."""
    found: list[tuple[float, PathKind]] = []

    def note(peer: PeerId) -> None:
        link = a.host.links.best(peer)
        if link is not None and peer == b.host.id:
            found.append((trio.current_time(), link.way))

    a.host.when_moved(note)
    return found


async def meeting(around: Neighbourhood, kinds: tuple[Kind, Kind], resets: tuple[bool, bool]) -> tuple[Peer, Peer]:
    a = await around.peer("a", kinds[0], resets=resets[0])
    b = await around.peer("b", kinds[1], resets=resets[1])
    for peer in (a, b):
        await around.settle(peer)
    return a, b


@pytest.mark.parametrize("resets", RESETS, ids=str)
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
async def test_each_pair_ends_on_the_best_way_there_is(
    autojump_clock: Clock, kinds: tuple[Kind, Kind], resets: tuple[bool, bool]
) -> None:
    async with neighbourhood() as around:
        a, b = await meeting(around, kinds, resets)
        ways, began = moves(a, b), trio.current_time()
        with a.host.watch() as events:
            await around.meet(a, b)
            await trio.sleep(25)
            way = a.host.traffic().peers[b.host.id].way
            assert way in best_ways(*kinds)
            assert b.host.traffic().peers[a.host.id].way == way
            assert ways[0][1] == PathKind.RELAYED
            if set(kinds) <= set(CONES):
                assert ways[1][0] - began < 3
            assert await ask(a.host, b.host, b"there") == b"there"
            assert await ask(b.host, a.host, b"back") == b"back"
            await trio.sleep(30)
            assert len([link for link in a.host.links if link.peer == b.host.id]) == 1
            assert await events.receive() == PeerUp(b.host.id)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()
