"""Connectivity of a peer: builds and starts relays, hole punching, port mapping, AutoNAT and LAN discovery.

This module only composes the parts. Each part gets the host, and of the others only what is passed here. Used by the
daemon, and by any program with a Host of its own; needs neither torch nor a run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from peerd.core.clock import Clock
from peerd.core.keys import Keypair
from peerd.dht.dht import Dht
from peerd.reach.autonat import AutoNat, AutoNatConfig, port_of
from peerd.reach.gateway.router import Router
from peerd.reach.hole_puncher import HolePuncher
from peerd.reach.lan_discovery import Finder, LanDiscovery, own_finder
from peerd.reach.port_mapping import PortMapping, own_routers
from peerd.reach.reachability import advice
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay import Relay
from peerd.reach.relay.relay_client import RelayReservations
from peerd.reach.relay.relay_limits import RelayConfig
from peerd.rpc.rpc import Rpc
from peerd.run.runfile import LimitsSection
from peerd.wire.host.host import Host
from peerd.wire.host.upkeep import Upkeep

_RELAY_SHARE = 0.9  # of the line, for others' circuits; the rest is for encryption, headers and our own calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectivityConfig:
    """Settings of this peer's connectivity, and of its work as a relay for others."""

    relay: bool = False  # True: carry others' circuits
    relaying: RelayConfig = field(default_factory=RelayConfig)  # limits for these circuits
    routers: tuple[Router, ...] = ()  # routers to ask for a port mapping
    finder: Finder | None = None  # finds peers in the local network
    reach: AutoNatConfig = field(default_factory=AutoNatConfig)


def relaying(line: LimitsSection) -> RelayConfig:
    """Settings of the relay. If this peer's rate limits are known, circuits together stay below the lower one.

    The lower limit counts, because each relayed byte is received and sent.
    """
    mbit = min((most for most in (line.upload_mbit, line.download_mbit) if most), default=math.inf)
    return RelayConfig(bytes_per_s=_RELAY_SHARE * mbit * 125_000)


def own_surroundings(clock: Clock) -> ConnectivityConfig:
    """Configuration for this machine's network: its routers and LAN discovery, if the optional extras are installed."""
    return ConnectivityConfig(routers=tuple(own_routers(clock)), finder=own_finder(clock))


class Connectivity:
    """Connectivity services of one host. Start `run` after the host's."""

    def __init__(
        self,
        host: Host,
        net: tuple[Rpc | None, Dht | None],
        clock: Clock,
        keypair: Keypair,
        config: ConnectivityConfig | None = None,
    ) -> None:
        self._host = host
        self.config = config or ConnectivityConfig()
        self.circuits = Circuits(host, clock)
        self.reach = AutoNat(host, clock, self.config.reach)
        self.punching = HolePuncher(host, clock)
        self.reserving = RelayReservations(host, self.circuits, clock, net[1])
        self.relay = Relay(host, clock, keypair, self.config.relaying) if self.config.relay else None
        self.portmap = PortMapping(host, self.config.routers) if self.config.routers else None
        finder, dht = self.config.finder, net[1]
        self.lan = LanDiscovery(host, finder, dht.meet) if finder is not None and dht is not None else None
        host.add_transport(self.circuits)
        self.reach.count_relays(lambda: len(self.circuits.reservations))
        spare = not self.config.relay  # a relay needs no spare: its line is as good as another's
        self.reach.on_change(lambda finding: self.reserving.want(finding.needs_relays, spare=spare))
        self.reserving.on_change(self.reach.look)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run all parts until cancelled. A part that fails is restarted; the others keep running."""
        upkeep = Upkeep(self._host.faults)
        async with trio.open_nursery() as nursery:
            await nursery.start(upkeep.run, "circuits", self.circuits.run)
            if self.relay is not None:
                await nursery.start(upkeep.run, "relay", self.relay.run)
            await nursery.start(upkeep.run, "punching", self.punching.run)
            await nursery.start(upkeep.run, "reserving", self.reserving.run)
            await nursery.start(upkeep.run, "reach", self.reach.run)
            if self.portmap is not None:
                await nursery.start(upkeep.run, "portmap", self.portmap.run)
            if self.lan is not None:
                await nursery.start(upkeep.run, "lan", self.lan.run)
            task_status.started()

    def waits_for(self) -> str | None:
        """What this peer needs before others can reach it, in words. None if nothing is missing."""
        if self.reach.finding.needs_relays and not self.reach.finding.proven and not self.reserving.relays:
            return "a relay: without one nobody can connect to this peer"
        return None

    def status(self) -> dict[str, Any]:
        """Plain data for `peerd status`: the verdict on reachability, its meaning, and advice."""
        finding = self.reach.finding
        relay = asdict(self.relay.traffic()) if self.relay is not None else None
        relays = [str(peer) for peer in self.reserving.relays]
        told = {"advice": advice(finding, port_of(self._host), len(relays)), "relays": relays}
        ways: dict[str, Any] = {"punching": self.punching.status()}
        ways["portmap"] = self.portmap.status() if self.portmap is not None else None
        ways["lan"] = self.lan.status() if self.lan is not None else None
        more = {"takes_inbound": self._host.takes_inbound, "carries": relay}
        return self.reach.status() | told | more | ways
