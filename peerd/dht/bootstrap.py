"""Bootstrap: dials the bootstrap addresses until they answer, and dials again whenever a connection is lost.

Keeps connections to three entry peers, so that two halves of a swarm that lost contact meet again there. If there are
more addresses, each peer draws three at random and keeps the others in reserve. Otherwise the entry peers of a large
swarm would be full, and would close another peer's connection for each newcomer; that peer would then return. Reports
the result for each address in words that a user can act on. Knows nothing about the DHT.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from peerd.core.addr import split_peer
from peerd.core.errors import Cause, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.wire.host.host import Host

_OTHER_PEER: Final = re.compile(r"expected (\w+), but the peer there is (\w+)")
KEPT: Final = 3  # connections that are kept
_STOOD_S: Final = 60.0  # after a shorter connection the next pause is longer: its peer may be full
NO_PEERD: Final = "answers, but is not a peerd peer"  # also the beginning of an error of the handshake


@dataclass(slots=True)
class _Entry:
    addr: Multiaddr
    peer: PeerId | None = None  # the peer there, once we are connected
    problem: str = ""
    attempts: int = 0
    delay_s: float = 0.0  # before the next attempt
    gone: trio.Event = field(default_factory=trio.Event)  # the connection to `peer` has closed


class BootstrapPeers:
    """Dials bootstrap addresses and keeps connections to them. Calls `met(peer, addr)` at each new connection."""

    def __init__(
        self,
        host: Host,
        met: Callable[[PeerId, Multiaddr], None],
        retry_s: float,
        longest_retry_s: float,
        rng: random.Random,
    ) -> None:
        self.settled = trio.Event()  # set by the owner once it has joined, and here if no address works
        self.failed = trio.Event()  # every address has been tried, and no peer answers
        self.reached = trio.Event()  # a peer at one of the addresses has answered, or all are our own
        self._host = host
        self._met = met
        self._retry_s = retry_s
        self._longest_retry_s = longest_retry_s
        self._rng = rng
        self._entries: list[_Entry] = []
        self._waiting: list[tuple[float, int, _Entry]] = []  # heap of unconnected entries, by their next attempt
        self._count = itertools.count()

    def start(self, nursery: trio.Nursery, bootstrap: Sequence[Multiaddr]) -> None:
        """Start dialing. Our own address among `bootstrap` is ignored."""
        others = [addr for addr in dict.fromkeys(bootstrap) if split_peer(addr)[1] != self._host.id]
        self._entries = [_Entry(addr) for addr in others]
        self._settle_if_none()
        for entry in self._entries:
            entry.delay_s = self._retry_s
        drawn = self._entries if len(others) <= KEPT else self._rng.sample(self._entries, len(others))
        for entry in drawn[KEPT:]:
            self._wait(entry, 0.0)
        for entry in drawn[:KEPT]:
            nursery.start_soon(self._keep, entry)

    @property
    def given(self) -> bool:
        """True if there is an address besides our own."""
        return bool(self._entries)

    def peers(self) -> list[PeerId]:
        """The connected entry peers."""
        return [peer for peer, _ in self.connected()]

    def connected(self) -> list[tuple[PeerId, Multiaddr]]:
        """The connected entry peers, each with its address."""
        return [(entry.peer, entry.addr) for entry in self._entries if entry.peer is not None]

    def lost(self, peer: PeerId) -> None:
        """Handle the end of the last connection to `peer`."""
        for entry in self._entries:
            if entry.peer == peer:
                entry.gone.set()

    def answered(self, peer: PeerId) -> None:
        """Record that `peer` has answered a DHT request."""
        for entry in self._entries:
            if entry.peer == peer:
                entry.problem = ""
                self.reached.set()

    def refused(self, peer: PeerId, error: Refused) -> None:
        """Record that `peer` is connected, but refuses our requests."""
        told = NO_PEERD if error.cause is Cause.NO_SUCH_PROTOCOL else f"it refuses us: {error.args[0]}"
        for entry in self._entries:
            if entry.peer == peer:
                entry.problem = f"{entry.addr}: {told}"
                self._note_failures()

    def tried(self) -> list[tuple[str, str]]:
        """Each address, without the peer's id, and why no peer there has answered yet."""
        return [
            (str(split_peer(entry.addr)[0]), entry.problem.removeprefix(f"{entry.addr}: ") or "no answer yet")
            for entry in self._entries
        ]

    def waits_for(self) -> str | None:
        """Why no peer is known yet, or None if there is no bootstrap address."""
        if not self._entries:
            return None
        problems = [entry.problem for entry in self._entries if entry.problem]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return f"bootstrap {problems[0]}{more}"
        if any(entry.peer is not None for entry in self._entries):
            return "the first answer of a bootstrap peer"
        tried = [entry for entry in self._entries if entry.attempts] or self._entries
        return f"a connection to bootstrap {tried[0].addr}"

    def status(self) -> list[dict[str, Any]]:
        """Plain data: each address, whether it is connected, and the problem if not."""
        return [
            {
                "addr": str(entry.addr),
                "connected": entry.peer is not None,
                "problem": entry.problem or None,
                "attempts": entry.attempts,
                "in_reserve": not entry.attempts,
            }
            for entry in self._entries
        ]

    def _note_failures(self) -> bool:
        """Set `failed` and return True if every address has a problem."""
        failed = all(entry.problem for entry in self._entries)
        if failed:
            self.failed.set()
        return failed

    def _settle_if_none(self) -> None:
        """Set `reached` and `settled` if no address but our own is left, because there is no peer to wait for."""
        if not self._entries:
            self.reached.set()
        if self._note_failures():
            self.settled.set()

    def _wait(self, entry: _Entry, until_s: float) -> None:
        heapq.heappush(self._waiting, (until_s, next(self._count), entry))

    async def _keep(self, entry: _Entry) -> None:
        """Keep one connection: first to this entry peer; after it ends, to the next one that waits."""
        while True:
            if await self._hold(entry):
                self._wait(entry, trio.current_time() + entry.delay_s)
                entry.delay_s = min(2 * entry.delay_s, self._longest_retry_s)
            else:
                self._entries.remove(entry)
                self._settle_if_none()
            if not self._waiting:
                return  # all others have a task of their own: this address was ours
            due_s, _, entry = heapq.heappop(self._waiting)
            if due_s > trio.current_time():
                await trio.sleep_until(due_s)

    async def _hold(self, entry: _Entry) -> bool:
        """Connect, and wait until the connection has ended. False if the address is our own."""
        entry.attempts += 1
        try:
            entry.peer = await self._host.connect_addr(entry.addr)
        except RemoteError as error:
            if error.cause is Cause.OURSELVES:  # an address without a peer's id, and it is ours
                return False
            entry.problem = _describe(entry.addr, error)
            if self._note_failures():
                self.settled.set()
            return True
        began_s, entry.problem = trio.current_time(), ""
        self._met(entry.peer, entry.addr)
        if entry.peer in self._host.connected():
            await entry.gone.wait()
        entry.peer, entry.gone = None, trio.Event()
        if trio.current_time() - began_s >= _STOOD_S:
            entry.delay_s = self._retry_s
        return True


def _describe(addr: Multiaddr, error: RemoteError) -> str:
    return f"{addr}: {why_unreachable(addr, error)}"


def why_unreachable(addr: Multiaddr, error: RemoteError) -> str:
    """Why `addr` could not be reached, as text for the user.

    The text omits the address, with which errors of a dial begin.
    """
    bare, reason = str(split_peer(addr)[0]), str(error.args[0])
    _, found, rest = reason.partition(f"{bare}: ")
    own = rest.partition("; /")[0] if found else reason  # other addresses of the same peer may follow
    return NO_PEERD if NO_PEERD in own else _OTHER_PEER.sub(_another, own)


def _another(found: re.Match[str]) -> str:
    """Text for the user that another peer answered, with both peer ids in their short form."""
    wanted, there = (PeerId.parse(text).short for text in found.groups())
    return f"another peer answers there: {there}, not {wanted}"
