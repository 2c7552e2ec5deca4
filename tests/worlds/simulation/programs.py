"""Programs for the nodes of a World: a Host alone, or Host, RPC and DHT together.

A test that needs more writes its own program, which may run one of these.
"""

from __future__ import annotations

from collections.abc import Awaitable

import trio

from peerd.core.errors import RemoteError
from peerd.dht.dht import DhtConfig
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.wire.host.host import Host, HostConfig
from peerd.wire.link.link import Stream
from tests.worlds.simulation.world import Node, Program

ECHO = "/peerd-sim/echo/1"  # protocol of all nodes, which returns the bytes that it receives


def hosts(config: HostConfig | None = None) -> Program:
    """A program that runs only a Host, with the echo protocol."""

    def program(node: Node, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        node.host = Host(node.keypair, node.clock, [node.transport], config, node.world.buffers)
        node.host.handle(ECHO, _echo)
        return node.host.run([node.addr], task_status=task_status)

    return program


def swarm(host_config: HostConfig | None = None, dht_config: DhtConfig | None = None) -> Program:
    """A program that runs Host, RPC and DHT; the DHT joins through the world's bootstrap addresses."""

    def program(node: Node, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        stack = stack_on(node, host_config, dht_config)
        stack.host.handle(ECHO, _echo)
        others = [addr for addr in node.world.bootstrap if addr != node.full_addr]
        return stack.run([node.addr], others, task_status=task_status)

    return program


def stack_on(node: Node, host_config: HostConfig | None = None, dht_config: DhtConfig | None = None) -> PeerStack:
    """Create the protocol stack of a node, and set the node's `host`, `rpc` and `dht`."""
    stack = peer_stack(node.keypair, node.clock, [node.transport], host_config, dht_config, node.world.buffers)
    node.host, node.rpc, node.dht = stack.host, stack.rpc, stack.dht
    return stack


async def _echo(stream: Stream) -> None:
    while data := await stream.receive_some(1 << 16):
        await stream.send(data)
    await stream.aclose()


async def echo(source: Node, target: Node, size: int = 32) -> float:
    """Send `size` bytes to `target` and receive them again; returns the seconds. Raises RemoteError."""
    started_s = trio.current_time()
    stream = await source.host.open_stream(target.id, ECHO)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, bytes(size))
            await stream.receive_exactly(size)
    finally:
        stream.reset()
    return trio.current_time() - started_s


async def try_ping(source: Node, target: Node, *, within_s: float) -> float | None:
    """Ping `target` by libp2p's protocol, connecting if needed; returns the seconds including the dial.

    Returns None if it fails or takes longer than `within_s`.
    """
    started_s = trio.current_time()
    with trio.move_on_after(within_s):
        try:
            await source.host.ping(target.id)
        except RemoteError:
            return None
        return trio.current_time() - started_s
    return None


async def try_echo(source: Node, target: Node, size: int, *, within_s: float) -> float | None:
    """Like `echo`, but returns None if it fails or takes longer than `within_s`."""
    with trio.move_on_after(within_s):
        try:
            return await echo(source, target, size)
        except* RemoteError:
            pass
    return None
