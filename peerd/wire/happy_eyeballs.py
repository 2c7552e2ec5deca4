"""Happy eyeballs (RFC 8305) for peers behind home routers: the order in which a peer's addresses are tried, and when.

This module decides; `wire/race.py` dials. Addresses that worked come first. Then the kinds of address take turns, so
that three stale addresses of one kind cost one step. Relayed addresses wait until direct ones have had a chance, and
recently failed ones come last. Hostile peers report addresses that lead nowhere or to others: each costs one of a
bounded number of attempts for a bounded time, and never delays an address of another kind by more than a step.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from multiaddr import Multiaddr

from peerd.core.addr import Ip, ip_of, is_relayed, reach
from peerd.wire.budget.book import User

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

STAGGER_S: Final = 0.25  # RFC 8305's connection attempt delay
HEAD_START_S: Final = STAGGER_S + 0.5  # of direct addresses over relayed ones; fits a handshake across an ocean
NEAR_HEAD_START_S: Final = STAGGER_S  # if only private addresses are tried: a nearby peer answers in milliseconds
PARALLEL: Final = 6  # concurrent attempts per peer
GIVE_WAY_S: Final = 4.0  # age at which an attempt yields to an untried address: three SYN packets went unanswered
FAILED_LATELY_S: Final = 120.0  # how long a failed address is tried only after the others


@dataclass(slots=True)
class AddressHistory:
    """What is known about an address from earlier attempts."""

    worked: int = 0  # 0: never; otherwise larger for a more recent success
    failed_s: float = -math.inf  # time of the last failure, unless it has worked since
    heard: User | None = None  # the peer that reported it, or None if it is from our own configuration


@dataclass(frozen=True, slots=True)
class NetworkSurroundings:
    """The networks and addresses of this peer; fields are empty if unknown."""

    networks: tuple[IpNetwork, ...] = ()  # networks of its interfaces
    listening: frozenset[Multiaddr] = frozenset()  # its own listening addresses; no other peer can be there
    public: frozenset[Ip] = frozenset()  # its public addresses as others see them


class _Kind(IntEnum):
    """Kinds of direct address, in the order in which they take turns."""

    HERE = 0
    NEAR = 1  # private, in a network that both peers seem to be in
    PUBLIC_6 = 2
    PUBLIC_4 = 3
    NAME = 4
    ELSEWHERE = 5  # private, in a network that is not ours; it may lead to a stranger


def order(known: Mapping[Multiaddr, AddressHistory], around: NetworkSurroundings, now: float) -> list[Multiaddr]:
    """A peer's addresses, most promising first."""
    late = {addr for addr, past in known.items() if now < past.failed_s + FAILED_LATELY_S or addr in around.listening}
    fresh = sorted((addr for addr in known if addr not in late), key=lambda addr: -known[addr].worked)
    direct = [addr for addr in fresh if not is_relayed(addr)]
    proven = [addr for addr in direct if known[addr].worked]
    apart = _apart(direct, around)
    rest = _by_turns([(addr, _kind(addr, around, apart=apart)) for addr in direct if not known[addr].worked])
    relayed = [addr for addr in fresh if is_relayed(addr)]
    return [*proven, *rest, *relayed, *sorted(late, key=lambda addr: (known[addr].failed_s, addr.to_bytes()))]


def _apart(addrs: Iterable[Multiaddr], around: NetworkSurroundings) -> bool:
    """Return True if the peer is certainly behind another router: it shares no public IPv4 address with us."""
    ours = {ip for ip in around.public if ip.version == 4}
    theirs = {ip for addr in addrs if (ip := ip_of(addr)) is not None and ip.version == 4 and reach(addr) == 2}
    return bool(ours) and bool(theirs) and not ours & theirs


def _kind(addr: Multiaddr, around: NetworkSurroundings, *, apart: bool) -> _Kind:
    ip = ip_of(addr)
    if ip is None:
        return _Kind.NAME
    if ip.is_loopback:
        return _Kind.HERE
    if reach(addr) == 2:
        return _Kind.PUBLIC_6 if ip.version == 6 else _Kind.PUBLIC_4
    shared = not around.networks or any(ip in network for network in around.networks)
    return _Kind.NEAR if shared and not apart else _Kind.ELSEWHERE


def _by_turns(addrs: Sequence[tuple[Multiaddr, _Kind]]) -> list[Multiaddr]:
    """All addresses in turns: the first of each kind, then the second of each, and so on."""
    place: dict[Multiaddr, tuple[int, _Kind]] = {}
    count: dict[_Kind, int] = {}
    for addr, kind in addrs:
        count[kind] = count.get(kind, 0) + 1
        place[addr] = (count[kind], kind)
    return sorted(place, key=lambda addr: place[addr])


@dataclass(frozen=True, slots=True)
class Try:
    """Action: start an attempt."""

    addr: Multiaddr


@dataclass(frozen=True, slots=True)
class DropAttempt:
    """Action: cancel this attempt; another address is tried once it has ended."""

    addr: Multiaddr


@dataclass(frozen=True, slots=True)
class Wait:
    """Action: wait until `until_s`, until an attempt ends, or until a new address is known."""

    until_s: float


class HappyEyeballs:
    """The attempts to reach one peer. Invariants: at most PARALLEL at once, and each address only once."""

    def __init__(self, now: float) -> None:
        self._began_s = self._next_s = now
        self._tried: set[Multiaddr] = set()
        self._running: dict[Multiaddr, float] = {}  # start time by address, oldest first
        self._dropped: set[Multiaddr] = set()

    @property
    def idle(self) -> bool:
        return not self._running

    def next(self, now: float, addrs: Sequence[Multiaddr]) -> Try | DropAttempt | Wait:
        """The next action, given all addresses known now, best first."""
        addr = next((addr for addr in addrs if addr not in self._tried), None)
        if addr is None:
            return Wait(math.inf)
        start_s = self._next_s
        if is_relayed(addr):
            start_s = max(start_s, self._began_s + self._head_start_s())
        if now < start_s:
            return Wait(start_s)
        if len(self._running) >= PARALLEL:
            oldest, since_s = next(iter(self._running.items()))
            if now < since_s + GIVE_WAY_S:
                return Wait(since_s + GIVE_WAY_S)
            if oldest in self._dropped:
                return Wait(math.inf)
            self._dropped.add(oldest)
            return DropAttempt(oldest)
        self._tried.add(addr)
        self._running[addr] = now
        self._next_s = now + STAGGER_S
        return Try(addr)

    def _head_start_s(self) -> float:
        """Head start in seconds of the running direct attempts over relayed addresses."""
        direct = [addr for addr in self._running if not is_relayed(addr)]
        if any(reach(addr) == 2 for addr in direct):
            return HEAD_START_S
        return NEAR_HEAD_START_S if direct else 0.0

    def ended(self, now: float, addr: Multiaddr) -> None:
        """Record that an attempt failed or was dropped, so that the next one may start at once."""
        if self._running.pop(addr, None) is not None:
            self._next_s = now
