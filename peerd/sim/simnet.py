"""SimNet: nodes with access lines and the paths between them, in one object per simulation.

Decides what passes, how long it takes and what is lost; the bytes themselves are moved by `wire` and reach programs
through `memory`. Nodes can be cut off, stalled, killed (silently, as when the power fails, or with resets, as when a
process dies under a living kernel) and revived; paths change while the simulation runs. Every draw comes from a
stream named after the node that sends, so a change at one node does not disturb the others. Nothing is kept
process-wide.
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
from peerd.sim.clock import SimAgenda
from peerd.sim.trace import Trace
from peerd.sim.wire import PACKET_BYTES, RETRANSMIT_MIN_S, Segment, SimPipe, SimulatedLine


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLine:
    """A node's connection to the internet. Rates are shared by all its links, each direction on its own."""

    latency_s: float = 0.0  # one way, to the backbone; a path has both ends' sum
    jitter_s: float = 0.0  # added to each segment, uniform from 0; order is kept
    up_mbit_s: float = math.inf
    down_mbit_s: float = math.inf
    loss: float = 0.0  # probability that a packet of 1448 bytes is lost, on the way out


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPath:
    """Latency, jitter and loss that the path between two nodes adds to their lines, one direction.

    Rate: shared by all links between the two in this direction, beside those of their lines.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    mbit_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class NetConfig:
    """Properties of the whole network."""

    window_bytes: int = 1 << 20  # of one link and direction: under way or unread, then the writer waits
    dial_failure: float = 0.0  # probability that a dial fails although it could succeed
    link_life_s: float = math.inf  # mean time after which a link breaks by itself (exponential)
    give_up_s: float = 900.0  # a link whose bytes can't pass for so long breaks for the writer (Linux: about 924 s)
    syn_times_s: tuple[float, ...] = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0)  # when a dial without answer is repeated
    accept_backlog: int = 128  # links that wait to be accepted; more are refused


class Mortal(Protocol):
    """A link that ends with its machine."""

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
    dark: bool = False  # the machine itself is off: it does not even refuse
    stalled: bool = False
    island: int = 0  # nodes of different islands can't reach one another
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
    """The network. `run` has to be running as soon as anything takes time."""

    def __init__(self, seed: int | str = 0, config: NetConfig | None = None, trace: Trace | None = None) -> None:
        self.seed = seed
        self.config = config or NetConfig()
        self.trace = trace or Trace()
        self.agenda = SimAgenda()
        self.nodes: dict[str, SimNode] = {}
        self._by_ip: dict[str, SimNode] = {}
        self._paths: dict[tuple[str, str], SimPath] = {}
        self._bottlenecks: dict[tuple[str, str], SimulatedLine] = {}  # of paths that have, or had, a rate of their own
        self._blocked: dict[tuple[str, str], None] = {}
        self._holding: dict[SimPipe[SimNode], None] = {}
        self.memory_listeners: dict[str, Listening] = {}  # of /memory/<n> addresses, which name no node
        self.next_memory = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move bytes until cancelled."""
        await self.agenda.run(task_status=task_status)

    # --- nodes and paths ---

    def add_node(self, name: str, line: SimLine | None = None, ip: str = "") -> SimNode:
        """A new machine with this address, or one of its own in 10.0.0.0/8."""
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
        """Give a node another address. LocalError while it is alive: its links would live on."""
        node = self.nodes[name]
        if node.alive:
            raise LocalError(f"{name} is alive: it can have another address only after it was killed")
        del self._by_ip[node.ip]
        node.ip = ip
        self._by_ip[ip] = node
        self.trace.add(name, "address", ip)

    @property
    def window_bytes(self) -> int:
        """Window of one link and direction."""
        return self.config.window_bytes

    def node_at(self, ip: str) -> SimNode | None:
        return self._by_ip.get(ip)

    def set_line(self, name: str, line: SimLine) -> None:
        """Change a node's connection; segments already under way keep their times."""
        node = self.nodes[name]
        node.line = line
        node.set_rates()
        self.trace.add(name, "line", f"{line.latency_s} {line.up_mbit_s} {line.down_mbit_s} {line.loss}")

    def set_path(self, a: str, b: str, path: SimPath, *, both: bool = True) -> None:
        """Set what the path from `a` to `b` (and back, each direction on its own) adds to their lines.

        Names of nodes that do not exist yet are as good. LocalError for a rate of zero or less.
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
        """The line that everything from `source` to `target` shares; None where the path has no rate of its own."""
        return self._bottlenecks.get((source.name, target.name))

    def latency(self, source: SimNode, target: SimNode) -> float:
        """Seconds one way, without jitter and queues."""
        return source.line.latency_s + target.line.latency_s + self.path(source, target).latency_s

    def delay(self, source: SimNode, target: SimNode, size: int) -> float:
        """Seconds that `size` bytes take from line to line: latency, jitter, and what repeating lost packets costs."""
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
                kept = (1 - source.line.loss) * (1 - path.loss)  # usually one packet of the segment was missing
        return delay_s

    # --- what passes ---

    def passes(self, source: SimNode, target: SimNode) -> bool:
        """True when a packet sent now would arrive."""
        if source.dark or target.dark or source.stalled or target.stalled:
            return False
        return source.island == target.island and (source.name, target.name) not in self._blocked

    def partition(self, *islands: Iterable[str]) -> None:
        """Split: each of the given sets of nodes is cut off from the others and from all nodes not named."""
        for node in self.nodes.values():
            node.island = 0
        for number, names in enumerate(islands, start=1):
            for name in names:
                self.nodes[name].island = number
        self.trace.add("-", "partition", " ".join(str(node.island) for node in self.nodes.values()))
        self._retry_held()

    def block(self, a: str, b: str, *, both: bool = True) -> None:
        """Nothing passes from `a` to `b` (and back) any more."""
        self._blocked[a, b] = None
        if both:
            self._blocked[b, a] = None
        self.trace.add(a, "block", b)

    def heal(self) -> None:
        """Everyone alive can reach everyone again; held bytes come with the next retransmission."""
        for node in self.nodes.values():
            node.island = 0
        self._blocked.clear()
        self.trace.add("-", "heal")
        self._retry_held()

    def stall(self, name: str) -> None:
        """Nothing gets into or out of the node, as if its machine stood still; its links live on."""
        self.nodes[name].stalled = True
        self.trace.add(name, "stall")

    def resume(self, name: str) -> None:
        """The stalled node goes on where it was, at once."""
        self.nodes[name].stalled = False
        self.trace.add(name, "resume")
        for pipe in list(self._holding):
            if name in (pipe.source.name, pipe.target.name):
                self._release(pipe)

    def kill(self, name: str, *, silent: bool = False) -> None:
        """The node's process is gone with its links and listeners. Silent: the whole machine is, and its peers
        notice only by time-out; else they get resets. Cancel the node's own tasks: they are told nothing."""
        node = self.nodes[name]
        self.trace.add(name, "kill", "silent" if silent else "reset")
        node.alive, node.dark = False, silent
        own = [listener for listener in self.memory_listeners.values() if listener.node is node]
        for listener in [*node.listeners.values(), *own]:
            listener.close()
        for link in list(node.links):
            link.die()

    def revive(self, name: str) -> None:
        """Bring the machine back, with no memory of its links: a peer that still uses one gets a reset."""
        node = self.nodes[name]
        node.alive, node.dark, node.stalled = True, False, False
        self.trace.add(name, "revive")
        self._retry_held()

    # --- for pipes ---

    def hold(self, pipe: SimPipe[SimNode]) -> None:
        """The pipe has bytes that can't pass."""
        self._holding[pipe] = None
        self.agenda.at(trio.current_time() + self.config.give_up_s, functools.partial(self._give_up, pipe))

    def damage(self, source: SimNode, data: bytes) -> bytes:
        """The bytes as they arrive: one bit flipped if the source's line is faulty and chance wants it."""
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
