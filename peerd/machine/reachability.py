"""Can others reach this peer, and if not, what stands in the way? The verdict, from what many peers say.

Told: where this peer listens, how each connected peer sees it, and what came of dial-backs. Answers: whom to ask next,
and a Finding with its reason. Peers lie, so each network (IPv4 /16, IPv6 /32) has one vote, shared by its addresses,
and these by their peers: who has many identities in one place has one vote. A majority decides; where none is, the
answer is the cautious one (not reachable, no candidate). Hostile input: addresses of others, made-up ports, false
answers, answers that name what was never asked, floods of observers.
Invariants: an address is proven only after it was asked about; no private address is a candidate or proven; at most
one question per peer is under way; tables are bounded (limits.OBSERVERS).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from multiaddr import Multiaddr

from peerd.core.addr import ip_of, reach, tcp_addr, tcp_place
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER, OBSERVERS
from peerd.machine.votes import majority, network_of, votes


class Kind(StrEnum):
    """What lies between this peer and those who want to reach it."""

    UNKNOWN = "unknown"
    REACHABLE = "reachable"
    KEEPS_PORTS = "port-restricted"  # a router that gives our port one outside port, whoever looks
    SYMMETRIC = "symmetric"  # a router that gives each connection another one
    FIREWALL = "firewall"  # our own address is public, but strangers don't get through
    DEAF = "not listening"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict. Addresses are public and without /p2p."""

    kind: Kind
    why: str
    proven: tuple[Multiaddr, ...] = ()  # strangers got through there
    candidates: tuple[Multiaddr, ...] = ()  # where our listening port probably appears to the outside
    dead: tuple[Multiaddr, ...] = ()  # our own public addresses that strangers tried in vain
    needs_relays: bool = False  # there is an outside, and no address of this machine itself is proven


@dataclass(frozen=True, slots=True)
class Sight:
    """How one connected peer sees us. `seen`: None when it did not say."""

    peer: PeerId
    at: Multiaddr  # where the peer is, as we see it
    seen: Multiaddr | None
    mapped: bool  # `seen` belongs to our listening port: we dialed from it, or the peer dialed `seen`
    accepted: bool  # the peer dialed
    tests: bool  # it answers our questions


@dataclass(frozen=True, slots=True)
class Ask:
    """Have `peer` dial us back at one of `addrs`; the outcome goes to `answered`."""

    peer: PeerId
    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachabilityConfig:
    """Times in seconds."""

    networks: int = 3  # whose answers are wanted
    at_once: int = 4  # questions under way
    patience_s: float = 4.0  # the first verdict waits so long for those who were asked; a dial-back takes 3 s to fail
    refresh_s: float = 300.0  # then an answer is asked for again
    again_s: float = 20.0  # the least between two questions to one peer
    refused_s: float = 60.0  # a peer that would not say is left alone for so long
    forget_s: float = 900.0  # an answer of a peer that has left counts no longer


@dataclass(slots=True)
class _Answer:
    at: float
    place: Multiaddr
    asked: tuple[Multiaddr, ...]
    proven: Multiaddr | None  # None: all failed


@dataclass(slots=True)
class _Server:
    """A connected peer that may be asked."""

    asked_at: float = -math.inf
    not_before: float = -math.inf
    due: bool = True  # its answer is missing, or from before the last change
    pending: tuple[Multiaddr, ...] | None = None


@dataclass(slots=True)
class _View:
    """What the observers agree on, for one IP version."""

    ip: str | None = None
    mapped: Multiaddr | None = None
    split: bool = False  # several see the mapped port, and not the same
    observers: int = 0


