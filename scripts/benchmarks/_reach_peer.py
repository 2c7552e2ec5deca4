"""Part of the reach benchmark: a light peer (host, RPC, connectivity, optionally the DHT; no torch) that runs orders.

Arguments: the address to listen on; "relay" or "leaf"; "dht", or "alone" to connect only to peers named in orders; and
addresses of running peers. Orders, one per line:

    {"do": "where"}                                               its addresses and reachability
    {"do": "meet", "peer": P, "addrs": [...], "best": W, "patience_s": S}
        calls P, with a payload in both directions, then waits up to S seconds until the link to P is of kind W, and
        calls again
    {"do": "chat", "peer": P, "addrs": [...], "period_s": S, "timeout_s": S}      calls P periodically from now on
    {"do": "chats", "peer": P}           results of these calls: [began, took, error or null], by the monotonic clock
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import trio

from peerd.core.addr import parse_addr, split_peer
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.daemon.control.connectivity import Connectivity, ConnectivityConfig
from peerd.wire.path_selection import PathKind
from scripts.benchmarks._remote_process import ECHO, Blob, new_stack, obey, reply, serve_echo

PAYLOAD_BYTES = 20_000
CALL_S = 10.0
LOOK_S = 0.01  # between checks of the link's kind


class Leaf:
    """One peer, which runs orders."""

    def __init__(self, *, relay: bool, dht: bool) -> None:
        self.stack = stack = new_stack()
        self.host, self.rpc, self._joins = self.stack.host, self.stack.rpc, dht
        net = (self.rpc, self.stack.dht if dht else None)
        self.ways = Connectivity(self.host, net, stack.clock, stack.keypair, ConnectivityConfig(relay=relay))
        self._chats: dict[PeerId, list[tuple[float, float, str | None]]] = {}

    async def run(self, listen: str, known: Sequence[str]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            bootstrap = [parse_addr(addr) for addr in known] if self._joins else None
            await nursery.start(self.stack.run, [parse_addr(listen)], bootstrap)
            serve_echo(self.rpc)
            await nursery.start(self.ways.run)
            for addr in known:
                await self.host.connect_addr(parse_addr(addr))
            reply(**await self.where())
            await obey(self)
            nursery.cancel_scope.cancel()

    async def where(self) -> dict[str, Any]:
        return {
            "peer": str(self.host.id),
            "addrs": [str(addr) for addr in self.host.addrs()],
            "ways": {str(peer): self.way(peer) for peer in self.host.connected()},
            "remotes": {
                str(peer): str(link.remote) for peer in self.host.connected() if (link := self.host.links.best(peer))
            },
            "status": self.ways.status(),
        }

    async def meet(self, peer: str, addrs: list[str], best: str, patience_s: float) -> dict[str, Any]:
        there, began = self._known(peer, addrs), time.perf_counter()
        ways: list[tuple[float, str]] = []
        failure = await self._call(there, CALL_S)
        first_s = time.perf_counter() - began
        if failure is not None:
            return {"way": "failed", "first_s": first_s, "ways": ways, "error": failure}
        while True:
            way, now = self.way(there), time.perf_counter() - began
            if not ways or ways[-1][1] != way:
                ways.append((now, way))
            if way == best or now > patience_s:
                break
            await trio.sleep(LOOK_S)
        failure = await self._call(there, CALL_S)
        way = "failed" if failure is not None else self.way(there)
        return {"way": way, "first_s": first_s, "ways": ways, "error": failure}

    async def chat(self, peer: str, addrs: list[str], period_s: float, timeout_s: float) -> dict[str, Any]:
        there = self._known(peer, addrs)
        self._chats[there] = []
        self._nursery.start_soon(self._chat, there, period_s, timeout_s)
        return {}

    async def chats(self, peer: str) -> dict[str, Any]:
        return {"chats": self._chats[PeerId.parse(peer)]}

    async def _chat(self, there: PeerId, period_s: float, timeout_s: float) -> None:
        while True:
            began = time.monotonic()
            failure = await self._call(there, timeout_s)
            self._chats[there].append((began, time.monotonic() - began, failure))
            await trio.sleep(period_s)

    async def _call(self, there: PeerId, timeout_s: float) -> str | None:
        """Call a peer and check its answer. Returns the reason of a failure, or None."""
        sent = Blob(os.urandom(PAYLOAD_BYTES))
        try:
            answer = await self.rpc.call(there, ECHO, sent, Blob, timeout_s=timeout_s)
        except RemoteError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.body == sent else "another answer came back"

    def _known(self, peer: str, addrs: list[str]) -> PeerId:
        there = PeerId.parse(peer)
        self.host.learn(there, [split_peer(parse_addr(addr))[0] for addr in addrs])
        return there

    def way(self, peer: PeerId) -> str:
        link = self.host.links.best(peer)
        if link is None:
            return "failed"
        return ("direct" if link.way is PathKind.LOCAL else link.way.name).lower()


async def main(listen: str, relay: str, dht: str, *known: str) -> None:
    await Leaf(relay=relay == "relay", dht=dht == "dht").run(listen, known)


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("PEERD_BENCH_LOG", "ERROR"), format="%(relativeCreated)d %(message)s")
    trio.run(main, *sys.argv[1:])
