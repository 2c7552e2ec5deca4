"""SimNet: the nodes, access lines and paths of one simulated network.

Decides which packets pass, their delay and their loss; `wire` transfers the bytes, and `memory` connects programs.
Nodes can be disconnected, stalled, killed (silently, as in a power failure, or with resets, as when a process dies) and
revived; paths can change during the simulation. Every random draw is from a stream of the sending node, so a change at
one node does not affect the draws of others. There is no global state.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from peerd.core.errors import LocalError
from tests.worlds.simulation.clock import SimAgenda
from tests.worlds.simulation.sim_pipe import PACKET_BYTES, RETRANSMIT_MIN_S, Segment, SimPipe, SimulatedLine
from tests.worlds.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLine:
    """A node's connection to the internet. All its links share each direction's rate."""

    latency_s: float = 0.0  # one way, to the internet's backbone; a path has the sum of both ends
    jitter_s: float = 0.0  # added to each segment, uniform from 0; order is kept
    up_mbit_s: float = math.inf
    down_mbit_s: float = math.inf
    loss: float = 0.0  # probability that an outgoing packet of 1448 bytes is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPath:
    """Latency, jitter and loss that the path between two nodes adds to those of their lines, in one direction.

    All links between the two nodes share the path's rate in this direction.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    mbit_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class NetConfig:
    """Settings of the whole simulated network."""

    window_bytes: int = 1 << 20  # per link and direction, in flight or unread; beyond this the writer waits
    dial_failure: float = 0.0  # probability that a dial fails although it could succeed
    link_life_s: float = math.inf  # mean time until a link breaks (exponential)
    give_up_s: float = 900.0  # time without progress after which a link breaks for the writer (Linux: about 924 s)
    syn_times_s: tuple[float, ...] = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0)  # when the SYN of a dial is sent
    accept_backlog: int = 128  # links that wait to be accepted; more are refused


class Mortal(Protocol):
    """A link that ends when its machine is killed."""

    def die(self) -> None: ...


class Listening(Protocol):
    """A listener for links to an address."""

    @property
    def node(self) -> SimNode: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class SimNode:
    """One machine of the network."""

    name: str
    ip: str
    line: SimLine
    rng: random.Random
    uplink: SimulatedLine
    downlink: SimulatedLine
    alive: bool = True
    dark: bool = False  # the machine is off, so it sends no resets
    stalled: bool = False
    island: int = 0  # nodes of different islands cannot reach each other
    corrupt: float = 0.0  # probability that a delivered segment from here has one bit flipped
    sent_bytes: int = 0
    received_bytes: int = 0
    links: dict[Mortal, None] = field(default_factory=dict)
    listeners: dict[str, Listening] = field(default_factory=dict)
    next_port: dict[int, int] = field(default_factory=dict)  # by the first number of their range

    def set_rates(self) -> None:
        self.uplink.bytes_per_s = self.line.up_mbit_s * 1e6 / 8
        self.downlink.bytes_per_s = self.line.down_mbit_s * 1e6 / 8


