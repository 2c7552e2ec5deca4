"""World: nodes on one simulated network, in one nursery. Each node runs a program (see `programs`).

A node is a machine with a name, an identity and an access line. Nodes can be started, stopped (gracefully), killed
(abruptly), and restarted with the same identity and address. All randomness comes from the seed, so a world run with
`run_virtual` of `clock` is reproducible, which its trace hash proves. An exception in a program ends the world, so that
no error is hidden. Uses no tensors and no threads.
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
from peerd.wire.link.sealing import Buffers
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import NetConfig, SimLine, SimNet, SimNode
from tests.worlds.simulation.trace import Trace

if TYPE_CHECKING:
    from peerd.dht.dht import Dht
    from peerd.rpc.rpc import Rpc
    from peerd.wire.host.host import Host

PORT = 4001  # every node's listening port


class Program(Protocol):
    """A program that runs on a node until cancelled. It calls `task_status.started()` once it is ready for others."""

    def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """Settings of the network, and the default access line of nodes."""

    net: NetConfig = field(default_factory=NetConfig)
    line: Callable[[random.Random], SimLine] = lambda rng: SimLine()  # draws the line of a node without a given one


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Plan of churn: a fraction `share` of the nodes is killed and replaced within `within_s`, at random times."""

    share: float
    within_s: float
    silent: float = 0.5  # fraction of kills that take the whole machine down; the others kill only the process
    absent_s: float | None = None  # until a killed node is restarted, or None to replace it at once by a new node
    spare: frozenset[str] = frozenset()  # names of nodes that are never killed


class Node:
    """One machine of the world, and its program. The program sets `host`, `rpc` and `dht`, if it has them."""

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
        self.settled = trio.Event()  # up, or ended before it was up
        self.gone = trio.Event()
        self.scope = trio.CancelScope()

    @property
    def id(self) -> PeerId:
        return self.keypair.peer_id

    @property
    def addr(self) -> Multiaddr:
        """Listening address, without the peer id."""
        return tcp_addr(self.machine.ip, PORT)

    @property
    def full_addr(self) -> Multiaddr:
        """Listening address with /p2p/<id>, for other nodes."""
        return with_peer(self.addr, self.id)

    def note(self, kind: str, detail: str = "") -> None:
        """Add an event of the program to the world's trace."""
        self.world.trace.add(self.name, kind, detail)

    def reborn(self) -> None:
        """Reset the node for a restart: same identity and address, new state and random streams."""
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
        self.nodes: dict[str, Node] = {}  # all nodes, also stopped ones, in the order of their first start
        self.bootstrap: list[Multiaddr] = []
        self.buffers = Buffers()  # shared by all hosts: separate ones would take four megabytes each
        self._nursery: trio.Nursery | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Run the network inside this context; on exit, cancel every node's program, then stop the network."""
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

    # --- starting and stopping ---

    async def start(
        self,
        name: str | None = None,
        *,
        line: SimLine | None = None,
        skew_s: float = 0.0,
        program: Program | None = None,
        ip: str = "",
    ) -> Node:
        """Start a new node; returns when its program is ready or was killed. `ip`: its address, else a private one."""
        name = name or f"n{len(self.nodes):02d}"
        machine = self._machine(name, line, ip)
        node = self.nodes[name] = Node(self, machine, program or self.program, skew_s)
        await self._launch(node)
        return node

    async def start_many(self, count: int, *, bootstrap: bool = False) -> list[Node]:
        """Start `count` new nodes concurrently. With `bootstrap`, later nodes use them as bootstrap peers."""
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
        """Stop a node gracefully: its program is cancelled and may still send messages."""
        self.trace.add(node.name, "stop")
        node.up = False
        node.scope.cancel()
        await node.gone.wait()
        self.net.kill(node.name)

    async def kill(self, node: Node, *, silent: bool = False) -> None:
        """Kill a node: nothing that its program sends during its cancellation arrives. `silent`: see SimNet.kill."""
        self.net.kill(node.name, silent=silent)
        node.up = False
        node.scope.cancel()
        await node.gone.wait()

    async def restart(self, node: Node) -> None:
        """Restart a stopped or killed node with its identity and address, but without its other state."""
        if not node.gone.is_set():
            raise LocalError(f"{node.name} is still running")
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
        """Kill and replace nodes as planned; returns when the last killed node has been replaced."""
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
        """Wait until `condition()` is true; returns False if it is not within `within_s`."""
        with trio.move_on_after(within_s):
            while not condition():  # noqa: ASYNC110 - any condition, on state without events
                await trio.sleep(step_s)
        return condition()

    def partition(self, *islands: Iterable[Node]) -> None:
        """Disconnect these sets of nodes from each other and from all other nodes."""
        self.net.partition(*([node.name for node in island] for island in islands))
