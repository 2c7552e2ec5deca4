"""Hole punching: each side's role, which addresses to dial and when, and what is remembered of failed attempts.

The peer that was dialed over the relay is active: it dials the other's public addresses, then proposes a simultaneous
open, at most PUNCH_ATTEMPTS times. Then the pair pauses, longer after each failure, until either side's addresses
change. `PunchMemory` stores the pauses; the rest are pure functions. No IO: `reach/hole_puncher.py`
exchanges messages and dials. Invariants: tables are bounded; an address reported by a peer is dialed only if it is a
literal TCP address of a public host or in a network of this peer; few are dialed at a time, and no host often on
others' reports. Hostile input: a peer may report addresses of other hosts or in our own network, and may fail on
purpose forever. Source: libp2p specs `relay/DCUtR.md`.
"""

from __future__ import annotations

import ipaddress
import math
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr

from peerd.core.addr import Ip, decode_addr, ip_of, is_dialable, place_of, reach, split_peer, tcp_place
from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import (
    PUNCH_ADDRS,
    PUNCH_PAIRS,
    PUNCH_PER_MINUTE,
    PUNCH_PER_PEER_MINUTE,
    PUNCH_TARGET_PER_MINUTE,
)
from peerd.wire.rate.quota import Quota

FIRST_PAUSE_S: Final = 30.0  # after an attempt in which no connection succeeded
UNANSWERED_PAUSE_S: Final = 8.0  # after an attempt without an answer: the link over the relay may just have died
LONGEST_PAUSE_S: Final = 3600.0
_GROWTH: Final = 4.0
# Redialing an address: almost at once after a refusal, because the other side's packet may have opened the router by
# then. If a SYN is lost, the system repeats it only after 1 s, which is late; but a redial must not cross the answer.
_REFUSED_PAUSE_S: Final = 0.02
_REFUSED_PAUSE_MAX_S: Final = 0.25
_REFUSED_GROWTH: Final = 1.2
_REVERSE_MAX_S: Final = 2.0
_REVERSE_MIN_S: Final = 0.3
_REVERSE_RTTS: Final = 3.0  # for the connection and its handshake
_SILENCE_S: Final = 0.4
_SILENCE_RTTS: Final = 2.5


def speaks_first(agent: str, *, proposed: bool) -> bool:
    """Return True if we are the initiator of the handshake on a connection that both sides have dialed.

    `proposed`: we have proposed the simultaneous open. Between peers of this program both sides may be initiators: if
    one side's packet reaches a listening socket instead of a dialing one, there is an initiator in any case. js-libp2p
    never dials from its listening port, so what we reach there is its listener. go-libp2p is the initiator if it has
    proposed; the specification leaves this open.
    """
    return proposed or agent.startswith(("peerd/", "js-libp2p"))


def to_dial(claimed: Iterable[bytes | Multiaddr], own: Iterable[Multiaddr]) -> list[Multiaddr]:
    """The addresses reported by a peer that may be dialed, at most PUNCH_ADDRS, the nearest first.

    Private addresses are included only if one of our `own` is in the same network; otherwise they belong to strangers.
    """
    homes = [ip for addr in own if (ip := ip_of(addr)) is not None and reach(addr) == 1]
    found: dict[Multiaddr, int] = {}
    ports: dict[Ip, int] = {}
    for claim in claimed:
        addr = _literal(claim)
        ip = None if addr is None else ip_of(addr)
        if addr is None or ip is None or addr in found or addr in own:
            continue
        if reach(addr) == 0 or (reach(addr) == 1 and not any(_same_network(ip, home) for home in homes)):
            continue
        ports[ip] = ports.get(ip, 0) + 1
        if ports[ip] <= PUNCH_ADDRS // 2:
            found[addr] = reach(addr)
    return sorted(found, key=lambda addr: found[addr])[:PUNCH_ADDRS]


def _literal(claim: bytes | Multiaddr) -> Multiaddr | None:
    """The claim as a plain TCP address, or None; names are excluded because they could lead anywhere."""
    try:
        addr = split_peer(decode_addr(claim) if isinstance(claim, bytes) else claim)[0]
    except ProtocolViolation:
        return None
    place = tcp_place(addr)
    if place is None or not place.family.startswith("ip") or not is_dialable(addr):
        return None
    ip = ip_of(addr)
    return addr if ip is not None and not (ip.is_reserved or ip.is_link_local) else None


def _same_network(ip: Ip, home: Ip) -> bool:
    if ip.version != home.version:
        return False
    return ip in ipaddress.ip_network(f"{home}/{24 if ip.version == 4 else 64}", strict=False)


def place(candidates: Iterable[Multiaddr], seen: Iterable[Multiaddr], own: Iterable[Multiaddr]) -> list[Multiaddr]:
    """Addresses that show where we are: if they change, a new attempt is worthwhile. One false observer is ignored."""
    counts: dict[Ip, int] = {}
    first: dict[Ip, Multiaddr] = {}
    for addr in seen:
        ip = ip_of(addr)
        if ip is not None and reach(addr) == 2:
            counts[ip] = counts.get(ip, 0) + 1
            first.setdefault(ip, addr)
    most = max(counts, key=lambda ip: counts[ip], default=None)
    return [*candidates, *own, *([] if most is None else [first[most]])]