class SimNet:
    """The network. `run` must be running before anything that takes time."""

    def __init__(self, seed: int | str = 0, config: NetConfig | None = None, trace: Trace | None = None) -> None:
        self.seed = seed
        self.config = config or NetConfig()
        self.trace = trace or Trace()
        self.agenda = SimAgenda()
        self.nodes: dict[str, SimNode] = {}
        self._by_ip: dict[str, SimNode] = {}
        self._paths: dict[tuple[str, str], SimPath] = {}
        self._bottlenecks: dict[tuple[str, str], SimulatedLine] = {}  # of paths with a rate, now or earlier
        self._blocked: dict[tuple[str, str], None] = {}
        self._holding: dict[SimPipe[SimNode], None] = {}
        self.memory_listeners: dict[str, Listening] = {}  # of /memory/<n> addresses, which do not contain a node
        self.next_memory = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the network until cancelled."""
        await self.agenda.run(task_status=task_status)

    # --- nodes and paths ---

    def add_node(self, name: str, line: SimLine | None = None, ip: str = "") -> SimNode:
        """Add a machine with this address, or a new one in 10.0.0.0/8."""
        if name in self.nodes:
            raise LocalError(f"the network has a node {name!r} already")
        number = len(self.nodes) + 1
        node = SimNode(
            name=name,
            ip=ip or f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            line=line or SimLine(),
            rng=random.Random(f"{self.seed}/net/{name}"),
            uplink=SimulatedLine(self.agenda, begun=lambda segment, *times: segment.pipe.leave(segment, *times)),
            downlink=SimulatedLine(self.agenda, done=_deliver),
        )
        node.set_rates()
        self.nodes[name] = self._by_ip[node.ip] = node
        return node

    def readdress(self, name: str, ip: str) -> None:
        """Change a node's address. Raises LocalError while the node is alive, since its links would stay open."""
        node = self.nodes[name]
        if node.alive:
            raise LocalError(f"{name} is alive: it can have another address only after it was killed")
        del self._by_ip[node.ip]
        node.ip = ip
        self._by_ip[ip] = node
        self.trace.add(name, "address", ip)

    @property
    def window_bytes(self) -> int:
        """Window of one link and direction, in bytes."""
        return self.config.window_bytes

    def node_at(self, ip: str) -> SimNode | None:
        return self._by_ip.get(ip)

    def set_line(self, name: str, line: SimLine) -> None:
        """Change a node's line; segments in flight keep their times."""
        node = self.nodes[name]
        node.line = line
        node.set_rates()
        self.trace.add(name, "line", f"{line.latency_s} {line.up_mbit_s} {line.down_mbit_s} {line.loss}")

    def set_path(self, a: str, b: str, path: SimPath, *, both: bool = True) -> None:
        """Set the path from `a` to `b`, and the one back unless `both` is False.

        The nodes need not exist yet. Raises LocalError for a rate of zero or less.
        """
        if not path.mbit_s > 0:
            raise LocalError(f"the path from {a} to {b} has a rate of {path.mbit_s} Mb/s; allowed: more than 0")
        for pair in [(a, b), (b, a)] if both else [(a, b)]:
            self._paths[pair] = path
            if pair in self._bottlenecks or path.mbit_s < math.inf:
                line = self._bottlenecks.setdefault(pair, SimulatedLine(self.agenda, begun=_cross))
                line.bytes_per_s = path.mbit_s * 1e6 / 8

    def path(self, source: SimNode, target: SimNode) -> SimPath:
        return self._paths.get((source.name, target.name), _NO_PATH)

    def bottleneck(self, source: SimNode, target: SimNode) -> SimulatedLine | None:
        """The line that all bytes from `source` to `target` share, or None if the path has no rate of its own."""
        return self._bottlenecks.get((source.name, target.name))

    def latency(self, source: SimNode, target: SimNode) -> float:
        """One-way latency in seconds, without jitter and queues."""
        return source.line.latency_s + target.line.latency_s + self.path(source, target).latency_s

    def delay(self, source: SimNode, target: SimNode, size: int) -> float:
        """Delay of `size` bytes from line to line in seconds: latency, jitter and retransmissions of lost packets."""
        path = self.path(source, target)
        delay_s = base_s = source.line.latency_s + target.line.latency_s + path.latency_s
        jitter_s = source.line.jitter_s + target.line.jitter_s + path.jitter_s
        if jitter_s > 0:
            delay_s += source.rng.uniform(0, jitter_s)
        kept = (1 - source.line.loss) * (1 - path.loss)
        if kept < 1:
            kept **= max(1, math.ceil(size / PACKET_BYTES))
            again_s = max(RETRANSMIT_MIN_S, 2 * base_s)
            while source.rng.random() >= kept and again_s < self.config.give_up_s:
                delay_s += again_s
                again_s *= 2
                kept = (1 - source.line.loss) * (1 - path.loss)  # usually only one packet of the segment was lost
        return delay_s

    # --- connectivity ---

    def passes(self, source: SimNode, target: SimNode) -> bool:
        """True if a packet sent now would arrive."""
        if source.dark or target.dark or source.stalled or target.stalled:
            return False
        return source.island == target.island and (source.name, target.name) not in self._blocked

    def partition(self, *islands: Iterable[str]) -> None:
        """Disconnect each of the given sets of nodes from the others and from all other nodes."""
        for node in self.nodes.values():
            node.island = 0
        for number, names in enumerate(islands, start=1):
            for name in names:
                self.nodes[name].island = number
        self.trace.add("-", "partition", " ".join(str(node.island) for node in self.nodes.values()))
        self._retry_held()

    def block(self, a: str, b: str, *, both: bool = True) -> None:
        """Drop all packets from `a` to `b`, and those back unless `both` is False."""
        self._blocked[a, b] = None
        if both:
            self._blocked[b, a] = None
        self.trace.add(a, "block", b)

    def heal(self) -> None:
        """Remove all partitions and blocks; held bytes are sent with the next retransmission."""
        for node in self.nodes.values():
            node.island = 0
        self._blocked.clear()
        self.trace.add("-", "heal")
        self._retry_held()

    def stall(self, name: str) -> None:
        """Block all traffic of a node, as if its machine was paused; its links stay open."""
        self.nodes[name].stalled = True
        self.trace.add(name, "stall")

    def resume(self, name: str) -> None:
        """End a node's stall; held bytes are sent at once."""
        self.nodes[name].stalled = False
        self.trace.add(name, "resume")
        for pipe in list(self._holding):
            if name in (pipe.source.name, pipe.target.name):
                self._release(pipe)

    def kill(self, name: str, *, silent: bool = False) -> None:
        """End a node's links and listeners, as if its process was killed: its peers receive resets.

        `silent`: the whole machine is off, so peers notice it only by timeouts. The caller cancels the node's tasks,
        which are not notified.
        """
        node = self.nodes[name]
        self.trace.add(name, "kill", "silent" if silent else "reset")
        node.alive, node.dark = False, silent
        own = [listener for listener in self.memory_listeners.values() if listener.node is node]
        for listener in [*node.listeners.values(), *own]:
            listener.close()
        for link in list(node.links):
            link.die()

    def revive(self, name: str) -> None:
        """Restart a killed machine without its links: a peer that still uses one receives a reset."""
        node = self.nodes[name]
        node.alive, node.dark, node.stalled = True, False, False
        self.trace.add(name, "revive")
        self._retry_held()

    # --- for pipes ---

    def hold(self, pipe: SimPipe[SimNode]) -> None:
        """Register a pipe with segments that cannot pass now."""
        self._holding[pipe] = None
        self.agenda.at(trio.current_time() + self.config.give_up_s, functools.partial(self._give_up, pipe))

    def damage(self, source: SimNode, data: bytes) -> bytes:
        """The bytes as they arrive: with probability `source.corrupt`, one bit is flipped."""
        if source.corrupt <= 0 or not data or source.rng.random() >= source.corrupt:
            return data
        wrong = bytearray(data)
        wrong[source.rng.randrange(len(wrong))] ^= 1 << source.rng.randrange(8)
        self.trace.add(source.name, "corrupt", str(len(data)))
        return bytes(wrong)

    def note_delivery(self, source: SimNode, target: SimNode, data: bytes) -> None:
        self.trace.add(target.name, "bytes", f"{source.name} {len(data)} {zlib.crc32(data):08x}")

    def _retry_held(self) -> None:
        for pipe in list(self._holding):
            if self.passes(pipe.source, pipe.target):
                self.agenda.at(pipe.retry_at(), functools.partial(self._release, pipe))

    def _release(self, pipe: SimPipe[SimNode]) -> None:
        if pipe in self._holding and self.passes(pipe.source, pipe.target):
            del self._holding[pipe]
            pipe.release()

    def _give_up(self, pipe: SimPipe[SimNode]) -> None:
        if pipe not in self._holding or trio.current_time() < pipe.held_since_s + self.config.give_up_s:
            return
        if not (pipe.source.stalled or pipe.target.stalled):
            del self._holding[pipe]
            pipe.forget()
            pipe.on_given_up()


_NO_PATH = SimPath()


def _cross(segment: Segment, start_s: float, end_s: float) -> None:
    segment.pipe.cross(segment, start_s, end_s)


def _deliver(segment: Segment) -> None:
    segment.pipe.deliver(segment)
