"""Part of the reach benchmark: two hosts of each kind meet in a wide lab, each ordered pair of kinds once.

Three public peers are there first: they relay, and tell others how they are seen. Every pair's first meeting counts:
the way on which it ends, and the time until that way is there. Five pairs meet at once; no host is in two of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab import Kind, Unexpected, WideHost, WideLab
from waiting import eventually

from benchmarks._told import Told

KINDS: dict[str, Kind] = {
    "public": "none",
    "full-cone": "full-cone",
    "port-restricted": "port-restricted",
    "symmetric": "symmetric",
    "firewall": "firewall",
}
WAYS = ("direct", "punched", "relayed", "failed")
OPEN = {"public", "full-cone"}  # a stranger's first packet gets in
FOLLOWING = {"port-restricted", "firewall"}  # it gets in where one was sent to, and that is known ahead
PORT = 31337
RELAYS = 3
DELAY_MS = 10.0  # of each line, one way: two hosts are 40 ms apart and back
SETTLED_S = 20.0  # at most, until all know how they are reached
PATIENCE_S = 12.0  # at most, until a pair is on its best way

Matrix = dict[str, "Meeting"]  # by "kind/kind"


@dataclass(frozen=True, slots=True)
class Meeting:
    """One pair's first meeting; seconds since the first attempt."""

    way: str  # on which it ended
    first_s: float  # until the first call was answered
    best_s: float | None  # until the way was the best one there is; None: it never was
    ways: Sequence[tuple[float, str]]
    error: str | None

    @property
    def text(self) -> str:
        seen = ", ".join(f"{way} at {at:.2f} s" for at, way in self.ways)
        return f"{self.way} ({seen}{'; ' + self.error if self.error else ''})"


def best(one: str, other: str) -> str:
    """The best way there is between hosts of two kinds; both may do something, and relays help to agree on it."""
    kinds = {one, other}
    if kinds & OPEN:
        return "direct"
    return "punched" if kinds <= FOLLOWING else "relayed"


@dataclass(frozen=True, slots=True)
class Member:
    """A peer in the lab."""

    host: WideHost
    told: Told
    peer: str  # its id

    def ask(self, **order: Any) -> dict[str, Any]:
        self.told.tell(**order)
        return self.told.hear()

    def where(self) -> dict[str, Any]:
        return self.ask(do="where")


def started(host: WideHost, known: Sequence[str], *, relay: bool = False, dht: bool = False) -> Told:
    """A peer that listens on all addresses of `host`; its first answer is still to be heard."""
    kind = ("relay" if relay else "leaf", "dht" if dht else "alone")
    return Told(host.popen, "_reach_peer", f"/ip4/0.0.0.0/tcp/{PORT}", *kind, *known)


class Swarm:
    """Relays and peers in one lab; all have said that they are there."""

    def __init__(self, lab: WideLab, *, dht: bool = False, relays: int = RELAYS) -> None:
        self._dht = dht  # without it no pair has met before it is told to
        self.relays: list[Member] = []
        self.known: list[str] = []  # addresses of the relays
        self.members: dict[str, Member] = {}
        for number in range(relays):
            host = lab.host(f"relay{number}")
            told = started(host, self.known, relay=True, dht=dht)
            relay = Member(host, told, told.hear()["peer"])
            self.relays.append(relay)
            self.known.append(f"/ip4/{host.ip}/tcp/{PORT}/p2p/{relay.peer}")

    def add(self, hosts: Mapping[str, WideHost]) -> None:
        """A peer on each host; returns when all are there."""
        fresh = {name: started(host, self.known, dht=self._dht) for name, host in hosts.items()}
        self.members.update({name: Member(hosts[name], told, told.hear()["peer"]) for name, told in fresh.items()})

    def settled(
        self, names: Sequence[str] = (), most_s: float = SETTLED_S, relays: Container[str] | None = None
    ) -> dict[str, float]:
        """Wait until each is reachable or has circuit addresses on two of `relays`: after how many seconds, by name."""
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
        """Have one call the other again and again from now on."""
        there = self.members[called].where()
        order = {"period_s": period_s, "timeout_s": timeout_s}
        self.members[caller].ask(do="chat", peer=there["peer"], addrs=there["addrs"], **order)

    def chats(self, pair: tuple[str, str], since_s: float) -> list[tuple[float, float, str | None]]:
        """The calls of a pair that began since that time of the monotonic clock and are over: began, took, error."""
        caller, called = pair
        found = self.members[caller].ask(do="chats", peer=self.members[called].peer)["chats"]
        return [(began, took, error) for began, took, error in found if began >= since_s]

    def way_within(self, one: str, other: str, ways: Container[str], most_s: float) -> bool:
        """True when the best link of one to the other is of one of these kinds by then."""
        there = self.members[other].peer
        return eventually(lambda: self.members[one].where()["ways"].get(there) in ways, most_s)

    def meet(self, pairs: Sequence[tuple[str, str, str]]) -> list[Meeting]:
        """These pairs (caller, called, best way) meet at once."""
        for caller, called, wanted in pairs:
            there = self.members[called].where()
            self.members[caller].told.tell(
                do="meet", peer=there["peer"], addrs=there["addrs"], best=wanted, patience_s=PATIENCE_S
            )
        return [
            meeting(self.members[caller].told.hear(), self.members[called].where(), self.members[caller], wanted)
            for caller, called, wanted in pairs
        ]


def is_settled(where: Mapping[str, Any], relays: Container[str]) -> bool:
    circuits = {
        addr.partition("/p2p-circuit")[0].rpartition("/")[2] for addr in where["addrs"] if "/p2p-circuit" in addr
    }
    return sum(relay in relays for relay in circuits) >= 2 or where["status"]["verdict"] == "reachable"


def meeting(found: Mapping[str, Any], there: Mapping[str, Any], caller: Member, wanted: str) -> Meeting:
    """Result of a meeting, by what both sides see: the worse of both counts."""
    way = max(found["way"], there["ways"].get(caller.peer, "failed"), key=WAYS.index)
    times = [at for at, each in found["ways"] if each == wanted]
    return Meeting(way, found["first_s"], times[0] if times else None, found["ways"], found["error"])


@contextlib.contextmanager
def of_all_kinds(unexpected: Unexpected, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Swarm]:
    """A swarm with two peers of each kind, each behind a router of its own: "symmetric1", "symmetric2", ..."""
    with WideLab(delay_ms=DELAY_MS) as lab:
        swarm = Swarm(lab)
        swarm.add({f"{kind}{n}": lab.host(f"{kind}{n}", KINDS[kind], unexpected) for kind in kinds for n in (1, 2)})
        yield swarm


def matrix(swarm: Swarm, kinds: Sequence[str] = tuple(KINDS)) -> Matrix:
    """Every first peer of a kind calls every second one."""
    found: Matrix = {}
    for turn in range(len(kinds)):
        pairs = [(one, kinds[(at + turn) % len(kinds)]) for at, one in enumerate(kinds)]
        met = swarm.meet([(f"{one}1", f"{other}2", best(one, other)) for one, other in pairs])
        found.update({f"{one}/{other}": each for (one, other), each in zip(pairs, met, strict=True)})
    return {f"{one}/{other}": found[f"{one}/{other}"] for one in kinds for other in kinds}
