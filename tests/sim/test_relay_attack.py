"""A relay under attack, in virtual time: reservation and circuit floods, greedy writers, readers that never read, half
open hand-shakes, from several places with many identities each. Honest circuits keep their rate, the limits hold."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from peerd.core import limits
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay import Relay
from peerd.reach.relay.relay_limits import RelayConfig
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from tests.worlds.network.attackers import Tally, attack
from tests.worlds.network.hosts import Hosts, keypair, running_hosts
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimLine

PAIRS, PLACES, IDENTITIES = 3, 3, 6
HONEST_BYTES_PER_S = 500_000
CALM_S, ATTACK_S = 10.0, 40.0
LINE = SimLine(latency_s=0.02, up_mbit_s=40, down_mbit_s=40)
CONFIG = RelayConfig(
    reservations_per_place=4,
    circuits_per_place=16,
    circuits_per_place_and_destination=4,
    requests_per_place_min=120,
    circuit_stall_s=20,
    bytes_per_s=4e6,
)


@dataclass
class Scene:
    """The hosts of one test; `n`-th places are far from each other."""

    hosts: Hosts
    relay: Host
    service: Relay
    got: dict[PeerId, int] = field(default_factory=dict)  # bytes by honest source
    broken: int = 0
    tally: Tally = field(default_factory=Tally)

    async def peer(self, name: str, transport: MemoryTransport) -> Circuits:
        host = Host(keypair(name), SimClock(1, name), [transport])
        circuits = Circuits(host, SimClock(1, f"{name}/circuits"))
        host.add_transport(circuits)
        await self.hosts.nursery.start(host.run)
        await self.hosts.nursery.start(circuits.run)
        await host.connect(self.relay.id, self.relay.listen_addrs())
        return circuits

    def place(self, number: int) -> MemoryTransport:
        net = self.hosts.net
        return MemoryTransport(net, net.add_node(f"place {number}", LINE, ip=f"20.{number}.0.1"))

    async def take(self, stream: Stream) -> None:
        self.got.setdefault(stream.peer, 0)
        while data := await stream.receive_some(1 << 16):
            self.got[stream.peer] += len(data)

    def held_bytes(self) -> int:
        """The bytes of others that the relay holds."""
        muxes = [stream.mux for link in self.relay.links for stream in link.streams]
        return sum(mux.inbox_bytes + mux.out_bytes for mux in muxes)


async def send_steadily(scene: Scene, source: Host, destination: PeerId) -> None:
    """An honest transfer; what breaks is opened again."""
    while True:
        try:
            stream = await source.open_stream(destination, "/take/1")
            while True:
                await stream.send(bytes(HONEST_BYTES_PER_S // 20))
                await trio.sleep(0.05)
        except RemoteError:
            scene.broken += 1
            await trio.sleep(0.2)


async def honest(scene: Scene) -> list[tuple[Host, PeerId]]:
    """Pairs, each peer at a place of its own; the second of each is behind the relay."""
    pairs = []
    for number in range(PAIRS):
        a = await scene.peer(f"a{number}", scene.place(2 * number))
        b = await scene.peer(f"b{number}", scene.place(2 * number + 1))
        held = await b.reserve(scene.relay.id)
        b._host.handle("/take/1", scene.take)
        await a._host.connect(b._host.id, held.addrs)
        pairs.append((a._host, b._host.id))
    return pairs


async def attack_from_everywhere(scene: Scene, targets: list[PeerId]) -> None:
    (addr,) = scene.relay.listen_addrs()
    for number in range(PLACES):
        transport = scene.place(100 + number)
        crew = [await scene.peer(f"x{number}.{one}", transport) for one in range(IDENTITIES)]
        dial = functools.partial(transport.dial, addr)
        attack(crew, dial, (scene.relay.id, addr), targets, scene.tally, scene.hosts.nursery)


@pytest.mark.slow
@pytest.mark.thorough
async def test_honest_circuits_keep_their_rate_under_attack(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        net = hosts.net
        relay = Host(keypair("r"), SimClock(1, "r"), [MemoryTransport(net, net.add_node("r", LINE, ip="20.200.0.1"))])
        await hosts.nursery.start(relay.run, [hosts.addr("r")])
        service = Relay(relay, SimClock(1, "r/relay"), keypair("r"), CONFIG)
        await hosts.nursery.start(service.run)
        scene = Scene(hosts, relay, service)
        pairs = await honest(scene)
        for source, destination in pairs:
            hosts.nursery.start_soon(send_steadily, scene, source, destination)
        await trio.sleep(2)
        before = dict(scene.got)
        await trio.sleep(CALM_S)
        calm = {peer: (scene.got[peer] - before[peer]) / CALM_S for peer in before}
        await attack_from_everywhere(scene, [destination for _, destination in pairs])
        before, most_held, most = dict(scene.got), 0, service.traffic()
        for _ in range(int(ATTACK_S)):
            await trio.sleep(1)
            service._board.check()
            most_held = max(most_held, scene.held_bytes())
            now = service.traffic()
            if now.circuits > most.circuits:
                most = now
        kept = {peer: (scene.got[peer] - before[peer]) / ATTACK_S / calm[peer] for peer in before}
        late = await scene.peer("late", scene.place(50))
        (addr,) = {addr for addr in source.known_addrs(pairs[-1][1]) if "/p2p-circuit" in str(addr)}
        await late._host.connect(pairs[-1][1], [addr])
        now = service.traffic()
        shares = ", ".join(f"{share:.0%}" for share in kept.values())
        print(
            f"\nhonest circuits keep {shares} of {HONEST_BYTES_PER_S / 1e3:.0f} kB/s each, {scene.broken} broke; "
            f"{scene.tally.attempts} attempts, {now.refused} refused, at most {most.circuits} circuits and "
            f"{now.reservations} reservations; the relay carried {now.carried_bytes / 1e6:.0f} MB and "
            f"held at most {most_held / 1e6:.1f} MB"
        )
        assert min(kept.values()) >= 0.8
        assert scene.broken == 0
        assert now.reservations <= PAIRS + PLACES * CONFIG.reservations_per_place
        assert most.circuits <= PAIRS + PLACES * CONFIG.circuits_per_place
        assert most_held <= most.circuits * 2 * (limits.WINDOW_BYTES_INITIAL + (192 << 10))
