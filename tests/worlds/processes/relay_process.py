"""A relay, or its attackers, as a process of its own on loopback: `python -m tests.worlds.processes.relay_process`.

    relay ADDR                 serves at ADDR; prints its address, with its /p2p
    attack RELAY IPS TARGETS   attacks RELAY from each of IPS, aiming at the peers TARGETS too; prints a line when the
                               relay has opened some circuits

Ends when stdin does, so that it cannot outlive its parent.
"""

from __future__ import annotations

import functools
import os
import sys

import trio

from peerd.core.addr import parse_addr, split_peer, with_peer
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay import Relay
from peerd.reach.relay.relay_limits import RelayConfig
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.worlds.network.attackers import Tally, attack

IDENTITIES = 6  # of an attacker's place
OPENED = 20  # circuits that attackers have before they report
CONFIG = RelayConfig(
    reservations_per_place=4,
    circuits_per_place=16,
    circuits_per_place_and_destination=4,
    circuit_stall_s=20,
    bytes_per_s=20e6,
)


class FromPlace(TcpTransport):
    """Connections leave from this address of loopback: for the other side, from another place."""

    def __init__(self, ip: str) -> None:
        super().__init__()
        self._ip = ip

    def _source(self, family: int, host: str) -> tuple[str, int] | None:
        return self._ip, 0


async def client(nursery: trio.Nursery, ip: str, relay: str) -> tuple[Host, Circuits]:
    """A host at `ip` that is connected to the relay."""
    addr, peer = split_peer(parse_addr(relay))
    assert peer is not None
    clock = RealClock()
    host = Host(Keypair.generate(clock.secure_bytes), clock, [FromPlace(ip)])
    circuits = Circuits(host, clock)
    host.add_transport(circuits)
    await nursery.start(host.run, [parse_addr(f"/ip4/{ip}/tcp/0")])
    await nursery.start(circuits.run)
    await host.connect(peer, [addr])
    return host, circuits


async def serve(addr: str, nursery: trio.Nursery) -> None:
    clock = RealClock()
    keys = Keypair.generate(clock.secure_bytes)
    host = Host(keys, clock, [TcpTransport()])
    relay = Relay(host, clock, keys, CONFIG)
    await nursery.start(host.run, [parse_addr(addr)])
    await nursery.start(relay.run)
    print(with_peer(host.listen_addrs()[0], host.id), flush=True)


async def attack_from(relay: str, ips: str, targets: str, nursery: trio.Nursery) -> None:
    addr, peer = split_peer(parse_addr(relay))
    assert peer is not None
    tally = Tally()
    for ip in ips.split(","):
        crew = [(await client(nursery, ip, relay))[1] for _ in range(IDENTITIES)]
        dial = functools.partial(FromPlace(ip).dial, addr)
        attack(crew, dial, (peer, addr), [PeerId.parse(text) for text in targets.split(",")], tally, nursery)
    while True:
        await trio.sleep(0.1)
        if tally.opened > OPENED:
            break
    print(f"{tally.opened} circuits opened in {tally.attempts} attempts", flush=True)


async def main(kind: str, *arguments: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon({"relay": serve, "attack": attack_from}[kind], *arguments, nursery)
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
            while await stdin.receive_some():
                pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
