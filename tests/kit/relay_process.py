"""A relay, or its attackers, as a process of its own on loopback: `python -m tests.kit.relay_process`.

    relay ADDR                 serves at ADDR; prints {"id", "addr"} and, every half second, what it carries and holds
    attack RELAY IPS TARGETS   attacks RELAY (with its /p2p) from each of IPS, aiming at the peers TARGETS too

Ends when stdin does, so that it cannot outlive its parent.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path

import trio

from peerd.core.addr import parse_addr, split_peer
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.machine.connectivity.relay import RelayConfig
from peerd.net.clock import RealClock
from peerd.net.host.host import Host
from peerd.net.relay.circuit_transport import Circuits
from peerd.net.tcp.tcp_transport import TcpTransport
from peerd.service.connectivity.relay import Relay
from tests.kit.attackers import Tally, flood, never_shake_hands, swallow

IDENTITIES = 6  # of an attacker's place
REPORT_S = 0.5  # between reports: the parent asks for the last and the highest figures
CONFIG = RelayConfig(
    reservations_per_place=4,
    circuits_per_place=16,
    circuits_per_place_and_destination=4,
    circuit_stall_s=20,
    bytes_per_s=20e6,
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class FromPlace(TcpTransport):
    """Connections leave from this address of loopback: for the other side, from another place."""

    def __init__(self, ip: str) -> None:
        super().__init__()
        self._ip = ip

    def _source(self, family: int, host: str) -> tuple[str, int] | None:
        return self._ip, 0


async def serve(addr: str, nursery: trio.Nursery) -> None:
    clock = RealClock()
    keys = Keypair.generate(clock.secure_bytes)
    host = Host(keys, clock, [TcpTransport()])
    relay = Relay(host, clock, keys, CONFIG)
    await nursery.start(host.run, [parse_addr(addr)])
    await nursery.start(relay.run)
    print(json.dumps({"id": str(host.id), "addr": str(host.listen_addrs()[0])}), flush=True)
    while True:
        print(json.dumps(asdict(relay.traffic()) | {"resident_bytes": resident_bytes()}), flush=True)
        await trio.sleep(REPORT_S)


async def attack(relay: str, ips: str, targets: str, nursery: trio.Nursery) -> None:
    addr, peer = split_peer(parse_addr(relay))
    assert peer is not None
    clock, tally = RealClock(), Tally()
    everyone = [PeerId.parse(text) for text in targets.split(",")]
    crews = []
    for ip in ips.split(","):
        for _ in range(IDENTITIES):
            host = Host(Keypair.generate(clock.secure_bytes), clock, [FromPlace(ip)])
            circuits = Circuits(host, clock)
            circuits.welcome = swallow  # type: ignore[method-assign]
            host.add_transport(circuits)
            await nursery.start(host.run, [parse_addr(f"/ip4/{ip}/tcp/0")])
            await nursery.start(circuits.run)
            await host.connect(peer, [addr])
            crews.append((host, circuits))
    everyone += [host.id for host, _ in crews]
    for host, circuits in crews:
        nursery.start_soon(flood, circuits, (peer, addr), everyone, random.Random(str(host.id)), tally)
    for ip in ips.split(","):
        nursery.start_soon(never_shake_hands, functools.partial(FromPlace(ip).dial, addr), nursery)
    while True:
        await trio.sleep(REPORT_S)
        print(json.dumps(asdict(tally)), flush=True)


async def main(kind: str, *arguments: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon({"relay": serve, "attack": attack}[kind], *arguments, nursery)
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
            while await stdin.receive_some():
                pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
