"""Votes of strangers: a statement is believed if most networks make it, however many identities one network has.

Each network (IPv4 /16, IPv6 /32) has one vote, shared by its addresses, and each address's by its peers. Knows nothing
of what is voted on. Hostile input: many identities at one address, many addresses in one network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from multiaddr import Multiaddr

from peerd.core.addr import ip_of

T = TypeVar("T")


def network_of(addr: Multiaddr) -> str:
    """The network that counts as one voice: the first 16 bits of an IPv4 address, 32 of an IPv6 one."""
    ip = ip_of(addr)
    if ip is None:
        return str(addr)
    return f"{ip.version}/{ip.packed[: 2 if ip.version == 4 else 4].hex()}"


def votes(told: Iterable[tuple[Multiaddr, T]]) -> dict[T, float]:
    """Weighted votes on what peers at these addresses say: one vote per network, shared by addresses, then by peers."""
    return shared((network_of(at), str(ip_of(at) or at), what) for at, what in told)


def shared(told: Iterable[tuple[str, str, T]]) -> dict[T, float]:
    """The result of `votes`, for statements by (network, address)."""
    networks: dict[str, dict[str, list[T]]] = {}
    for network, address, what in told:
        networks.setdefault(network, {}).setdefault(address, []).append(what)
    found: dict[T, float] = {}
    for hosts in networks.values():
        for said in hosts.values():
            for what in said:
                found[what] = found.get(what, 0.0) + 1 / (len(hosts) * len(said))
    return found


def majority(told: Iterable[tuple[Multiaddr, T]]) -> T | None:
    """The statement that more than half of the votes are for; None: there is none."""
    found = votes(told)
    total = sum(found.values())
    return next((what for what, weight in found.items() if weight > total / 2 + 1e-9), None)
