"""Happy eyeballs (RFC 8305) for peers behind home routers: the order in which a peer's addresses are tried, and when.

Decides only; `net/race.py` dials. Ways that worked come first, kinds of address take turns (so that three stale
addresses of one kind cost one step), relayed ones wait until direct ones have had a chance, and what failed lately
comes last. Hostile peers tell addresses that lead nowhere, or to others: they cost places of a bounded number, for a
bounded time, and never hold back an address of another kind for longer than a step.
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
from peerd.machine.budget.book import User

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

STAGGER_S: Final = 0.25  # RFC 8305's connection attempt delay
HEAD_START_S: Final = STAGGER_S + 0.5  # of direct addresses before relayed ones: a hand-shake across an ocean
NEAR_HEAD_START_S: Final = STAGGER_S  # of private ones alone: who is near answers in milliseconds, or is elsewhere
PARALLEL: Final = 6  # attempts at once for one peer
GIVE_WAY_S: Final = 4.0  # after this an attempt makes room for an untried address: three first packets went unanswered
FAILED_LATELY_S: Final = 120.0  # so long an address that failed comes after the others


@dataclass(slots=True)
class AddressHistory:
    """History of an address."""

    worked: int = 0  # 0: never; else the larger, the later
    failed_s: float = -math.inf  # when it last failed, unless it has worked since
    heard: User | None = None  # the teller; None: it is from our own configuration


@dataclass(frozen=True, slots=True)
class NetworkSurroundings:
    """Network surroundings of this peer; empty fields: not known."""

    networks: tuple[IpNetwork, ...] = ()  # that its interfaces are in
    listening: frozenset[Multiaddr] = frozenset()  # its own addresses: another peer named there is somewhere else
    public: frozenset[Ip] = frozenset()  # as others see it


class _Kind(IntEnum):
    """Kinds of direct address; they take turns in this order."""

    HERE = 0
    NEAR = 1  # private, in a network that both are in as far as we know
    PUBLIC_6 = 2
    PUBLIC_4 = 3
    NAME = 4
    ELSEWHERE = 5  # private, in a network that is not ours: routed to by chance, or a stranger's


def order(known: Mapping[Multiaddr, AddressHistory], around: NetworkSurroundings, now: float) -> list[Multiaddr]:
    """A peer's addresses, the most promising first."""
    late = {addr for addr, past in known.items() if now < past.failed_s + FAILED_LATELY_S or addr in around.listening}
    fresh = sorted((addr for addr in known if addr not in late), key=lambda addr: -known[addr].worked)
    direct = [addr for addr in fresh if not is_relayed(addr)]
    proven = [addr for addr in direct if known[addr].worked]
    apart = _apart(direct, around)
    rest = _by_turns([(addr, _kind(addr, around, apart=apart)) for addr in direct if not known[addr].worked])
    relayed = [addr for addr in fresh if is_relayed(addr)]
    return [*proven, *rest, *relayed, *sorted(late, key=lambda addr: (known[addr].failed_s, addr.to_bytes()))]


def _apart(addrs: Iterable[Multiaddr], around: NetworkSurroundings) -> bool:
    """True when the peer is certainly behind another router: its public IPv4 addresses and ours have none in common."""
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
    """All, by turns: one of each kind, then the second of each, and so on."""
    place: dict[Multiaddr, tuple[int, _Kind]] = {}
    count: dict[_Kind, int] = {}
    for addr, kind in addrs:
        count[kind] = count.get(kind, 0) + 1
        place[addr] = (count[kind], kind)
    return sorted(place, key=lambda addr: place[addr])


@dataclass(frozen=True, slots=True)
class Try:
    """Start an attempt."""

    addr: Multiaddr


@dataclass(frozen=True, slots=True)
class DropAttempt:
    """End this attempt; once it has, another address has its turn."""

    addr: Multiaddr


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s`, or an attempt ends, or an address is learned."""

    until_s: float


class HappyEyeballs:
    """The attempts to reach one peer. Invariants: at most PARALLEL at once, and each address once."""

    def __init__(self, now: float) -> None:
        self._began_s = self._next_s = now
        self._tried: set[Multiaddr] = set()
        self._running: dict[Multiaddr, float] = {}  # oldest first -> when it started
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
        """Head start of the direct attempts under way over a relay's."""
        direct = [addr for addr in self._running if not is_relayed(addr)]
        if any(reach(addr) == 2 for addr in direct):
            return HEAD_START_S
        return NEAR_HEAD_START_S if direct else 0.0

    def ended(self, now: float, addr: Multiaddr) -> None:
        """An attempt failed, or was dropped: the next need not wait."""
        if self._running.pop(addr, None) is not None:
            self._next_s = now
