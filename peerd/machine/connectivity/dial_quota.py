"""Addresses that we only heard of: which of them may be dialed at all, and how often.

What peers say of addresses (their own or others') leads anywhere: to services on this machine, in our network or in
somebody else's, to hosts that should be flooded. So what is heard is dialed only if it is a literal address that is
public, of a network that this machine is in, or of the same private block (or of this machine) as the peer that named
it is connected from: it shows by that that it is there itself. The peer that named it is not always known; then all
that were ever connected have to be there. Names are dialed from the configuration only. `DialQuota` bounds the rest by
teller, by target, and in all; a target that answered as the peer it should be costs nothing. Opens nothing. Invariants:
what the book has of Means.DIALS is what was begun within a minute and has not led to its peer.
"""

from __future__ import annotations

import ipaddress
from collections import deque
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
from peerd.machine.budget.book import Book, Means, User
from peerd.machine.connectivity.happy_eyeballs import NetworkSurroundings
from peerd.machine.rate.quota import Quota

_MINUTE_S: Final = 60.0
_MEMORY: Final = b"\x89\x06"  # leads to this process only
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
NOBODY: Final = User("", "", "")  # told us: it is not known who


def blocks_of(remotes: Iterable[Multiaddr]) -> frozenset[str]:
    """The private blocks from which a peer is connected; "" stands for elsewhere, and over a relay for anywhere."""
    ips = (None if is_relayed(remote) else ip_of(remote) for remote in remotes)
    return frozenset((ip is not None and block_of(ip)) or "" for ip in ips)


def common(ever: Iterable[str]) -> frozenset[str]:
    """Private blocks that the teller is surely in, given those from which any peer was ever connected."""
    found = frozenset(ever)
    if "" in found:
        return frozenset()
    return found if found == {LOOPBACK} else found - {LOOPBACK}


@lru_cache(maxsize=64)
def rule_of(around: NetworkSurroundings, blocks: frozenset[str]) -> Callable[[bytes], bool]:
    """The rule by which addresses heard from a peer in these private blocks may be dialed, as `may_dial`.

    Answers are kept by address, since the DHT names the same ones over and over, and for each rule by itself: `around`
    is long to compare.
    """
    return lru_cache(maxsize=2048)(partial(may_dial, around=around, blocks=blocks))


def may_dial(raw: bytes, around: NetworkSurroundings, blocks: frozenset[str]) -> bool:
    """True when an address heard from a peer in these private blocks may be dialed."""
    try:
        addr = normal(decode_addr(raw))
    except ProtocolViolation:
        return False
    if is_relayed(addr):
        circuit = circuit_place(addr)
        if circuit is None or circuit.addr is None:
            return circuit is not None  # the relay is where the book says
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
    """The IPv4 address to which a gateway would take a packet to this IPv6 one; None: none would."""
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
    """Dials of addresses that we only heard of, within a minute."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._targets = Quota(HEARSAY_TARGET_PER_MINUTE)
        self._begun: deque[tuple[float, User]] = deque()  # oldest first

    def begin(self, now: float, addr: Multiaddr, teller: User) -> str | None:
        """Count one dial; why it must not be made now, or None. `teller`: NOBODY, where it is not known."""
        while self._begun and self._begun[0][0] <= now - _MINUTE_S:
            self._book.give(Means.DIALS, self._begun.popleft()[1])
        ip = ip_of(addr)
        if ip is None or is_relayed(addr):
            return None  # the way to the relay is a dial of its own
        target, user = self._names(addr, ip, teller)
        if self._targets.exceeded(now, (target,)) is not None:
            return f"{HEARSAY_TARGET_PER_MINUTE} dials to {target} within a minute led to nobody"
        why = self._book.take(Means.DIALS, user)
        if why is not None:
            return f"too many dials of addresses that others named: {why} within a minute"
        self._targets.count(now, (target,))
        self._begun.append((now, user))
        return None

    def worked(self, addr: Multiaddr, teller: User) -> None:
        """The peer that should be there answered one that was begun."""
        ip = ip_of(addr)
        if ip is None or is_relayed(addr):
            return
        target, user = self._names(addr, ip, teller)
        self._targets.take_back((target,))
        latest = next((entry for entry in reversed(self._begun) if entry[1] == user), None)
        if latest is not None:
            self._begun.remove(latest)
            self._book.give(Means.DIALS, user)

    def _names(self, addr: Multiaddr, ip: Ip, teller: User) -> tuple[str, User]:
        """The names under which a dial counts: its target, and the user that told. At home many peers share a machine,
        and each of its ports is a target.
        """
        place, region = place_of(ip)
        tcp = tcp_place(addr)
        target = place if block_of(ip) is None or tcp is None else f"{place} port {tcp.port}"
        # Where the teller is unknown, no place may be searched more than one teller could have it searched.
        return target, User("", f"to {place}", f"to {region}") if teller == NOBODY else teller
