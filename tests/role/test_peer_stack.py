"""Host, calls and DHT of a peer, put together and run by one call each."""

from __future__ import annotations

import trio
import trio.testing

from peerd.core.ids import Key
from peerd.messages.encoding import Empty
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.rpc.rpc import Answer, Incoming
from tests.kit.declared import ANY
from tests.worlds.network.hosts import keypair
from tests.worlds.network.virtual import addr_of, running_net, transport
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.simnet import SimNet

KEY = Key.of("run/stage/0")


def stack(net: SimNet, name: str) -> PeerStack:
    return peer_stack(keypair(name), SimClock(1, name), [transport(net, name)])


async def test_two_stacks_find_each_others_records(autojump_clock: trio.testing.MockClock) -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        a, b = stack(net, "a"), stack(net, "b")
        await nursery.start(a.run, [addr_of(net, "a")], [])
        await nursery.start(b.run, [addr_of(net, "b")], a.host.addrs())
        await b.dht.put(KEY, b"here", ttl_s=60)
        assert [record.value for record in await a.dht.get(KEY)] == [b"here"]
        nursery.cancel_scope.cancel()


async def test_without_a_way_in_named_only_calls_are_served(autojump_clock: trio.testing.MockClock) -> None:
    async def answer(call: Incoming[Empty]) -> Answer[Empty]:
        return Answer(Empty())

    async with running_net() as net, trio.open_nursery() as nursery:
        a, b = stack(net, "a"), stack(net, "b")
        a.rpc.serve("t/1/ask", Empty, answer, declared=ANY)
        await nursery.start(a.run, [addr_of(net, "a")])
        await nursery.start(b.run)
        peer = await b.host.connect_addr(a.host.addrs()[0])
        assert peer == a.host.id
        await b.rpc.call(peer, "t/1/ask", Empty(), Empty, timeout_s=5)
        assert not any(protocol.startswith("/peerd/dht/") for protocol in a.host.protocols())
        nursery.cancel_scope.cancel()
