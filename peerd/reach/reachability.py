"""Reachability of this peer, and the obstacle for peers that dial it: a verdict from the observations of many peers.

Inputs: where this peer listens, how each connected peer sees it, and the results of dial-backs. Outputs: which peer to
ask for a dial-back next, and a verdict with its reason. Peers lie, so each network (IPv4 /16, IPv6 /32) has one vote,
shared by its addresses and these by their peers: many identities in one place have one vote. A majority decides, for
each IP version separately; without a majority the result is the cautious one (not reachable, no candidate). Hostile
input: others' addresses, invented ports, false answers, answers about addresses that were not asked, floods of
observers. Invariants: an address is proven only after a dial-back to it was requested; private addresses are neither
candidates nor proven; at most one request per peer is pending; tables are bounded (limits.OBSERVERS).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from multiaddr import Multiaddr

from peerd.core.addr import ip_of, reach, tcp_addr, tcp_place
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER, OBSERVERS
from peerd.reach.network_votes import network_of, votes
from peerd.reach.observed_addrs import AddrObservers, ObservedAddr, version_of

__all__ = ["AskDialBack", "Kind", "ObservedAddr", "Reachability", "ReachabilityConfig", "ReachabilityVerdict", "advice"]

_VERSIONS = (4, 6)


class Kind(StrEnum):
    """Kind of obstacle between this peer and those that dial it."""

    UNKNOWN = "unknown"
    REACHABLE = "reachable"
    KEEPS_PORTS = "port-restricted"  # a router that maps our port to the same external port for everyone
    SYMMETRIC = "symmetric"  # a router that maps each connection to a different external port
    FIREWALL = "firewall"  # our own address is public, but strangers cannot connect
    DEAF = "not listening"


@dataclass(frozen=True, slots=True)
class ReachabilityVerdict:
    """The verdict. Addresses are public and without /p2p."""

    kind: Kind
    why: str
    proven: tuple[Multiaddr, ...] = ()  # strangers have connected to these
    candidates: tuple[Multiaddr, ...] = ()  # probable external addresses of our listening port
    dead: tuple[Multiaddr, ...] = ()  # our own public addresses that strangers could not reach
    needs_relays: bool = False  # there are peers outside, and no IPv4 address that is certainly ours is proven
    guessed: bool = False  # only one machine has seen our external port; others may see another one


@dataclass(frozen=True, slots=True)
class AskDialBack:
    """Action: ask `peer` to dial us back at one of `addrs`; report the result to `answered`."""

    peer: PeerId
    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachabilityConfig:
    """Settings of `Reachability`; times in seconds."""

    networks: int = 3  # number of networks whose answers are wanted
    at_once: int = 4  # pending requests
    patience_s: float = 4.0  # how long the first verdict waits for pending answers; a dial-back takes 3 s to fail
    refresh_s: float = 300.0  # interval after which an answer is refreshed
    again_s: float = 20.0  # least interval between two requests to one peer
    refused_s: float = 60.0  # pause after a peer refused a request
    forget_s: float = 900.0  # how long the answer of a departed peer counts


@dataclass(slots=True)
class _Answer:
    at: float
    place: Multiaddr
    asked: tuple[Multiaddr, ...]
    proven: Multiaddr | None  # None: all failed


@dataclass(slots=True)
class _Server:
    """A connected peer that performs dial-backs."""

    asked_at: float = -math.inf
    not_before: float = -math.inf
    due: bool = True  # its answer is missing, or older than the last change of addresses
    pending: tuple[Multiaddr, ...] | None = None
    asked_in: object = None  # the epoch of the last request; after an answer to an older epoch the next one stays due


class Reachability:
    """Finds out if others can dial this peer. Call `own`, `saw`, `lost`, `answered`; then perform `step`'s actions."""

    def __init__(self, rng: random.Random, config: ReachabilityConfig | None = None) -> None:
        self._rng = rng
        self._config = config or ReachabilityConfig()
        self._own: tuple[Multiaddr, ...] = ()
        self._given: tuple[Multiaddr, ...] = ()
        self._observers = AddrObservers()
        self._servers: dict[PeerId, _Server] = {}
        self._answers: dict[PeerId, _Answer] = {}  # the latest last
        self._epoch: tuple[object, object, object] = (), (), ()
        self.finding = ReachabilityVerdict(Kind.UNKNOWN, "no peer has been asked yet")

    # --- events ------------------------------------------------------------------------------------------------

    def own(self, listen: Iterable[Multiaddr], given: Iterable[Multiaddr] = ()) -> None:
        """Set the addresses where this peer listens, and others that surely lead there, such as a port mapping."""
        self._own, self._given = tuple(listen), tuple(given)

    def saw(self, now: float, sight: ObservedAddr) -> None:
        """Store what a connected peer reports: how it sees our address, and whether it performs dial-backs."""
        known = self._observers.get(sight.peer)
        gone = self._observers.put(sight)
        if gone is not None:
            self.lost(now, gone)
        if not sight.tests or not sight.outside or gone == sight.peer:
            self._servers.pop(sight.peer, None)
        elif sight.peer not in self._servers:
            # A peer that reconnects may see another address of ours than before.
            late = self._answers.get(sight.peer)
            self._servers[sight.peer] = _Server(asked_at=late.at if late is not None else -math.inf)
        elif known is not None and known.seen != sight.seen:
            self._servers[sight.peer].due = True

    def lost(self, now: float, peer: PeerId) -> None:
        """Record that the peer has disconnected."""
        self._observers.drop(peer)
        self._servers.pop(peer, None)

    def moved(self) -> None:
        """Record that this machine has moved to another network: all peers are asked again at once."""
        for server in self._servers.values():
            server.due, server.asked_at, server.not_before, server.asked_in = True, -math.inf, -math.inf, None

    def answered(self, now: float, peer: PeerId, *, tried: bool, proven: Multiaddr | None = None) -> None:
        """Record the result of the request to `peer`.

        `tried`: False if it refused or could not be asked. `proven`: the address at which it connected, if it did.
        """
        server, sight = self._servers.get(peer), self._observers.get(peer)
        asked = server.pending if server is not None else None
        if server is None or sight is None or asked is None:
            return
        server.pending = None
        if not tried or (proven is not None and proven not in asked):
            server.not_before = now + self._config.refused_s
            return
        server.due = server.asked_in is not self._epoch
        self._answers.pop(peer, None)
        self._answers[peer] = _Answer(now, sight.at, asked, proven)
        if len(self._answers) > OBSERVERS:  # more than are connected: drop the oldest answer of a departed peer
            del self._answers[next(gone for gone in self._answers if gone not in self._observers)]

    # --- actions -----------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[AskDialBack]:
        """Update `finding` and return the requests to send now."""
        for peer, answer in list(self._answers.items()):
            if peer not in self._observers and now - answer.at > self._config.forget_s:
                del self._answers[peer]
        self._notice_change()
        asks = self._ask(now)
        self.finding = self._judge(now)
        return asks

    def wake_at(self, now: float) -> float:
        """Time at which `step` next has something to do if no event happens."""
        times, covered = [math.inf], self._covered(now)
        for peer, server in self._servers.items():
            if server.pending is not None:
                overdue_at = server.asked_at + self._config.patience_s
                times += [overdue_at] if overdue_at > now else []
            elif self._own and ((ready_at := self._ready_at(server)) > now or self._is_useful(peer, covered)):
                times.append(max(ready_at, now))
        return min(times)

    def _ready_at(self, server: _Server) -> float:
        """Earliest time at which the server may be asked and there is a reason to."""
        config = self._config
        wanted = server.asked_at + (config.again_s if server.due else config.refresh_s)
        return max(wanted, server.not_before)

    def _notice_change(self) -> None:
        """If our addresses have changed, make all servers due again and drop the answers of departed peers."""
        ips = tuple(self._observers.view(version).ip for version in _VERSIONS)
        _, _, before = self._epoch
        epoch = (self._own, self._given, ips if any(ips) else before)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._answers = {peer: answer for peer, answer in self._answers.items() if peer in self._servers}
        for server in self._servers.values():
            server.due = True

    def _ask(self, now: float) -> list[AskDialBack]:
        asks: list[AskDialBack] = []
        if not self._own:
            return asks
        covered = self._covered(now)
        busy = sum(server.pending is not None for server in self._servers.values())
        ready = [p for p, s in self._servers.items() if s.pending is None and self._ready_at(s) <= now]
        self._rng.shuffle(ready)
        ready.sort(key=lambda peer: self._observers.place(peer) in covered)  # networks that were not asked yet first
        for peer in ready:
            sight, server = self._observers.get(peer), self._servers[peer]
            if busy + len(asks) >= self._config.at_once:
                break
            if sight is None or not self._is_useful(peer, covered):
                continue
            addrs = self._questionable(sight)
            if not addrs:
                server.not_before = now + self._config.again_s
                continue
            server.asked_at, server.pending, server.asked_in = now, addrs, self._epoch
            covered.append(self._observers.place(peer))
            asks.append(AskDialBack(peer, addrs))
        return asks

    def _is_useful(self, peer: PeerId, covered: list[str]) -> bool:
        """Return True if one more answer, from this peer, would add information."""
        wanted = self._config.networks
        if len(covered) < wanted:
            return True
        return self._observers.place(peer) not in covered and len(set(covered)) < wanted

    def _covered(self, now: float) -> list[str]:
        """Networks of the peers that have answered recently or have a request pending."""
        return [
            self._observers.place(peer)
            for peer, server in self._servers.items()
            if server.pending is not None or (not server.due and self._ready_at(server) > now)
        ]

    def _questionable(self, sight: ObservedAddr) -> tuple[Multiaddr, ...]:
        """Our addresses that this peer should dial: if it sees a public address of ours, only those at that address."""
        seen_ip = ip_of(sight.seen) if sight.seen is not None else None
        found = self._surely_ours()
        if sight.seen is not None and reach(sight.seen) == 2:
            found += [sight.seen] if sight.mapped else []
            found += [tcp_addr(str(seen_ip), port) for port in self._ports()]
        mapped = [self._observers.view(version).mapped for version in _VERSIONS]
        found += [addr for addr in mapped if addr is not None]
        if seen_ip is not None and seen_ip.is_global:
            found = [addr for addr in found if ip_of(addr) == seen_ip]
        return tuple(dict.fromkeys(found))[:ADDRS_PER_PEER]

    def _ports(self) -> list[int]:
        places = [tcp_place(addr) for addr in self._own if reach(addr) > 0]
        return sorted({place.port for place in places if place is not None})

    def _surely_ours(self) -> list[Multiaddr]:
        """Public addresses of this machine itself, and those of a router's port mapping."""
        return [addr for addr in (*self._given, *self._own) if reach(addr) == 2]

    # --- the verdict -------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> ReachabilityVerdict:
        outside = list(self._observers.outside())
        ours = self._surely_ours()
        candidates = tuple(self._candidates())
        if not self._own:
            return ReachabilityVerdict(
                Kind.DEAF, "this peer does not listen", (), candidates, needs_relays=bool(outside)
            )
        if self._answers and not self._may_turn(now):
            return self._decide(outside, candidates)
        if not self._servers and (dialed := _came_in(outside, self._presumed())):
            best = max(votes(dialed).items(), key=lambda pair: pair[1])[0]
            return ReachabilityVerdict(Kind.REACHABLE, "peers from outside have connected", (best,), candidates)
        needs_relays = bool(outside) and not _has_ip4(ours)
        return ReachabilityVerdict(Kind.UNKNOWN, self._why_unknown(outside), (), candidates, needs_relays=needs_relays)

    def _decide(self, outside: list[ObservedAddr], candidates: tuple[Multiaddr, ...]) -> ReachabilityVerdict:
        """Decide from the available answers, for each IP version separately."""
        ours, proven, dead = self._surely_ours(), list[Multiaddr](), list[Multiaddr]()
        for version in _VERSIONS:
            answers = [answer for answer in self._answers.values() if version_of(answer.place) == version]
            came_in = [pair for pair in _came_in(outside, ours) if version_of(pair[1]) == version]
            found = self._proven(answers, came_in)
            proven += found
            # One network alone cannot make us hide an address of this machine, unless it is the only one.
            told = {network_of(answer.place) for answer in answers}
            if not found and (len(told) > 1 or {network_of(sight.at) for sight in outside} <= told):
                dead += [addr for addr in ours if any(addr in answer.asked for answer in answers)]
        if proven:
            sure = _has_ip4(addr for addr in proven if addr in ours)
            why = f"peers from outside can connect to {proven[0]}"
            return ReachabilityVerdict(
                Kind.REACHABLE, why, tuple(proven), candidates, tuple(dead), needs_relays=not sure
            )
        kind, why = self._obstacle(ours)
        views = [self._observers.view(version) for version in _VERSIONS]
        guessed = kind == Kind.KEEPS_PORTS and all(view.port_observers < 2 for view in views)
        return ReachabilityVerdict(kind, why, (), candidates, tuple(dead), needs_relays=True, guessed=guessed)

    def _may_turn(self, now: float) -> bool:
        """Return True if there is no verdict yet and the pending requests could still outvote the answers."""
        since = now - self._config.patience_s
        young = [s for s in self._servers.values() if s.pending is not None and s.asked_at > since]
        return self.finding.kind == Kind.UNKNOWN and len(young) >= len(self._answers)

    def _proven(self, answers: list[_Answer], came_in: list[tuple[Multiaddr, Multiaddr]]) -> list[Multiaddr]:
        """Addresses that more networks reached than failed to reach; empty unless most networks reached us at all."""
        answers = [answer for answer in answers if answer.proven is None or self._is_ours(answer.proven)]
        entered = [(at, True) for at, _ in came_in]
        ok = votes([*((answer.place, answer.proven is not None) for answer in answers), *entered])
        if ok.get(True, 0.0) <= ok.get(False, 0.0):
            return []
        good: dict[Multiaddr, float] = {}
        for addr in [*(a.proven for a in answers if a.proven is not None), *(seen for _, seen in came_in)]:
            of_it = [(a.place, a.proven is not None) for a in answers if addr in a.asked and a.proven in (addr, None)]
            tally = votes([*of_it, *((at, True) for at, seen in came_in if seen == addr)])
            if reach(addr) == 2 and tally.get(True, 0.0) > tally.get(False, 0.0):
                good[addr] = tally[True]
        return sorted(good, key=lambda addr: -good[addr])

    def _is_ours(self, addr: Multiaddr) -> bool:
        """Return True while a proven address is still ours; the network may have changed since."""
        ip = self._observers.view(version_of(addr)).ip
        return ip is None or addr in self._own or addr in self._given or str(ip_of(addr)) == ip

    def _presumed(self) -> list[Multiaddr]:
        """Our listening addresses, and their external addresses behind a router that keeps our ports."""
        ips = [ip for version in _VERSIONS if (ip := self._observers.view(version).ip) is not None]
        return [*self._given, *self._own, *(tcp_addr(ip, port) for ip in ips for port in self._ports())]

    def _why_unknown(self, outside: list[ObservedAddr]) -> str:
        pending = [server for server in self._servers.values() if server.pending is not None]
        if not outside:
            return "no peer outside this network has been met"
        if pending:
            return "a peer is trying to connect" if len(pending) == 1 else f"{len(pending)} peers are trying to connect"
        if not self._servers:
            return "no peer outside this network offers to test it"
        return "no peer has tested it yet"

    def _obstacle(self, ours: list[Multiaddr]) -> tuple[Kind, str]:
        failed = f"peers from outside cannot connect ({len(self._answers)} asked)"
        views = [view for view in map(self._observers.view, _VERSIONS) if view.observers]
        seen = {view.ip for view in views if view.ip is not None}
        if ours and seen <= {str(ip_of(addr)) for addr in ours}:
            return Kind.FIREWALL, f"{failed}, though the address is this machine's own: a firewall"
        if any(view.split for view in views):
            return Kind.SYMMETRIC, f"{failed}; a router maps each connection to another port"
        mapped = next((view.mapped for view in views if view.mapped is not None), None)
        if mapped is not None and all(view.port_observers < 2 for view in views):
            return (
                Kind.KEEPS_PORTS,
                f"{failed}; one peer sees {mapped}: a second observer is needed to know if the port is stable",
            )
        if mapped is not None:
            return Kind.KEEPS_PORTS, f"{failed}; a router maps this peer to {mapped}"
        return Kind.KEEPS_PORTS, f"{failed}; how the router chooses ports is not known yet"

    def _candidates(self) -> list[Multiaddr]:
        """Public addresses that are probably ours: those that most observers see, and those of this machine itself."""
        found = self._surely_ours()
        for version in _VERSIONS:
            view = self._observers.view(version)
            if view.mapped is not None:
                found.append(view.mapped)
            elif view.ip is not None and not view.split:
                found += [tcp_addr(view.ip, port) for port in self._ports()]
        return list(dict.fromkeys(found))[:ADDRS_PER_PEER]

    def check(self) -> None:
        """Assert the invariants, for tests."""
        assert len(self._observers) <= OBSERVERS
        assert len(self._answers) <= OBSERVERS
        assert all(peer in self._observers for peer in self._servers)
        assert all(reach(addr) == 2 for addr in (*self.finding.proven, *self.finding.candidates, *self.finding.dead))
        assert sum(server.pending is not None for server in self._servers.values()) <= self._config.at_once


