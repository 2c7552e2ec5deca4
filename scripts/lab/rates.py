"""Hosts on one wide-area network, each behind an access line of a chosen rate.

The only interface of a host leads, as a pair of virtual cables, to a bridge in a namespace of its own (the WAN). A
token bucket at each end of the cable limits what the host sends and what it receives. Rates count Ethernet bytes: TCP
payload is about 4 % less.

    with Lab() as lab:
        server, client = lab.host("server", up_mbit=100, down_mbit=100), lab.host("client", up_mbit=10)
        served = server.popen([sys.executable, "-m", "http.server"])
        client.run(["curl", f"http://{server.ip}:8000"])
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .space import GSO_BYTES, Ground, Space, cable, call, ip

NETWORK = "203.0.113"  # reserved for examples (RFC 5737): nobody's address by accident
HOSTS = 250
GATEWAY = f"{NETWORK}.254"  # where packets to anywhere else go, and end: the WAN says that it has no route
QUEUE_MS = 50  # what waits at each end of a line before packets are dropped
BURST_MS = 2  # what may pass at once after a pause: the shorter, the sooner the rate is right
BURST_BYTES = 32768  # at least: more than one packet of GSO_BYTES


@dataclass(frozen=True, slots=True)
class Traffic:
    """Ethernet bytes that a host has sent and received since it is there."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


class Host(Space):
    """A machine on the WAN."""

    def __init__(self, name: str, label: str, wan: Space, number: int) -> None:
        super().__init__(name, label)
        self.ip = f"{NETWORK}.{number}"
        self._wan, self._port = wan, f"port{number}"
        cable(wan, self._port, self, "eth0")
        wan.links(f"link set {self._port} master bridge up")
        self.links(f"addr add {self.ip}/24 dev eth0", "link set eth0 up", f"route add default via {GATEWAY}")

    def limit(self, up_mbit: float | None, down_mbit: float | None) -> None:
        """Change the line's rates, in 10^6 bits per second; None: as fast as the machine can."""
        shape(self, "eth0", up_mbit)
        shape(self._wan, self._port, down_mbit)

    def traffic(self) -> Traffic:
        (link,) = json.loads(ip("-n", self.label, "-json", "-stats", "link", "show", "eth0"))
        return Traffic(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])


class Lab(Ground):
    """Hosts on one WAN that limits rates and has no delay."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: dict[str, Host] = {}

    def build(self) -> None:
        self.wan = self.add(Space("wan", self.label("wan")))
        self.wan.links("link add bridge type bridge", f"addr add {GATEWAY}/24 dev bridge", "link set bridge up")
        self.wan.set("net/ipv4/ip_forward", "1")

    def host(self, name: str, up_mbit: float | None = None, down_mbit: float | None = None) -> Host:
        """A new host with a line of these rates, in 10^6 bits per second; None: as fast as the machine can."""
        assert name not in self.hosts, f"there is a host {name} already"
        assert len(self.hosts) < HOSTS, "the WAN has no address left"
        host = Host(name, self.label(f"host-{name}"), self.wan, len(self.hosts) + 1)
        self.add(host)
        self.hosts[name] = host
        host.limit(up_mbit, down_mbit)
        return host


def shape(space: Space, device: str, rate_mbit: float | None) -> None:
    """Limit what leaves `space` through `device`."""
    if rate_mbit is None:
        call("tc", "-n", space.label, "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000")
        return
    bytes_per_ms = rate_mbit * 125
    burst = max(BURST_BYTES, int(bytes_per_ms * BURST_MS))
    limit = burst + max(int(bytes_per_ms * QUEUE_MS), 4 * GSO_BYTES)
    bucket = ["rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{burst}", "limit", f"{limit}"]
    call("tc", "-n", space.label, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
