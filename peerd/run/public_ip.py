"""Classification of IP addresses: only hosts of the public internet may be contacted at a stranger's request.

All other addresses may lead into this machine, its network, or its provider's or cloud's network: loopback, private,
link-local, shared (100.64.0.0/10), multicast, reserved and documentation addresses, and IPv6 addresses that embed such
an IPv4 address. Pure functions; names are resolved elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")  # the IPv4 address is in the last 32 bits
_6TO4: Final = ipaddress.IPv6Network("2002::/16")  # in bits 16 to 47
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # global unicast, the only range assigned to hosts
_NO_HOSTS: Final = (
    ipaddress.IPv4Network("192.88.99.0/24"),  # 6to4 relay anycast
    ipaddress.IPv6Network("2001::/23"),  # IETF protocol assignments, such as Teredo
    ipaddress.IPv6Network("3fff::/20"),  # documentation
)
_NUMBER: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)


def is_public(ip: Ip) -> bool:
    """True if `ip` is an address of a host on the public internet."""
    if isinstance(ip, ipaddress.IPv6Address):
        carried = _carried(ip)
        if carried is not None:
            return is_public(carried)
        if ip not in _UNICAST:
            return False
    if any(ip.version == block.version and ip in block for block in _NO_HOSTS):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)


def _carried(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that is embedded in `ip` and that packets finally reach; None for a plain IPv6 address."""
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    if ip in _6TO4:
        return ipaddress.IPv4Address(int(ip) >> 80 & 0xFFFF_FFFF)
    return None


def host_fault(host: str) -> str | None:
    """Reason why the host of a URL is not public, or None for a public IP address and for a name.

    Names of this machine and of local networks are refused. Any other name may still resolve to a private address: the
    connection checks that.
    """
    try:
        return None if is_public(ipaddress.ip_address(host)) else "no address of the public internet"
    except ValueError:
        pass
    labels = host.removesuffix(".").split(".")
    if _NUMBER.fullmatch(labels[-1]):  # systems read 127.1, 0x7f.1 and 2130706433 as 127.0.0.1
        return "an IP address in an odd form"
    if labels[-1].lower() in ("localhost", "local", "internal", "lan", "home", "corp") or len(labels) == 1:
        return "a name of this machine or of its network"
    return None
