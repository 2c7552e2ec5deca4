"""Hole punching: the part of each side, where to dial and when, and what is remembered of pairs that failed.

The peer that was dialed over the relay acts: it dials the other's public addresses, then proposes a simultaneous
open, at most PUNCH_ATTEMPTS times; after that the pair rests, each time longer, until either side's addresses change.
`PunchMemory` holds that; the rest are pure functions. Drives nothing: `service/connectivity/dcutr.py` talks and dials.
Invariants: tables are bounded; what a peer claims is dialed only if it is a literal TCP address of a public host or of
a network that this peer is in, few at a time, and no host is dialed often because others say so.
A hostile peer may claim addresses of somebody else, or of our own network, and may fail on purpose for ever.
Source: libp2p specs `relay/DCUtR.md`.
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
from peerd.machine.rate.quota import Quota

FIRST_PAUSE_S: Final = 30.0  # after a meeting in which nothing came through
UNANSWERED_PAUSE_S: Final = 8.0  # after one that did not take place: the link over the relay may just have died
LONGEST_PAUSE_S: Final = 3600.0
_GROWTH: Final = 4.0
# Dialing one address again: at once when a router refuses, as the other side's packet may pass by then; a request
# that is lost in silence is repeated by the system after 1 s, which is late, and must not cross its own answer.
_REFUSED_PAUSE_S: Final = 0.02
_REFUSED_PAUSE_MAX_S: Final = 0.25
_REFUSED_GROWTH: Final = 1.2
_REVERSE_MAX_S: Final = 2.0
_REVERSE_MIN_S: Final = 0.3
_REVERSE_RTTS: Final = 3.0  # the connection, and its hand-shake
_SILENCE_S: Final = 0.4
_SILENCE_RTTS: Final = 2.5


def speaks_first(agent: str, *, proposed: bool) -> bool:
    """True when we act as the initiator of the hand-shake on a connection that both sides have dialed.

    `proposed`: we have proposed the meeting. Between peers of this program both may speak first: should one of the two
    packets find the other side listening instead of dialing, there is an initiator all the same. js never dials from
    its listening port, so that whatever we reach there is its listener. go is initiator when it has proposed; the
    specification leaves it open.
    """
    return proposed or agent.startswith(("peerd/", "js-libp2p"))


def to_dial(claimed: Iterable[bytes | Multiaddr], own: Iterable[Multiaddr]) -> list[Multiaddr]:
    """Those of a peer's claimed addresses that may be dialed, at most PUNCH_ADDRS, the nearest first.

    Private addresses only if one of our `own` is in the same network: elsewhere they are a stranger's.
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
    """A plain TCP address without names, which could lead anywhere."""
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
    """Our location: the addresses whose change makes new attempts worthwhile. One dissenting witness changes
    nothing.
    """
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
    """Addresses that we offer: those that are probably ours, those that others saw most often, those at home."""
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
    """Randomized pause before dialing again an address that has refused `times` times in a row."""
    pause_s = min(_REFUSED_PAUSE_MAX_S, _REFUSED_PAUSE_S * _REFUSED_GROWTH ** min(times, 50))
    return pause_s * rng.uniform(0.5, 1.5)  # two sides in step would miss each other every time


def silence_s(rtt_s: float) -> float:
    """Time-out after which an address that does not answer is dialed anew; `rtt_s`: over the relay."""
    return max(_SILENCE_S, _SILENCE_RTTS * rtt_s)


def reverse_s(rtt_s: float | None) -> float:
    """Seconds for dialing the public addresses of a peer that may be reachable; `rtt_s`: over the relay, if known.

    A router that drops what it does not expect costs all of it, and those who can be reached answer in half.
    """
    return _REVERSE_MAX_S if rtt_s is None else min(_REVERSE_MAX_S, _REVERSE_MIN_S + _REVERSE_RTTS * rtt_s)


@dataclass(slots=True)
class Pair:
    """A peer with which punching has failed."""

    failures: int
    unanswered: int  # of these
    due_s: float  # when to try again
    reason: str
    theirs: frozenset[Hashable]  # what it said of itself then


class PunchMemory:
    """Results of former meetings, and a quota for what others have us dial."""

    def __init__(self, rng: random.Random) -> None:
        self.pairs = BoundedDict[PeerId, Pair](PUNCH_PAIRS)  # the one that failed longest ago first
        self._rng = rng
        self._own: frozenset[Ip] = frozenset()
        self._quota = Quota(PUNCH_PER_PEER_MINUTE, PUNCH_TARGET_PER_MINUTE, PUNCH_PER_MINUTE)

    def look(self, own: Iterable[Multiaddr], peer: PeerId, theirs: Iterable[Hashable], now: float) -> tuple[bool, str]:
        """Decision whether to meet `peer` now, and why; `own`: our addresses, `theirs`: what the peer says of itself.

        Of our addresses the hosts count: many routers give each connection another port.
        """
        mine = frozenset(ip for addr in own if (ip := ip_of(addr)) is not None)
        if mine != self._own:
            self._own = mine
            self.pairs.clear()
            return True, "our addresses are new"
        pair = self.pairs.get(peer)
        if pair is None:
            return True, "not tried yet"
        if pair.theirs != frozenset(theirs):
            del self.pairs[peer]
            return True, "it is not what it was: other addresses, or it has learned to meet"
        if now >= pair.due_s:
            return True, f"{pair.failures} meetings failed, the last one long ago"
        return False, f"{pair.reason}; again in {pair.due_s - now:.0f} s"

    def failed(
        self, peer: PeerId, theirs: Iterable[Hashable], reason: str, now: float, *, answered: bool = True
    ) -> None:
        """A whole meeting came to nothing; `answered`: the peer took part, so that it is the routers that forbid it."""
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
        """Time of the next look at this peer; -inf: at once."""
        pair = self.pairs.get(peer)
        return -math.inf if pair is None else pair.due_s

    def admit(self, peer: PeerId, addrs: Iterable[Multiaddr], now: float) -> list[Multiaddr]:
        """Those of the addresses that `peer` may have us dial now; they are counted as dialed.

        Bounded by peer, by target, and in all.
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