def _came_in(outside: list[ObservedAddr], own: Iterable[Multiaddr]) -> list[tuple[Multiaddr, Multiaddr]]:
    """Public peers that dialed one of these addresses of ours: pairs of the peer's address and ours."""
    allowed = set(own)
    dialed = [(s.at, s.seen) for s in outside if s.accepted and s.seen is not None]
    return [(at, seen) for at, seen in dialed if seen in allowed and reach(seen) == 2]


def _has_ip4(addrs: Iterable[Multiaddr]) -> bool:
    return any(version_of(addr) == 4 for addr in addrs)


def advice(finding: ReachabilityVerdict, port: int | None, relays: int) -> str:
    """The verdict and what the user can do about it, in one sentence.

    `port`: our listening port, if any. `relays`: number of relays that hold a reservation for us.
    """
    forward = f"forward TCP port {port} for full speed" if port is not None else "listen on a TCP port for full speed"
    inbound = "" if relays else "; others cannot connect until a relay is found"
    match finding.kind:
        case Kind.REACHABLE:
            return "reachable"
        case Kind.KEEPS_PORTS if finding.guessed:
            return f"behind a router: two peers outside are needed to find out if hole punching can work{inbound}"
        case Kind.KEEPS_PORTS:
            return f"behind a port-restricted NAT: direct connections by hole punching{inbound}"
        case Kind.FIREWALL:
            opened = f"open TCP port {port} for others to connect at once"
            return f"behind a firewall: direct connections by hole punching; {opened}{inbound}"
        case Kind.SYMMETRIC | Kind.DEAF if relays:
            return f"only through relays: {forward}"
        case Kind.SYMMETRIC | Kind.DEAF:
            return f"only by connecting to others: {forward}"
    return f"whether others can connect is not known yet: {finding.why}"
