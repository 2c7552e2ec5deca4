"""Part of the reach benchmark: hosts of all kinds of NAT connect to each other, each ordered pair of kinds once.

Three public peers start first: they relay, and report to others the addresses that they see. Only the first meeting of
a pair counts: the kind of path on which it ends, and the time until that path exists. Five pairs meet at a time; no
host is in two of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks._remote_process import RemoteProcess, module
from scripts.lab import Kind, Unexpected, WideHost, WideLab
from scripts.waiting import eventually

KINDS: dict[str, Kind] = {
    "public": "none",
    "full-cone": "full-cone",
    "port-restricted": "port-restricted",
    "symmetric": "symmetric",
    "firewall": "firewall",
}
WAYS = ("direct", "punched", "relayed", "failed")
OPEN = {"public", "full-cone"}  # accept packets from unknown addresses
FOLLOWING = {"port-restricted", "firewall"}  # accept packets from addresses to which they sent one; ports are kept
PORT = 31337
RELAYS = 3
DELAY_MS = 10.0  # of each line, one way: the round trip between two hosts is 40 ms
SETTLED_S = 20.0  # most time until all peers know how they can be reached
PATIENCE_S = 12.0  # most time until a pair is on its best path

Matrix = dict[str, "Meeting"]  # by "kind/kind"


@dataclass(frozen=True, slots=True)
class Meeting:
    """First meeting of a pair. Times are in seconds since the first attempt."""

    way: str  # kind of path on which it ended
    first_s: float  # until the first call was answered
    best_s: float | None  # until it was on the best path; None if it never was
    ways: Sequence[tuple[float, str]]
    error: str | None

    @property
    def text(self) -> str:
        seen = ", ".join(f"{way} at {at:.2f} s" for at, way in self.ways)
        return f"{self.way} ({seen}{'; ' + self.error if self.error else ''})"


def best(one: str, other: str) -> str:
    """The best possible path between hosts of two kinds, if both cooperate with the help of relays."""
    kinds = {one, other}
    if kinds & OPEN:
        return "direct"
    return "punched" if kinds <= FOLLOWING else "relayed"


@dataclass(frozen=True, slots=True)
class Member:
    """A peer in the lab, its host and its process."""

    host: WideHost
    process: RemoteProcess
    peer: str  # its id

    def where(self) -> dict[str, Any]:
        return self.process.ask(do="where")


def started(host: WideHost, known: Sequence[str], *, relay: bool = False, dht: bool = False) -> RemoteProcess:
    """Start a peer that listens on all addresses of `host`. The caller must read its first answer."""
    kind = ("relay" if relay else "leaf", "dht" if dht else "alone")
    return RemoteProcess(host.popen, module("_reach_peer", f"/ip4/0.0.0.0/tcp/{PORT}", *kind, *known))


class Swarm:
    """Relays and peers in one lab, all of them started."""

    def __init__(self, lab: WideLab, *, dht: bool = False, relays: int = RELAYS) -> None:
        self._dht = dht  # without it, pairs connect only when ordered to
        self.relays: list[Member] = []
        self.known: list[str] = []  # addresses of the relays
        self.members: dict[str, Member] = {}
        for number in range(relays):
            host = lab.host(f"relay{number}")
            process = started(host, self.known, relay=True, dht=dht)
            relay = Member(host, process, process.answer()["peer"])
            self.relays.append(relay)
            self.known.append(f"/ip4/{host.ip}/tcp/{PORT}/p2p/{relay.peer}")

    def add(self, hosts: Mapping[str, WideHost]) -> None:
        """Start a peer on each host, and wait until all have started."""
        fresh = {name: started(host, self.known, dht=self._dht) for name, host in hosts.items()}
        self.members.update({name: Member(hosts[name], each, each.answer()["peer"]) for name, each in fresh.items()})

    def settled(
        self, names: Sequence[str] = (), most_s: float = SETTLED_S, relays: Container[str] | None = None
    ) -> dict[str, float]:
        """Wait until each peer is reachable or has circuit addresses on two of `relays`. Returns seconds by name."""
        among = {relay.peer for relay in self.relays} if relays is None else relays
        began, wanted = time.monotonic(), set(names or self.members)
        found: dict[str, float] = {}

        def all_are() -> bool:
            for name in wanted - set(found):
                if is_settled(self.members[name].where(), among):
                    found[name] = time.monotonic() - began
            return wanted == set(found)

        eventually(all_are, most_s)
        return found

    def chat(self, caller: str, called: str, *, period_s: float, timeout_s: float) -> None:
        """Make `caller` call `called` periodically from now on."""
        there = self.members[called].where()
        order = {"period_s": period_s, "timeout_s": timeout_s}
        self.members[caller].process.ask(do="chat", peer=there["peer"], addrs=there["addrs"], **order)

    def chats(self, pair: tuple[str, str], since_s: float) -> list[tuple[float, float, str | None]]:
        """The finished calls of a pair that began after `since_s` (monotonic clock), as (began, took, error)."""
        caller, called = pair
        found = self.members[caller].process.ask(do="chats", peer=self.members[called].peer)["chats"]
        return [(began, took, error) for began, took, error in found if began >= since_s]

    def way_within(self, one: str, other: str, ways: Container[str], most_s: float) -> bool:
        """Wait up to `most_s` until the best link between two peers is of one of these kinds. Returns True if it is."""
        there = self.members[other].peer
        return eventually(lambda: self.members[one].where()["ways"].get(there) in ways, most_s)

    def meet(self, pairs: Sequence[tuple[str, str, str]]) -> list[Meeting]:
        """Let these pairs (caller, called, best path) meet concurrently."""
        for caller, called, wanted in pairs:
            there = self.members[called].where()
            self.members[caller].process.order(
                do="meet", peer=there["peer"], addrs=there["addrs"], best=wanted, patience_s=PATIENCE_S
            )
        return [
            meeting(self.members[caller].process.answer(), self.members[called].where(), self.members[caller], wanted)
            for caller, called, wanted in pairs
        ]


def is_settled(where: Mapping[str, Any], relays: Container[str]) -> bool:
    circuits = {
        addr.partition("/p2p-circuit")[0].rpartition("/")[2] for addr in where["addrs"] if "/p2p-circuit" in addr
    }
    return sum(relay in relays for relay in circuits) >= 2 or where["status"]["verdict"] == "reachable"


def meeting(found: Mapping[str, Any], there: Mapping[str, Any], caller: Member, wanted: str) -> Meeting:
    """Result of a meeting. If both sides see different kinds of path, the worse one counts."""
    way = max(found["way"], there["ways"].get(caller.peer, "failed"), key=WAYS.index)
    times = [at for at, each in found["ways"] if each == wanted]
    return Meeting(way, found["first_s"], times[0] if times else None, found["ways"], found["error"])


@contextlib.contextmanager
def of_all_kinds(unexpected: Unexpected, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Swarm]:
    """A swarm with two peers of each kind, each behind its own router, named "symmetric1", "symmetric2", ..."""
    with WideLab(delay_ms=DELAY_MS) as lab:
        swarm = Swarm(lab)
        swarm.add({f"{kind}{n}": lab.host(f"{kind}{n}", KINDS[kind], unexpected) for kind in kinds for n in (1, 2)})
        yield swarm


def matrix(swarm: Swarm, kinds: Sequence[str] = tuple(KINDS)) -> Matrix:
    """Let the first peer of each kind call the second peer of each kind. Returns the meetings."""
    found: Matrix = {}
    for turn in range(len(kinds)):
        pairs = [(one, kinds[(at + turn) % len(kinds)]) for at, one in enumerate(kinds)]
        met = swarm.meet([(f"{one}1", f"{other}2", best(one, other)) for one, other in pairs])
        found.update({f"{one}/{other}": each for (one, other), each in zip(pairs, met, strict=True)})
    return {f"{one}/{other}": found[f"{one}/{other}"] for one in kinds for other in kinds}
