"""The way into the swarm: the bootstrap addresses, each tried until it answers, and again whenever it is lost.

Keeps a connection to each entry peer, so that two halves of a swarm that lost sight of each other meet again there.
Says for each address what came of it, in words that a user can act on. Knows nothing about the DHT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio
from multiaddr import Multiaddr

from peerd.core.addr import split_peer
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.net.host.host import Host


@dataclass(slots=True)
class _Entry:
    addr: Multiaddr
    peer: PeerId | None = None  # the peer there, once we are connected
    problem: str = ""
    attempts: int = 0
    gone: trio.Event = field(default_factory=trio.Event)  # the connection to `peer` has closed


class EntryPoints:
    """Tries and keeps bootstrap addresses; calls `met(peer, addr)` at each new connection."""

    def __init__(
        self, host: Host, met: Callable[[PeerId, Multiaddr], None], retry_s: float, longest_retry_s: float
    ) -> None:
        self.settled = trio.Event()  # set by the owner once it has joined, and here when there is no way to join by
        self._host = host
        self._met = met
        self._retry_s = retry_s
        self._longest_retry_s = longest_retry_s
        self._entries: list[_Entry] = []

    def start(self, nursery: trio.Nursery, bootstrap: Sequence[Multiaddr]) -> None:
        """Begin; our own address among them means nothing."""
        others = [addr for addr in dict.fromkeys(bootstrap) if split_peer(addr)[1] != self._host.id]
        self._entries = [_Entry(addr) for addr in others]
        if not self._entries:
            self.settled.set()
        for entry in self._entries:
            nursery.start_soon(self._keep, entry)

    def peers(self) -> list[PeerId]:
        """Those that are connected."""
        return [entry.peer for entry in self._entries if entry.peer is not None]

    def lost(self, peer: PeerId) -> None:
        """The last connection to `peer` has closed."""
        for entry in self._entries:
            if entry.peer == peer:
                entry.gone.set()

    def refused(self, peer: PeerId, why: str) -> None:
        """`peer` is there, but does not answer us."""
        for entry in self._entries:
            if entry.peer == peer:
                entry.problem = f"{entry.addr}: it refuses us: {why}"

    def waits_for(self) -> str | None:
        """The reason why nobody is known yet; None when there is nobody to know."""
        if not self._entries:
            return None
        problems = [entry.problem for entry in self._entries if entry.problem]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return f"bootstrap {problems[0]}{more}"
        if any(entry.peer is not None for entry in self._entries):
            return "the first answer of a bootstrap peer"
        return f"a connection to bootstrap {self._entries[0].addr}"

    def status(self) -> list[dict[str, Any]]:
        """Plain data: each address, whether it is connected, and if not, why."""
        return [
            {
                "addr": str(entry.addr),
                "connected": entry.peer is not None,
                "problem": entry.problem or None,
                "attempts": entry.attempts,
            }
            for entry in self._entries
        ]

    async def _keep(self, entry: _Entry) -> None:
        delay_s = self._retry_s
        while True:
            entry.attempts += 1
            try:
                entry.peer = await self._host.connect_addr(entry.addr)
            except RemoteError as error:
                entry.problem = _describe(entry.addr, error)
                if all(other.problem for other in self._entries):
                    self.settled.set()
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, self._longest_retry_s)
                continue
            entry.problem, delay_s = "", self._retry_s
            self._met(entry.peer, entry.addr)
            if entry.peer in self._host.connected():
                await entry.gone.wait()
            entry.peer, entry.gone = None, trio.Event()
            await trio.sleep(delay_s)


def _describe(addr: Multiaddr, error: RemoteError) -> str:
    """The address once, then the reason; dialling puts the addresses it tried in front."""
    bare, reason = str(split_peer(addr)[0]), str(error.args[0])
    _, found, rest = reason.partition(f"{bare}: ")
    return f"{addr}: {rest if found else reason}"
