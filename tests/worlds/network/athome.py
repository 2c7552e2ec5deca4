"""Nodes of a World behind routers of their own, each with all that a daemon has to reach others and be reached."""

from __future__ import annotations

import trio

from peerd.core.addr import tcp_addr
from peerd.daemon.control.connectivity import Connectivity, ConnectivityConfig
from peerd.role.peer_stack import peer_stack
from tests.worlds.network.members import Organizer
from tests.worlds.simulation.memory import MemoryLink
from tests.worlds.simulation.nat import Internet, Kind, NatHome, SimRouter
from tests.worlds.simulation.world import PORT, Node, Program, World


class Homes:
    """The routers of a world's nodes, which outlive the nodes' processes."""

    def __init__(self, world: World, organizer: Organizer | None = None) -> None:
        """`organizer`: gives each node a token."""
        self._organizer = organizer
        self._internet = Internet(world.net)
        self._routers: dict[tuple[str, str], SimRouter] = {}  # by node and address

    def program(self, kind: Kind, *, relay: bool = False) -> Program:
        """A node behind such a router. `relay`: it carries circuits for others."""

        async def program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
            home = self._home(node, kind)
            stack = peer_stack(node.keypair, node.clock, [home], buffers=node.world.buffers)
            node.host, node.rpc, node.dht = stack.host, stack.rpc, stack.dht
            config = ConnectivityConfig(relay=relay)
            ways = Connectivity(stack.host, (stack.rpc, stack.dht), node.clock, node.keypair, config)
            gate = self._organizer.gate(node, stack) if self._organizer is not None else None
            others = [addr for addr in node.world.bootstrap if addr != node.full_addr]
            async with trio.open_nursery() as nursery:
                await nursery.start(stack.run, [tcp_addr("0.0.0.0", PORT)], others)
                await nursery.start(ways.run)
                if gate is not None:
                    await nursery.start(gate.run)
                    nursery.start_soon(gate.refresh, stack.dht)
                task_status.started()

        return program

    def router(self, name: str) -> SimRouter:
        """The router of a node that has been started."""
        return self._routers[name, self._internet.net.nodes[name].ip]

    def restart_router(self, name: str) -> None:
        """Switch a node's router off and on: it forgets all mappings, and no link through it lives on."""
        machine = self._internet.net.nodes[name]
        if (router := self._routers.get((name, machine.ip))) is not None:  # else it is on its way there
            router.forget()
        for link in list(machine.links):
            assert isinstance(link, MemoryLink)
            link.break_both("the router was switched off")

    def _home(self, node: Node, kind: Kind) -> NatHome:
        """A Transport for this life of a node: its router remembers, and nothing else."""
        ip, hidden = node.machine.ip, kind not in ("public", "firewall")
        inside = f"192.168.{len(self._routers)}.2" if hidden else ip
        router = self._routers.setdefault((node.name, ip), SimRouter(kind, ip, inside))
        home = self._internet.homes[ip] = NatHome(self._internet, node.machine, router, resets=False)
        return home
