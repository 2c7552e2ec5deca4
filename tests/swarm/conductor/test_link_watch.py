"""From links to map: what peers that move bytes report, and what the conductor's map says of their lines."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, ProtocolViolation, Refused
from peerd.messages.encoding import Empty
from peerd.messages.network import MappedPair, NetworkMapRequest, NetworkPart, NetworkReport, PairFigures
from peerd.messages.swarm import LineInfo
from peerd.placement.network.pair_meter import OwnLine
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.swarm.batch.grants import GrantSigner
from peerd.swarm.conductor.link_watch import LinkWatch, ReadMap
from peerd.swarm.conductor.network_map_server import FILLED_PEERS, REPORT_PAUSE_S, NetworkMapServer
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.events import ConductorConfig
from peerd.swarm.steps.conductor import Conductor
from peerd.wire.host.host import Host
from tests.kit.declared import ANY, declared
from tests.worlds.network.hosts import Hosts, keypair, running_hosts
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.simnet import SimPath

RUN = b"r" * 16
MBIT = 125_000.0


def names(*given: str) -> list[str]:
    return [keypair(name).peer_id.text for name in given]


@dataclass
class Peer:
    host: Host
    rpc: Rpc
    watch: LinkWatch
    line: OwnLine = field(default_factory=OwnLine)


@dataclass
class Swarm:
    """Peers that follow `c`, which keeps the map."""

    hosts: Hosts
    tenure: Tenure
    driver: Any
    peers: dict[str, Peer] = field(default_factory=dict)

    async def start(self, name: str, *, mbit: float = 0.0, **line: float) -> Peer:
        rates = {"up_mbit_s": mbit, "down_mbit_s": mbit} if mbit else {}
        host, clock = await self.hosts.start(name, **rates, **line), SimClock(1, name)
        rpc = Rpc(host, clock)
        await self.hosts.nursery.start(rpc.run)
        following = SimpleNamespace(conductor=keypair("c").peer_id, changes=0)
        own = OwnLine(mbit * MBIT, mbit * MBIT)
        watch = LinkWatch(RUN, (host, rpc), clock, cast(Any, following), lambda: own)
        self.hosts.nursery.start_soon(watch.run)

        async def take(call: Incoming[Empty]) -> Answer[Empty]:
            return Answer(Empty())

        rpc.serve("bulk/1/take", Empty, take, declared=declared(frames=1, frame_bytes=1 << 20))
        for other in self.peers:
            await host.connect(keypair(other).peer_id, [self.hosts.addr(other)])
        await trio.sleep(1.0)  # the other side has the link a moment later
        self.peers[name] = Peer(host, rpc, watch, own)
        self.driver.heard[f"{host.id.text}/0"] = 0.0
        return self.peers[name]

    async def send(self, one: str, other: str, mbytes: int) -> None:
        frame = TensorFrame("uint8", (1_000_000,), bytes(1_000_000))
        for _ in range(mbytes):
            peer = keypair(other).peer_id
            await self.peers[one].rpc.call(peer, "bulk/1/take", Empty(), Empty, frames=(frame,), timeout_s=600)

    async def map(self, reader: str = "c") -> dict[tuple[str, str], MappedPair]:
        read = await self.peers[reader].watch.read_map(keypair("c").peer_id)
        return pairs_of(read)


def pairs_of(read: ReadMap) -> dict[tuple[str, str], MappedPair]:
    by_id = {keypair(name).peer_id.text: name for name in "abcde"}
    return {(by_id.get(p.one, p.one), by_id.get(p.other, p.other)): p.figures for p in read.pairs}


@asynccontextmanager
async def swarm() -> AsyncIterator[Swarm]:
    machine = Conductor(ConductorConfig(stages=1, microbatches=1), random.Random(1), trio.current_time())
    tenure = Tenure(1, machine, GrantSigner(RUN, keypair("c").sign), random.Random(2))
    async with running_hosts() as hosts:
        driver = SimpleNamespace(tenure=tenure, heard={})
        made = Swarm(hosts, tenure, driver)
        conductor = await made.start("c", latency_s=0.005)
        NetworkMapServer(RUN, conductor.rpc, cast(Any, driver)).serve()
        yield made


def of(pairs: dict[tuple[str, str], MappedPair], one: str, other: str) -> tuple[float, float, float]:
    """Round trip, rate from `one` to `other`, and back."""
    if (one, other) in pairs:
        figures = pairs[one, other]
        return figures.rtt_s, figures.there_bytes_per_s, figures.back_bytes_per_s
    figures = pairs[other, one]
    return figures.rtt_s, figures.back_bytes_per_s, figures.there_bytes_per_s


@pytest.mark.slow
async def test_the_map_has_what_the_lines_are(autojump_clock: MockClock) -> None:
    async with swarm() as made:
        await made.start("a", latency_s=0.040, mbit=16)
        await made.start("b", latency_s=0.005)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.send, "a", "b", 20)
            nursery.start_soon(made.send, "b", "a", 20)
        await trio.sleep(100.0)
        pairs = await made.map("b")
        rtt_s, there, back = of(pairs, "a", "b")
        assert rtt_s == pytest.approx(0.09, rel=0.2)
        assert there == pytest.approx(2e6, rel=0.2)
        assert back == pytest.approx(2e6, rel=0.2)
        rtt_s, *_ = of(pairs, "b", "c")
        assert rtt_s == pytest.approx(0.02, rel=0.2)
        idle = next(figures for pair, figures in pairs.items() if set(pair) == {"b", "c"})
        assert not idle.rtt_estimated
        assert idle.there_estimated


async def test_two_that_never_met_are_estimated_by_those_who_met_both(autojump_clock: MockClock) -> None:
    async with swarm() as made:
        await made.start("d", latency_s=0.010)
        await made.start("a", latency_s=0.040)
        made.peers.pop("a")
        await made.start("b", latency_s=0.005)
        await trio.sleep(60.0)
        pairs = await made.map()
        figures = next(figures for pair, figures in pairs.items() if set(pair) == {"a", "b"})
        assert figures.rtt_estimated
        assert figures.rtt_s == pytest.approx(0.09, rel=0.35)
        assert len(pairs) == 6


async def test_only_those_that_report_here_are_heard_and_only_now_and_then(autojump_clock: MockClock) -> None:
    async with swarm() as made:
        one = await made.start("a")
        await trio.sleep(20.0)
        conductor = keypair("c").peer_id
        liar = PairFigures(keypair("e").peer_id.text, 0.001, 1e9, 1e9)

        async def report(run: bytes, *pairs: PairFigures) -> None:
            await one.rpc.call(conductor, "network/1/report", NetworkReport(run, list(pairs)), Empty, timeout_s=9)

        await report(RUN, liar)
        assert liar.peer not in made.tenure.network.peers()
        with pytest.raises(Overloaded):
            await report(RUN, liar)
        with pytest.raises(Refused, match="differs"):
            await report(b"x" * 16)
        made.driver.heard.pop(f"{one.host.id.text}/0")
        await trio.sleep(REPORT_PAUSE_S)
        with pytest.raises(Refused, match="as a stage peer"):
            await report(RUN)
        made.driver.tenure = None
        with pytest.raises(Refused, match="does not conduct"):
            await one.watch.read_map(conductor)


async def test_a_large_map_is_told_page_by_page_without_gaps(autojump_clock: MockClock) -> None:
    async with swarm() as made:
        one = await made.start("a")
        crowd = [f"p{number:03}" for number in range(60)]
        made.driver.heard |= dict.fromkeys(crowd, 0.0)
        now = trio.current_time()
        for teller in crowd:
            figures = [PairFigures(other, 0.01, 1e6) for other in crowd if other > teller]
            for begin in range(0, len(figures), 64):
                made.tenure.network.take(now, teller, figures[begin : begin + 64])
        read = await one.watch.read_map(keypair("c").peer_id)
        assert read.total_peers == 62 > FILLED_PEERS
        told = [(pair.one, pair.other) for pair in read.pairs if pair.one in crowd]
        assert told == [(i, j) for i in crowd for j in crowd if i < j]
        assert not read.more
        assert all(pair.figures.there_bytes_per_s == 1e6 for pair in read.pairs if pair.one in crowd)


@pytest.mark.slow
async def test_a_narrow_path_between_two_counts_in_averaging_and_a_narrow_end_does_not(
    autojump_clock: MockClock,
) -> None:
    async with swarm() as made:
        await made.start("a", mbit=80)
        await made.start("b", mbit=80)
        await made.start("d", mbit=8)
        made.hosts.net.set_path("a", "b", SimPath(mbit_s=8))
        lines = made.tenure.machine.roster.lines
        for name, mbit in (("a", 80), ("b", 80), ("d", 8)):
            rate = mbit * MBIT
            lines.tell(f"{keypair(name).peer_id.text}/0", 0, LineInfo("node", rate, rate, 1000, "float32"))
        async with trio.open_nursery() as nursery:
            for one, other in (("a", "b"), ("b", "a"), ("a", "d"), ("d", "b")):
                for _ in range(3):  # so that something waits all the time
                    nursery.start_soon(made.send, one, other, 10)
        await trio.sleep(90.0)
        a, b, d = (f"{name}/0" for name in names("a", "b", "d"))
        found = lines.split(0, (a, b, d))
        assert found is not None
        assert dict(found.pairs).keys() == {(a, b), (b, a)}
        assert all(1e6 <= limit <= 1.4e6 for _, limit in found.pairs)  # what fills buffers counts as sent here


Serve = Callable[[Incoming[NetworkMapRequest]], Awaitable[Answer[NetworkPart]]]


async def test_a_map_without_end_or_with_pairs_of_nobody_costs_the_reader_little(autojump_clock: MockClock) -> None:
    async with swarm() as made:
        one, other = await made.start("a"), await made.start("b")
        part = NetworkPart(["x", "y"], [MappedPair(0, 1, 0.0, 0.0, 0.0, 0.0)], 9, True)

        async def endless(call: Incoming[NetworkMapRequest]) -> Answer[NetworkPart]:
            return Answer(part)

        async def wrong(call: Incoming[NetworkMapRequest]) -> Answer[NetworkPart]:
            return Answer(NetworkPart(["x"], part.pairs, 9, True))

        other.rpc.serve("network/1/map", NetworkMapRequest, endless, declared=ANY)
        read = await one.watch.read_map(other.host.id)
        assert read.more
        assert len(read.pairs) == 8
        other.rpc.unserve("network/1")
        other.rpc.serve("network/1/map", NetworkMapRequest, wrong, declared=ANY)
        with pytest.raises(ProtocolViolation):
            await one.watch.read_map(other.host.id)
