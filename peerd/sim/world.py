"""World: whole nodes over one SimNet, in one nursery; what runs on them is up to their programs (see `programs`).

A node is a machine with a name, an identity and a line; a program is what runs on it. Nodes start, stop (politely),
are killed (at once) and come back with the same identity and address. Everything is drawn from the seed, so that a
world run with `peerd.sim.clock.run_virtual` repeats exactly; its trace hash proves it. An error in a program ends the
world: a simulation that hides errors is worth nothing. Does not compute with tensors and starts no threads.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr, with_peer
from peerd.core.errors import LocalError
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.net.link.sealing import Buffers
from peerd.sim.clock import SimClock
from peerd.sim.memory import MemoryTransport
from peerd.sim.simnet import NetConfig, SimLine, SimNet, SimNode
from peerd.sim.trace import Trace

if TYPE_CHECKING:
    from peerd.net.host.host import Host
    from peerd.service.dht.dht import Dht
    from peerd.service.rpc.rpc import Rpc

PORT = 4001  # where every node listens


class Program(Protocol):
    """A program that runs on a node. Calls `task_status.started()` when it is of use to others; returns when
    cancelled.
    """

    def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """Defaults of all nodes, unless `World.start` says otherwise."""

    net: NetConfig = field(default_factory=NetConfig)
    line: Callable[[random.Random], SimLine] = lambda rng: SimLine()  # draws the line of a node that is given none


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Nodes that leave and are replaced: `share` of the nodes within `within_s`, at random instants."""

    share: float
    within_s: float
    silent: float = 0.5  # how many of those that leave do so without a word; the others' processes are killed
    absent_s: float | None = None  # they come back after so long; None: somebody new takes the place at once
    spare: frozenset[str] = frozenset()  # names that stay


class Node:
    """One machine of the world. `host`, `rpc` and `dht` are there once the program has set them."""

    host: Host
    rpc: Rpc
    dht: Dht

    def __init__(self, world: World, machine: SimNode, program: Program, skew_s: float) -> None:
        self.world = world
        self.name = machine.name
        self.machine = machine
        self.first_line = machine.line
        self.program = program
        self.keypair = Keypair(random.Random(f"{world.seed}/{machine.name}/identity").randbytes(32))
        self.transport = MemoryTransport(world.net, machine)
        self.incarnation = 0
        self.skew_s = skew_s
        self.clock = SimClock(world.seed, f"{machine.name}/0", skew_s=skew_s)
        self.up = False
        self.settled = trio.Event()  # up, or gone before it came up
        self.gone = trio.Event()
        self.scope = trio.CancelScope()

    @property
    def id(self) -> PeerId:
        return self.keypair.peer_id

    @property
    def addr(self) -> Multiaddr:
        """Address on which the node listens, without its id."""
        return tcp_addr(self.machine.ip, PORT)

    @property
    def full_addr(self) -> Multiaddr:
        """With /p2p/<id>, as one would give to others."""
        return with_peer(self.addr, self.id)

    def note(self, kind: str, detail: str = "") -> None:
        """Put something that the program saw into the world's trace."""
        self.world.trace.add(self.name, kind, detail)

    def reborn(self) -> None:
        """Ready to live again: same identity and address, new memory, new random streams."""
        self.incarnation += 1
        self.clock = SimClock(self.world.seed, f"{self.name}/{self.incarnation}", skew_s=self.skew_s)
        self.up, self.settled, self.gone, self.scope = False, trio.Event(), trio.Event(), trio.CancelScope()

    def __repr__(self) -> str:
        return f"Node({self.name}, {self.id.short})"