def to_offer(candidates: Iterable[Multiaddr], seen: Iterable[Multiaddr], own: Iterable[Multiaddr]) -> list[Multiaddr]:
    """The addresses that we offer: probable public ones, those that others saw most often, and private ones."""
    counts: dict[Multiaddr, int] = {}
    for addr in seen:
        if _literal(addr) is not None and reach(addr) == 2:
            counts[addr] = counts.get(addr, 0) + 1
    often = sorted(counts, key=lambda addr: -counts[addr])[: PUNCH_ADDRS // 2]
    mine = list(own)
    public = [addr for addr in mine if reach(addr) == 2]
    home = [addr for addr in mine if reach(addr) == 1][: PUNCH_ADDRS // 2]
    literal = [addr for addr in candidates if _literal(addr) is not None][:PUNCH_ADDRS]
    return list(dict.fromkeys([*public, *literal, *often, *home]))[: 2 * PUNCH_ADDRS]


def refused_pause_s(times: int, rng: random.Random) -> float:
    """Randomized pause in seconds before redialing an address that has refused `times` times in a row."""
    pause_s = min(_REFUSED_PAUSE_MAX_S, _REFUSED_PAUSE_S * _REFUSED_GROWTH ** min(times, 50))
    return pause_s * rng.uniform(0.5, 1.5)  # two synchronized sides would miss each other every time


def silence_s(rtt_s: float) -> float:
    """Timeout in seconds for redialing an address that does not answer. `rtt_s`: round trip over the relay."""
    return max(_SILENCE_S, _SILENCE_RTTS * rtt_s)


def reverse_s(rtt_s: float | None) -> float:
    """Time in seconds for dialing a peer's public addresses. `rtt_s`: round trip over the relay, if known.

    A router that drops unexpected packets uses up all of it; a reachable peer answers in half the time.
    """
    return _REVERSE_MAX_S if rtt_s is None else min(_REVERSE_MAX_S, _REVERSE_MIN_S + _REVERSE_RTTS * rtt_s)


@dataclass(slots=True)
class Pair:
    """A peer with which hole punching has failed."""

    failures: int
    unanswered: int  # of these failures
    due_s: float  # time of the next attempt
    reason: str
    theirs: frozenset[Hashable]  # the addresses and protocols that it reported then


class PunchMemory:
    """Results of earlier attempts, and a quota for dials that others ask for."""

    def __init__(self, rng: random.Random) -> None:
        self.pairs = BoundedDict[PeerId, Pair](PUNCH_PAIRS)  # oldest failure first
        self._rng = rng
        self._own: frozenset[Ip] = frozenset()
        self._quota = Quota(PUNCH_PER_PEER_MINUTE, PUNCH_TARGET_PER_MINUTE, PUNCH_PER_MINUTE)

    def look(self, own: Iterable[Multiaddr], peer: PeerId, theirs: Iterable[Hashable], now: float) -> tuple[bool, str]:
        """Decide whether to attempt hole punching with `peer` now; returns the decision and its reason.

        `own`: our addresses, of which only the hosts count, because many routers give each connection another port.
        `theirs`: what the peer reports about itself.
        """
        mine = frozenset(ip for addr in own if (ip := ip_of(addr)) is not None)
        if mine != self._own:
            self._own = mine
            self.pairs.clear()
            return True, "our addresses have changed"
        pair = self.pairs.get(peer)
        if pair is None:
            return True, "not tried yet"
        if pair.theirs != frozenset(theirs):
            del self.pairs[peer]
            return True, "its addresses or protocols have changed"
        if now >= pair.due_s:
            return True, f"{pair.failures} attempts failed, the last one long ago"
        return False, f"{pair.reason}; again in {pair.due_s - now:.0f} s"

    def failed(
        self, peer: PeerId, theirs: Iterable[Hashable], reason: str, now: float, *, answered: bool = True
    ) -> None:
        """Record a failed attempt. `answered`: the peer took part, so that the routers are the cause."""
        before = self.pairs.get(peer)
        failures, unanswered = (1, 0) if before is None else (before.failures + 1, before.unanswered)
        unanswered += not answered
        first_s, times = (FIRST_PAUSE_S, failures - unanswered) if answered else (UNANSWERED_PAUSE_S, unanswered)
        pause_s = min(LONGEST_PAUSE_S, first_s * _GROWTH ** min(times - 1, 10))
        due_s = now + pause_s * self._rng.uniform(0.75, 1.25)
        self.pairs[peer] = Pair(failures, unanswered, due_s, reason, frozenset(theirs))

    def succeeded(self, peer: PeerId) -> None:
        self.pairs.pop(peer, None)

    def due_s(self, peer: PeerId) -> float:
        """Time of the next attempt with this peer, or -inf if it may start at once."""
        pair = self.pairs.get(peer)
        return -math.inf if pair is None else pair.due_s

    def admit(self, peer: PeerId, addrs: Iterable[Multiaddr], now: float) -> list[Multiaddr]:
        """The addresses that `peer` may make us dial now, within the quotas per peer, per target and in total.

        They are counted as dialed.
        """
        admitted = []
        for addr in addrs:
            ip = ip_of(addr)
            if ip is None:
                continue
            names = peer, place_of(ip)[0], ""
            if self._quota.exceeded(now, names) is None:
                admitted.append(addr)
                self._quota.count(now, names)
        return admitted
