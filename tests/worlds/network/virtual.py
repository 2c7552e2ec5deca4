"""Two or more bare nodes on a running SimNet, for tests that need links and no hosts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr
from tests.worlds.simulation.memory import MemoryLink, MemoryTransport
from tests.worlds.simulation.simnet import NetConfig, SimLine, SimNet


@contextlib.asynccontextmanager
async def running_net(config: NetConfig | None = None, *, seed: int = 1) -> AsyncIterator[SimNet]:
    """A SimNet whose task runs inside the block."""
    net = SimNet(seed, config)
    async with trio.open_nursery() as nursery:
        await nursery.start(net.run)
        yield net
        nursery.cancel_scope.cancel()


def transport(net: SimNet, name: str, **line: float) -> MemoryTransport:
    """A new node, and how programs on it reach the network."""
    return MemoryTransport(net, net.add_node(name, SimLine(**line)))


def addr_of(net: SimNet, name: str, port: int = 4001) -> Multiaddr:
    return tcp_addr(net.nodes[name].ip, port)


async def connected(net: SimNet, a: str, b: str, **line: float) -> tuple[MemoryLink, MemoryLink]:
    """A connection from new node `a` to new node `b`, both with such a line: the two ends."""
    dialler, answerer = transport(net, a, **line), transport(net, b, **line)
    listener = await answerer.listen(addr_of(net, b))
    link = await dialler.dial(addr_of(net, b))
    other = await listener.accept()
    await listener.aclose()
    return link, other


async def read_exactly(link: MemoryLink, count: int) -> bytes:
    """`count` bytes, or fewer when they end earlier."""
    parts = bytearray()
    while len(parts) < count and (part := await link.receive_some(count - len(parts))):
        parts += part
    return bytes(parts)
