"""Hearsay addresses, known only from other peers: which of them may be dialed, and how often.

Addresses reported by peers (their own or others') can lead anywhere: to services on this machine, in our network or in
another one, or to hosts that should be flooded. So a hearsay address is dialed only if it is a literal address that is
public, or in a network of this machine, or in the same private block (or on the same machine) as the reporting peer,
whose connection proves that it is there itself. If the reporter is unknown, every peer that was ever connected must be
there. Names are dialed only from the configuration. `DialQuota` bounds the number of dials per reporter, per target and
in total; a dial that reaches the expected peer is not counted. Opens no connections. Invariant: the book's use of
Resource.DIALS is the number of dials within the last minute that have not reached their peer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Final

from multiaddr import Multiaddr

from peerd.core.addr import (
    LOOPBACK,
    Ip,
    block_of,
    circuit_place,
    decode_addr,
    ip_of,
    is_dialable,
    is_relayed,
    normal,
    place_of,
    tcp_place,
)
from peerd.core.errors import ProtocolViolation
from peerd.core.limits import HEARSAY_TARGET_PER_MINUTE
from peerd.wire.budget.book import Book, Resource, User
from peerd.wire.budget.tab import MinuteTab
from peerd.wire.happy_eyeballs import NetworkSurroundings
from peerd.wire.rate.quota import Quota

_MEMORY: Final = b"\x89\x06"  # prefix of in-memory addresses, which stay within this process
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
NOBODY: Final = User("", "", "")  # the reporter of an address if it is unknown


def blocks_of(remotes: Iterable[Multiaddr]) -> frozenset[str]:
    """The private blocks that a peer is connected from; "" stands for a public address or a relay."""
    ips = (None if is_relayed(remote) else ip_of(remote) for remote in remotes)
    return frozenset((ip is not None and block_of(ip)) or "" for ip in ips)


def common(ever: Iterable[str]) -> frozenset[str]:
    """Private blocks to allow if the reporter of an address is unknown, given the blocks of all peers ever connected.

    Empty if any peer was connected from elsewhere; loopback counts only if all peers are on this machine.
    """
    found = frozenset(ever)
    if "" in found:
        return frozenset()
    return found if found == {LOOPBACK} else found - {LOOPBACK}


@lru_cache(maxsize=64)
def rule_of(around: NetworkSurroundings, blocks: frozenset[str]) -> Callable[[bytes], bool]:
    """`may_dial` for peers in these private blocks, as a function of the address.

    Results are cached per address, because the DHT reports the same ones repeatedly. Each rule has its own cache,
    because `around` is slow to compare.
    """
    return lru_cache(maxsize=2048)(partial(may_dial, around=around, blocks=blocks))


def may_dial(raw: bytes, around: NetworkSurroundings, blocks: frozenset[str]) -> bool:
    """Return True if an address (binary multiaddr) reported by a peer in these private blocks may be dialed."""
    try:
        addr = normal(decode_addr(raw))
    except ProtocolViolation:
        return False
    if is_relayed(addr):
        circuit = circuit_place(addr)
        if circuit is None or circuit.addr is None:
            return circuit is not None  # the relay's address comes from the peer store
        return may_dial(circuit.addr.to_bytes(), around, blocks)
    ip = ip_of(addr)
    if ip is None:
        return raw.startswith(_MEMORY)
    if ip.is_multicast or ip.is_unspecified or ip.is_reserved or ip.is_link_local or not is_dialable(addr):
        return False
    inner = _embedded(ip)
    if inner is not None and not inner.is_global:
        return False
    block = block_of(ip)
    if ip.is_global or (block is not None and block in blocks):
        return True
    return not ip.is_loopback and _is_near(ip, around)


def _embedded(ip: Ip) -> Ip | None:
    """The IPv4 address to which a gateway would forward a packet for this IPv6 address, or None."""
    if ip.version == 4:
        return None
    return ipaddress.IPv4Address(ip.packed[-4:]) if ip in _NAT64 else ip.sixtofour


def _is_near(ip: Ip, around: NetworkSurroundings) -> bool:
    if any(ip in network for network in around.networks):
        return True
    homes = [home for addr in around.listening if (home := ip_of(addr)) is not None and home.version == ip.version]
    bits = 24 if ip.version == 4 else 64
    return any(ip in ipaddress.ip_network((home, bits), strict=False) for home in homes if not home.is_loopback)


class DialQuota:
    """Bounds the number of dials to hearsay addresses within a minute."""

    def __init__(self, book: Book) -> None:
        self._targets = Quota(HEARSAY_TARGET_PER_MINUTE)
        self._dials = MinuteTab(book, Resource.DIALS)

    def begin(self, now: float, addr: Multiaddr, teller: User) -> str | None:
        """Count one dial and return None, or return the reason why it is not allowed now.

        `teller`: the peer that reported the address, or NOBODY if it is unknown.
        """
        self._dials.forget(now)
        ip = ip_of(addr)
        if ip is None or is_relayed(addr):
            return None  # the dial to the relay is counted separately
        target, user = self._names(addr, ip, teller)
        if self._targets.exceeded(now, (target,)) is not None:
            return f"{HEARSAY_TARGET_PER_MINUTE} dials to {target} within a minute did not reach the expected peer"
        why = self._dials.take(now, user)
        if why is not None:
            return f"too many dials of addresses reported by others: {why} within a minute"
        self._targets.count(now, (target,))
        return None

    def worked(self, addr: Multiaddr, teller: User) -> None:
        """Record that a dial reached the expected peer: it is no longer counted."""
        ip = ip_of(addr)
        if ip is None or is_relayed(addr):
            return
        target, user = self._names(addr, ip, teller)
        self._targets.take_back((target,))
        self._dials.take_back(user)

    def _names(self, addr: Multiaddr, ip: Ip, teller: User) -> tuple[str, User]:
        """The names that a dial is counted under: its target, and the reporter.

        In a private network many peers share a machine, so there each port is a target of its own.
        """
        place, region = place_of(ip)
        tcp = tcp_place(addr)
        target = place if block_of(ip) is None or tcp is None else f"{place} port {tcp.port}"
        # If the reporter is unknown, each target place has the quota of one reporter.
        return target, User("", f"to {place}", f"to {region}") if teller == NOBODY else teller
