"""Real hosts on a simulated network, for tests of the network layer and of what stands on it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio
from multiaddr import Multiaddr

from peerd.core.keys import Keypair
from peerd.wire.host.host import Host, HostConfig
from peerd.wire.link.link import Link
from peerd.wire.link.link_stream import Stream
from peerd.wire.path_selection import PathKind
from peerd.wire.transport import Transport
from tests.worlds.network.virtual import addr_of, connected, running_net, transport
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.simnet import NetConfig, SimNet


def keypair(name: str) -> Keypair:
    return Keypair.from_seed(name.encode().ljust(32, b"."))


@dataclass
class Hosts:
    """Hosts by name; each runs until `stop` or the end of the block."""

    net: SimNet
    nursery: trio.Nursery
    hosts: dict[str, Host] = field(default_factory=dict)
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    ended: dict[str, trio.Event] = field(default_factory=dict)

    async def start(self, name: str, config: HostConfig | None = None, *, key: str = "", **place: Any) -> Host:
        """A host that runs. `key`: whose key it has, if another's; `place`: see `machine`."""
        host = Host(keypair(key or name), SimClock(1, name), [self.machine(name, **place)], config)
        self.hosts[name] = host
        await self.nursery.start(self._run, name, host)
        return host

    def machine(self, name: str, **line: float) -> Transport:
        """Where a host runs."""
        return transport(self.net, name, **line)

    def listens(self, name: str) -> Multiaddr:
        return addr_of(self.net, name)

    def addr(self, name: str) -> Multiaddr:
        """Where others find it."""
        return addr_of(self.net, name)

    async def _run(self, name: str, host: Host, *, task_status: trio.TaskStatus[None]) -> None:
        self.ended[name] = trio.Event()
        with trio.CancelScope() as self.scopes[name]:
            await host.run([self.listens(name)], task_status=task_status)
        self.ended[name].set()

    async def stop(self, name: str) -> None:
        """Leave as a program that was told to."""
        self.scopes[name].cancel()
        await self.ended[name].wait()


H = TypeVar("H", bound=Hosts)


@asynccontextmanager
async def running(kind: Callable[[SimNet, trio.Nursery], H], config: NetConfig | None = None) -> AsyncIterator[H]:
    with trio.fail_after(100_000):  # virtual seconds: what waits for ever fails
        async with running_net(config) as net, trio.open_nursery() as nursery:
            yield kind(net, nursery)
            nursery.cancel_scope.cancel()


def running_hosts(config: NetConfig | None = None) -> AbstractAsyncContextManager[Hosts]:
    return running(Hosts, config)


@asynccontextmanager
async def echoing(*names: str, **line: float) -> AsyncIterator[tuple[Any, ...]]:
    """All hosts, and one host that echoes for each of these names."""
    async with running_hosts() as hosts:
        started = [await hosts.start(name, **line) for name in names]
        for host in started:
            host.handle("/echo/1", echo)
        yield hosts, *started


async def echo(stream: Stream) -> None:
    """A handler: everything back, until the end."""
    while data := await stream.receive_some(1 << 16):
        await stream.send(data)


async def ask(host: Host, other: Host, data: bytes, protocol: str = "/echo/1") -> bytes:
    """One exchange with an `echo` handler."""
    stream = await host.open_stream(other.id, protocol)
    try:
        if len(data) <= 1 << 16:
            await stream.send(data)
            return await stream.receive_exactly(len(data))
        answer = bytearray(len(data))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, data)
            await stream.receive_into(answer)
        return bytes(answer)
    finally:
        await stream.aclose()


_numbers = itertools.count()


async def join(hosts: Hosts, a: Host, b: Host, way: PathKind, **line: float) -> tuple[Link, Link]:
    """A further link dialed by `a`, of kind `way` for both, as relays and hole punching make them: the two ends."""
    number = next(_numbers)
    near, far = await connected(hosts.net, f"way {number} from", f"way {number} to", **line)
    ends: dict[str, Link] = {}

    async def enter(host: Host, initiator: bool) -> None:
        ends[str(host.id)] = await host.join(near if initiator else far, way, initiator=initiator)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(enter, a, True)
        nursery.start_soon(enter, b, False)
    return ends[str(a.id)], ends[str(b.id)]
