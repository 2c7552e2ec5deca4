"""Votes of strangers: a statement is accepted if most networks make it, however many identities one network has.

Each network (IPv4 /16, IPv6 /32) has one vote, shared equally by its addresses, and each address's part by its peers.
Independent of what is voted on. Hostile input: many identities at one address, many addresses in one network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from multiaddr import Multiaddr

from peerd.core.addr import ip_of

T = TypeVar("T")


def network_of(addr: Multiaddr) -> str:
    """The network that has one vote: the first 16 bits of an IPv4 address or 32 bits of an IPv6 address."""
    ip = ip_of(addr)
    if ip is None:
        return str(addr)
    return f"{ip.version}/{ip.packed[: 2 if ip.version == 4 else 4].hex()}"


def votes(told: Iterable[tuple[Multiaddr, T]]) -> dict[T, float]:
    """Weight of each statement made by peers at these addresses: one vote per network, split by address, then peer."""
    return shared((network_of(at), str(ip_of(at) or at), what) for at, what in told)


def shared(told: Iterable[tuple[str, str, T]]) -> dict[T, float]:
    """Like `votes`, for statements given as (network, address, statement)."""
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
    """The statement with more than half of the votes, or None."""
    found = votes(told)
    total = sum(found.values())
    return next((what for what, weight in found.items() if weight > total / 2 + 1e-9), None)
