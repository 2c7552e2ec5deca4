"""Hosts on a WAN with delays, rates and losses, at home behind routers of every kind.

    with WideLab(delay_ms=10) as lab:
        server = lab.host("server")                                      # public
        lonely = lab.host("lonely", "symmetric", up_mbit=10)             # behind a router of its own
        home = lab.router("home", "port-restricted", unexpected="reset", delay_ms=40)
        first, second = lab.host("first", home), lab.host("second", home)
        home.forward("tcp", 4001, first)
        home.forget()                                                    # all mappings
        home.line.cut(20)                                                # seconds

Every line to the WAN has a public address in a /16 of its own. LANs are fast and have 192.168.N.0/24.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from .nat import KINDS, ROUTED, Kind, Unexpected, forgotten, forwarded, renumbered, rules
from .rates import Traffic
from .space import Ground, Space, cable
from .wan import Line, Quality, Wan

FIRST_NETWORK = 2  # of 45.N.0.0/16
MOST = 200
NETFILTER = 12  # the family of netlink
FORGET_CONNECTIONS = struct.pack("=LHHLLBBH", 20, 1 << 8 | 2, 1 | 4, 7, 0, socket.AF_INET, 0, 0)  # CTNETLINK's DELETE,
# REQUEST | ACK, with no filter


class WideHost(Space):
    """A machine, on the WAN or on a LAN."""

    router: Router | None
    line: Line  # the one that leads to it: its own or its router's
    ip: str  # its own address
    public_ip: str  # what the WAN sees

    def traffic(self) -> Traffic:
        return self.line.traffic()


class Router(Space):
    """Between a LAN and its line to the WAN."""

    def __init__(self, label: str, name: str, number: int, kind: Kind, unexpected: Unexpected) -> None:
        super().__init__(name, label)
        self.kind, self.unexpected = kind, unexpected
        self.ip = f"45.{FIRST_NETWORK + number}.1.1"
        self._lan, self._inside = f"192.168.{number + 1}", 0
        self._key = number << 16  # of the outside ports; one more each time that it forgets
        self.line: Line

    def open(self, line: Line) -> None:
        """Begin to route; `line` is attached."""
        self.line = line
        address = f"{self.ip}/32" if self.kind in ROUTED else f"{self._lan}.1/24"
        self.links("link add lan0 type bridge", f"addr add {address} dev lan0", "link set lan0 up")
        self.set("net/ipv4/ip_forward", "1")
        self.rule(rules(self.kind, self.unexpected, self._key))

    def rule(self, commands: str) -> None:
        self.run(["nft", "-f", "-"], input=commands, text=True)

    def join(self, host: WideHost) -> None:
        """Put a host on the LAN."""
        self._inside += 1
        port = f"port{self._inside}"
        cable(self, port, host, "eth0")
        self.links(f"link set {port} master lan0 up")
        host.router, host.line = self, self.line
        if self.kind in ROUTED:
            host.ip = host.public_ip = f"45.{self.ip.split('.')[1]}.1.{self._inside + 1}"
            self.line.own(host.ip)
            self.links(f"route add {host.ip}/32 dev lan0")
            size, gateway = 32, self.ip
        else:
            host.ip, host.public_ip = f"{self._lan}.{self._inside + 9}", self.ip
            size, gateway = 24, f"{self._lan}.1"
        host.links(
            f"addr add {host.ip}/{size} dev eth0",
            "link set eth0 up",
            f"route add default via {gateway} dev eth0 onlink",
        )

    def forget(self) -> None:
        """Lose all mappings and connections, as a router that is switched off and on. New ones get other ports."""
        self._key += 1
        # The kernel's connections go last: what passes from then on is learnt anew, and nothing of that is emptied.
        self.rule(renumbered(self.kind, self._key) + forgotten(self.kind))
        with self.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER) as kernel:
            kernel.settimeout(10)
            kernel.send(FORGET_CONNECTIONS)
            (failed,) = struct.unpack_from("=i", kernel.recv(4096), 16)
        assert failed == 0, f"the kernel does not forget: {os.strerror(-failed)}"

    def forward(self, protocol: str, port: int, host: WideHost) -> None:
        """Lead a port of the router ("tcp" or "udp") to the same port of `host`, whoever sends."""
        assert host.router is self, f"{host.name} is not behind {self.name}"
        self.rule(forwarded(self.kind, protocol, port, host.ip))


class WideLab(Ground):
    """Hosts and routers on a WAN. `quality`, by the names of Quality, holds for lines that do not say otherwise."""

    def __init__(self, **quality: Any) -> None:
        super().__init__()
        self._quality = Quality(**quality)
        self.hosts: dict[str, WideHost] = {}
        self.routers: dict[str, Router] = {}
        self._lines = 0

    def build(self) -> None:
        self.wan = self.add(Wan(self.label("wan")))

    def router(self, name: str, kind: Kind, unexpected: Unexpected = "drop", **quality: Any) -> Router:
        """A router on the WAN with an empty LAN. `unexpected`: what it does with a SYN that it does not let in."""
        assert kind in KINDS, f"there is no router {kind}"
        assert name not in self.routers, f"there is a router {name} already"
        router = self.add(Router(self.label(f"router-{name}"), name, self._next(), kind, unexpected))
        router.open(self._line(router, router.ip, quality))
        self.routers[name] = router
        return router

    def host(self, name: str, at: Router | Kind = "none", unexpected: Unexpected = "drop", **quality: Any) -> WideHost:
        """A host behind `at`; a kind of router gives it one of its own. On the WAN itself by default."""
        assert name not in self.hosts, f"there is a host {name} already"
        assert not (isinstance(at, Router) and quality), "a line belongs to the router"
        if isinstance(at, str) and at != "none":
            at = self.router(name, at, unexpected, **quality)
        host = self.add(WideHost(name, self.label(f"host-{name}")))
        if isinstance(at, Router):
            at.join(host)
        else:
            host.router, host.ip = None, f"45.{FIRST_NETWORK + self._next()}.1.1"
            host.public_ip, host.line = host.ip, self._line(host, host.ip, quality)
        self.hosts[name] = host
        return host

    def _line(self, space: Space, address: str, quality: dict[str, Any]) -> Line:
        chosen = {name: getattr(self._quality, name) for name in Quality.__dataclass_fields__} | quality
        return self.wan.attach(space, address, Quality(**chosen))

    def _next(self) -> int:
        self._lines += 1
        assert self._lines <= MOST, "the WAN has no address left"
        return self._lines - 1