class Reachability:
    """See the module's header. Feed it with `own`, `saw`, `lost`, `answered`, then do what `step` says."""

    def __init__(self, rng: random.Random, config: ReachabilityConfig | None = None) -> None:
        self._rng = rng
        self._config = config or ReachabilityConfig()
        self._own: tuple[Multiaddr, ...] = ()
        self._given: tuple[Multiaddr, ...] = ()
        self._sights: dict[PeerId, Sight] = {}
        self._servers: dict[PeerId, _Server] = {}
        self._answers: dict[PeerId, _Answer] = {}
        self._epoch: tuple[object, object, object] = (), (), ()
        self.finding = Finding(Kind.UNKNOWN, "nobody has been asked yet")

    # --- what happens ------------------------------------------------------------------------------------------

    def own(self, listen: Iterable[Multiaddr], given: Iterable[Multiaddr] = ()) -> None:
        """Where this peer listens, and addresses that lead there for certain, such as those that a router promised."""
        self._own, self._given = tuple(listen), tuple(given)

    def saw(self, now: float, sight: Sight) -> None:
        """A connected peer has told how it sees us, or what it serves."""
        if sight.seen is not None and (tcp_place(sight.seen) is None or ip_of(sight.seen) is None):
            sight = replace(sight, seen=None)
        known = self._sights.pop(sight.peer, None)
        self._sights[sight.peer] = sight
        if len(self._sights) > OBSERVERS:
            self.lost(now, next(iter(self._sights)))
        if not sight.tests or not _outside(sight):
            self._servers.pop(sight.peer, None)
        elif sight.peer not in self._servers:
            # Whoever comes back may see another address of ours than before.
            late = self._answers.get(sight.peer)
            self._servers[sight.peer] = _Server(asked_at=late.at if late is not None else -math.inf)
        elif known is not None and known.seen != sight.seen:
            self._servers[sight.peer].due = True

    def lost(self, now: float, peer: PeerId) -> None:
        """The peer is not connected any more."""
        self._sights.pop(peer, None)
        self._servers.pop(peer, None)

    def answered(self, now: float, peer: PeerId, *, tried: bool, proven: Multiaddr | None = None) -> None:
        """What came of the question to `peer`; not `tried`: it would not, or we could not ask. `proven`: it got in."""
        server = self._servers.get(peer)
        asked = server.pending if server is not None else None
        if server is None or asked is None:
            return
        server.pending = None
        sight = self._sights[peer]
        if not tried or (proven is not None and proven not in asked):
            server.not_before = now + self._config.refused_s
            return
        server.due = False
        self._answers[peer] = _Answer(now, sight.at, asked, proven)

    # --- what to do --------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Ask]:
        """Look at everything again: `finding` is up to date afterwards. Returns the questions to ask now."""
        for peer, answer in list(self._answers.items()):
            if peer not in self._sights and now - answer.at > self._config.forget_s:
                del self._answers[peer]
        self._notice_change()
        asks = self._ask(now)
        self.finding = self._judge(now)
        return asks

    def wake_at(self, now: float) -> float:
        """When `step` has something to do by the passing of time alone."""
        times = [math.inf]
        for peer, server in self._servers.items():
            if server.pending is not None:
                overdue_at = server.asked_at + self._config.patience_s
                times += [overdue_at] if overdue_at > now else []
            elif self._own and ((ready_at := self._ready_at(server)) > now or self._is_useful(peer, now)):
                times.append(max(ready_at, now))
        return min(times)

    def _ready_at(self, server: _Server) -> float:
        """When the server may be asked, and there is a reason to."""
        config = self._config
        wanted = server.asked_at + (config.again_s if server.due else config.refresh_s)
        return max(wanted, server.not_before)

    def _notice_change(self) -> None:
        """Other addresses than before: whoever has answered is asked again, and who has left counts no longer."""
        ips = tuple(self._view(version).ip for version in (4, 6))
        _, _, before = self._epoch
        epoch = (self._own, self._given, ips if any(ips) else before)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._answers = {peer: answer for peer, answer in self._answers.items() if peer in self._servers}
        for server in self._servers.values():
            server.due = True

    def _ask(self, now: float) -> list[Ask]:
        asks: list[Ask] = []
        if not self._own:
            return asks
        ready = [p for p, s in self._servers.items() if s.pending is None and self._ready_at(s) <= now]
        self._rng.shuffle(ready)
        ready.sort(key=lambda peer: self._place(peer) in self._covered(now))  # first where nobody was asked yet
        for peer in ready:
            if sum(server.pending is not None for server in self._servers.values()) >= self._config.at_once:
                break
            if not self._is_useful(peer, now):
                continue
            server, addrs = self._servers[peer], self._questionable(self._sights[peer])
            if not addrs:
                server.not_before = now + self._config.again_s
                continue
            server.asked_at, server.pending = now, addrs
            asks.append(Ask(peer, addrs))
        return asks

    def _is_useful(self, peer: PeerId, now: float) -> bool:
        """Whether one more answer, this peer's, would tell us more."""
        covered = self._covered(now)
        wanted = self._config.networks
        return len(covered) < wanted or (self._place(peer) not in covered and len(set(covered)) < wanted)

    def _covered(self, now: float) -> list[str]:
        """The networks of those who have answered of late, or are about to."""
        fresh = [p for p, s in self._servers.items() if s.pending is not None or self._ready_at(s) > now]
        asked = [p for p in fresh if self._servers[p].pending is not None or not self._servers[p].due]
        return [self._place(peer) for peer in asked]

    def _place(self, peer: PeerId) -> str:
        return network_of(self._sights[peer].at)

    def _questionable(self, sight: Sight) -> tuple[Multiaddr, ...]:
        """What to have this peer dial: our addresses as it may see them."""
        seen_ip = ip_of(sight.seen) if sight.seen is not None else None
        found = [*self._given, *(addr for addr in self._own if reach(addr) == 2)]
        if sight.seen is not None and reach(sight.seen) == 2:
            found += [sight.seen] if sight.mapped else []
            found += [tcp_addr(str(seen_ip), port) for port in self._ports()]
        for version in (4, 6):
            mapped = self._view(version).mapped
            found += [mapped] if mapped is not None else []
        if seen_ip is not None and seen_ip.is_global:
            found = [addr for addr in found if ip_of(addr) == seen_ip]
        return tuple(dict.fromkeys(found))[:ADDRS_PER_PEER]

    def _ports(self) -> list[int]:
        places = [tcp_place(addr) for addr in self._own if reach(addr) > 0]
        return sorted({place.port for place in places if place is not None})

    # --- the verdict -------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> Finding:
        outside = [sight for sight in self._sights.values() if _outside(sight)]
        own_public = [*self._given, *(addr for addr in self._own if reach(addr) == 2)]
        candidates = tuple(self._candidates())
        if not self._own:
            return Finding(Kind.DEAF, "this peer does not listen", (), candidates, needs_relays=bool(outside))
        came_in = self._came_in(outside, own_public)
        if self._answers and not self._may_turn(now):
            proven = self._proven(came_in)
            if proven:
                certain = any(addr in own_public for addr in proven)
                why = f"strangers get through to {proven[0]}"
                return Finding(Kind.REACHABLE, why, tuple(proven), candidates, needs_relays=not certain)
            kind, why = self._obstacle(own_public)
            # One network alone does not make us hide an address of this machine, unless there is but one.
            told = {network_of(answer.place) for answer in self._answers.values()}
            sure = len(told) > 1 or {network_of(sight.at) for sight in outside} <= told
            return Finding(kind, why, (), candidates, dead=tuple(own_public) if sure else (), needs_relays=True)
        if not self._servers and (dialed := self._came_in(outside, self._presumed())):
            best = max(votes(dialed).items(), key=lambda pair: pair[1])[0]
            return Finding(Kind.REACHABLE, "peers from outside have connected", (best,), candidates)
        needs_relays = bool(outside) and not own_public
        return Finding(Kind.UNKNOWN, self._why_unknown(outside), (), candidates, needs_relays=needs_relays)

    def _may_turn(self, now: float) -> bool:
        """There is no verdict yet, and those who were asked just now might make another one of it."""
        since = now - self._config.patience_s
        young = [s for s in self._servers.values() if s.pending is not None and s.asked_at > since]
        return self.finding.kind == Kind.UNKNOWN and len(young) >= len(self._answers)

    def _proven(self, came_in: list[tuple[Multiaddr, Multiaddr]]) -> list[Multiaddr]:
        """Addresses at which more networks got through than failed, if those that got through are the majority."""
        answers = [a for a in self._answers.values() if a.proven is None or self._is_ours(a.proven)]
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
        """Whether a proven address still is one of ours: the network may have changed since."""
        ip = self._view(_version(addr)).ip
        return ip is None or addr in self._own or addr in self._given or str(ip_of(addr)) == ip

    def _came_in(self, outside: list[Sight], own: Iterable[Multiaddr]) -> list[tuple[Multiaddr, Multiaddr]]:
        """Peers of the internet that dialed one of these addresses of ours: where they are, and which."""
        allowed = set(own)
        dialed = [(s.at, s.seen) for s in outside if s.accepted and s.seen is not None]
        return [(at, seen) for at, seen in dialed if seen in allowed and reach(seen) == 2]

    def _presumed(self) -> list[Multiaddr]:
        """Where we listen, and where a router that passes our ports on would make us appear."""
        ips = [ip for version in (4, 6) if (ip := self._view(version).ip) is not None]
        return [*self._given, *self._own, *(tcp_addr(ip, port) for ip in ips for port in self._ports())]

    def _why_unknown(self, outside: list[Sight]) -> str:
        pending = [server for server in self._servers.values() if server.pending is not None]
        if not outside:
            return "no peer outside this network has been met"
        if pending:
            return f"{len(pending)} peers are trying to connect"
        if not self._servers:
            return "no peer outside this network tests it"
        return "no peer has tested it yet"

    def _obstacle(self, own_public: list[Multiaddr]) -> tuple[Kind, str]:
        failed = f"strangers did not get through ({len(self._answers)} asked)"
        views = [view for view in map(self._view, (4, 6)) if view.observers]
        seen = {view.ip for view in views if view.ip is not None}
        if own_public and (not seen or seen & {str(ip_of(addr)) for addr in own_public}):
            return Kind.FIREWALL, f"{failed}, though the address is this machine's own: a firewall"
        if any(view.split for view in views):
            return Kind.SYMMETRIC, f"{failed}; a router shows this peer under another port to each"
        mapped = next((view.mapped for view in views if view.mapped is not None), None)
        if mapped is not None:
            return Kind.KEEPS_PORTS, f"{failed}; a router shows this peer as {mapped}"
        return Kind.KEEPS_PORTS, f"{failed}; how the router chooses ports is not known yet"

    def _candidates(self) -> list[Multiaddr]:
        """Public addresses that are probably ours: what most observers see, and what this machine has itself."""
        found = [addr for addr in (*self._given, *self._own) if reach(addr) == 2]
        for version in (4, 6):
            view = self._view(version)
            if view.mapped is not None:
                found.append(view.mapped)
            elif view.ip is not None and not view.split:
                found += [tcp_addr(view.ip, port) for port in self._ports()]
        return list(dict.fromkeys(found))[:ADDRS_PER_PEER]

    def _view(self, version: int) -> _View:
        """What most observers of this IP version see; nothing where there is no majority."""
        told = [
            (s.at, s.seen, s.mapped)
            for s in self._sights.values()
            if s.seen is not None and _outside(s) and reach(s.seen) == 2 and _version(s.seen) == version
        ]
        ip = majority([(at, str(ip_of(seen))) for at, seen, _ in told])
        ports = [(at, seen) for at, seen, mapped in told if mapped]
        mapped = majority(ports)
        return _View(ip, mapped, split=mapped is None and len({seen for _, seen in ports}) > 1, observers=len(told))

    def check(self) -> None:
        """Invariants, for tests."""
        assert len(self._sights) <= OBSERVERS
        assert set(self._servers) <= set(self._sights)
        assert all(reach(addr) == 2 for addr in (*self.finding.proven, *self.finding.candidates, *self.finding.dead))
        assert sum(server.pending is not None for server in self._servers.values()) <= self._config.at_once


def _outside(sight: Sight) -> bool:
    """Whether the peer is somewhere in the internet, so that what it sees is what strangers see."""
    return reach(sight.at) == 2


def _version(addr: Multiaddr) -> int:
    ip = ip_of(addr)
    return ip.version if ip is not None else 0


def advice(finding: Finding, port: int | None, relays: int) -> str:
    """The verdict and what to do about it, in a sentence. `port`: where we listen; `relays`: how many take circuits."""
    forward = f"forward TCP port {port} for full speed" if port is not None else "listen on a TCP port for full speed"
    inbound = "" if relays else "; others cannot connect until a relay is found"
    match finding.kind:
        case Kind.REACHABLE:
            return "reachable"
        case Kind.KEEPS_PORTS:
            return f"behind a port-restricted NAT: direct connections by hole punching{inbound}"
        case Kind.FIREWALL:
            opened = f"open TCP port {port} for others to connect at once"
            return f"behind a firewall: direct connections by hole punching; {opened}{inbound}"
        case Kind.SYMMETRIC | Kind.DEAF if relays:
            return f"only through relays: {forward}"
        case Kind.SYMMETRIC | Kind.DEAF:
            return f"only by connecting to others: {forward}"
    return f"unknown: {finding.why}"