class World:
    """Nodes over one network. Use it as `async with World(seed, program).running() as world`."""

    def __init__(self, seed: int | str, program: Program, config: WorldConfig | None = None) -> None:
        self.seed = seed
        self.program = program
        self.config = config or WorldConfig()
        self.trace = Trace()
        self.net = SimNet(seed, self.config.net, self.trace)
        self.nodes: dict[str, Node] = {}  # all that ever were, in the order of their first start
        self.bootstrap: list[Multiaddr] = []
        self.buffers = Buffers()  # of all hosts together: alone they keep four megabytes each
        self._nursery: trio.Nursery | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """The network moves bytes inside; at the end every node is stopped politely, then the network ends."""
        async with trio.open_nursery() as outer:
            await outer.start(self.net.run)
            async with trio.open_nursery() as self._nursery:
                yield self
                for node in self.nodes.values():
                    node.scope.cancel()
            outer.cancel_scope.cancel()

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}/world/{purpose}")

    def living(self) -> list[Node]:
        """Nodes that are up, in the order of their first start."""
        return [node for node in self.nodes.values() if node.up]

    # --- life ---

    async def start(
        self,
        name: str | None = None,
        *,
        line: SimLine | None = None,
        skew_s: float = 0.0,
        program: Program | None = None,
        ip: str = "",
    ) -> Node:
        """A new node; returns when its program is of use, or when it was killed before. `ip`: else a private one."""
        name = name or f"n{len(self.nodes):02d}"
        machine = self._machine(name, line, ip)
        node = self.nodes[name] = Node(self, machine, program or self.program, skew_s)
        await self._launch(node)
        return node

    async def start_many(self, count: int, *, bootstrap: bool = False) -> list[Node]:
        """`count` new nodes at once; with `bootstrap` the later ones join through them."""
        machines = [self._machine(f"n{len(self.nodes) + k:02d}", None) for k in range(count)]
        nodes = [Node(self, machine, self.program, 0.0) for machine in machines]
        self.nodes.update({node.name: node for node in nodes})
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(self._launch, node)
        if bootstrap:
            self.bootstrap += [node.full_addr for node in nodes]
        return nodes

    async def stop(self, node: Node) -> None:
        """The polite way: the program is cancelled and may still say good-bye."""
        self.trace.add(node.name, "stop")
        node.up = False
        node.scope.cancel()
        await node.gone.wait()
        self.net.kill(node.name)

    async def kill(self, node: Node, *, silent: bool = False) -> None:
        """At once: nothing that the program tries while it ends reaches anyone."""
        self.net.kill(node.name, silent=silent)
        node.up = False
        node.scope.cancel()
        await node.gone.wait()

    async def restart(self, node: Node) -> None:
        """A stopped or killed node comes back with its identity and address, and nothing else of its past."""
        if not node.gone.is_set():
            raise LocalError(f"{node.name} still runs")
        node.reborn()
        self.net.revive(node.name)
        await self._launch(node)

    def _machine(self, name: str, line: SimLine | None, ip: str = "") -> SimNode:
        return self.net.add_node(name, line or self.config.line(self.rng(f"line of {name}")), ip)

    async def _launch(self, node: Node) -> None:
        if self._nursery is None:
            raise LocalError("the world does not run: use it as `async with world.running()`")
        self._nursery.start_soon(self._live, node, name=f"node {node.name}")
        await node.settled.wait()

    async def _live(self, node: Node) -> None:
        try:
            with node.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(functools.partial(node.program, node))
                    node.up = True
                    node.settled.set()
                    node.note("up", str(node.incarnation))
        finally:
            node.up = False
            node.settled.set()
            node.gone.set()
            node.note("gone")

    # --- scripts ---

    async def churn(self, plan: Churn) -> None:
        """Kill and replace nodes as planned; returns when the last one that left has been replaced."""
        rng = self.rng("churn")
        leaving = round(plan.share * len(self.living()))
        start_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for at_s in sorted(start_s + rng.uniform(0, plan.within_s) for _ in range(leaving)):
                await trio.sleep_until(at_s)
                choice = [node for node in self.living() if node.name not in plan.spare]
                if choice:
                    nursery.start_soon(self._replace, rng.choice(choice), rng.random() < plan.silent, plan.absent_s)

    async def _replace(self, node: Node, silent: bool, absent_s: float | None) -> None:
        await self.kill(node, silent=silent)
        if absent_s is None:
            await self.start()
        else:
            await trio.sleep(absent_s)
            await self.restart(node)

    async def until(self, condition: Callable[[], bool], *, within_s: float, step_s: float = 0.1) -> bool:
        """Let time pass until `condition()` holds; False when it does not within `within_s`."""
        with trio.move_on_after(within_s):
            while not condition():  # noqa: ASYNC110 - any condition, on state that nobody announces
                await trio.sleep(step_s)
        return condition()

    def partition(self, *islands: Iterable[Node]) -> None:
        """Cut these sets of nodes off from one another and from all others."""
        self.net.partition(*([node.name for node in island] for island in islands))
