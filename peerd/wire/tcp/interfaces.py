"""The IP addresses of this machine's interfaces, and the selection of those that other peers can use.

Reads them from the system through psutil; sends no packets. Excluded are interfaces that are down, bridges of
containers and virtual machines, and link-local IPv6 addresses, which are useless without the name of an interface.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from peerd.core.addr import Ip
from peerd.wire.happy_eyeballs import IpNetwork

IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

OWN_ADDRS: Final = 4  # of each IP version: leaves room for relayed and mapped addresses
_INSIDE: Final = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "lxc", "lxd", "cni", "flannel", "cali")
_HAS_GATEWAY: Final = 0x2  # RTF_GATEWAY
# Documentation addresses: connecting a datagram socket to one sends nothing, but selects the route's source address.
_FAR: Final = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}


@dataclass(frozen=True, slots=True)
class NetworkPlace:
    """This machine's addresses at one moment; those of its default routes come first."""

    interfaces: tuple[IpInterface, ...] = ()  # without loopback
    loopback: tuple[Ip, ...] = ()

    def hosts(self, version: int) -> list[str]:
        """Addresses of one IP version to announce, loopback last."""
        outside = [own.ip for own in self.interfaces if own.version == version][:OWN_ADDRS]
        return [str(ip) for ip in (*outside, *(ip for ip in self.loopback if ip.version == version))]

    def networks(self) -> tuple[IpNetwork, ...]:
        """The networks of the interfaces."""
        return tuple(own.network for own in self.interfaces)


def here() -> NetworkPlace:
    """Read this machine's current addresses; takes well below a millisecond."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    routed = [_route_address(version) for version in (4, 6)]
    found: list[IpInterface] = []
    loopback: set[Ip] = set()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        for entry in entries if name in up else ():
            own = _interface(entry.family, entry.address, entry.netmask)
            if own is not None and own.is_loopback:
                loopback.add(own.ip)
            elif own is not None and (own.ip in routed or not name.startswith(_INSIDE)):
                found.append(own)
    found.sort(key=lambda own: (own.ip not in routed, not own.is_global))  # stable
    # One of each version is enough for peers on this machine.
    first = [ipaddress.ip_address(text) for text in ("127.0.0.1", "::1")]
    return NetworkPlace(tuple(found), tuple(ip for ip in first if ip in loopback))


def gateway() -> str | None:
    """The router's IPv4 address from the routing table (Linux), else the first address of the default route's network.

    Returns None if it is unknown.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            _, target, router, flags, *_ = line.split("\t")
            if target == "00000000" and int(flags, 16) & _HAS_GATEWAY:
                return str(ipaddress.IPv4Address(int(router, 16).to_bytes(4, sys.byteorder)))
    own = next((own for own in here().interfaces if own.version == 4 and own.ip == _route_address(4)), None)
    return str(own.network.network_address + 1) if own is not None and own.network.num_addresses > 2 else None


def _interface(family: int, address: str, netmask: str | None) -> IpInterface | None:
    """Parse an interface's address. Returns None for non-IP and link-local IPv6 addresses."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
        bits = int(ipaddress.ip_address(netmask)).bit_count() if netmask else ip.max_prefixlen
        return None if ip.version == 6 and ip.is_link_local else ipaddress.ip_interface((ip, bits))
    except ValueError:
        return None


def _route_address(version: int) -> Ip | None:
    """This machine's source address on its default route, or None. Sends no packet."""
    family, far = _FAR[version]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except (OSError, ValueError):
        return None
