"""A program for a lab: at each line on stdin a fresh host dials the other side's, and tells in JSON what came of it.

    python -m tests.worlds.processes.crossing OWN-NAME OTHER-NAME OTHER-IP TIMES

The lab's test of crossing dials reads what it tells.
"""

from __future__ import annotations

import json
import sys

import trio

from peerd.core.addr import tcp_addr
from peerd.core.errors import RemoteError
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.worlds.network.hosts import keypair

FIRST_PORT = 5000
STAY_S = 0.5  # for the other side to see the same


async def meet(number: int, own: str, other: str, ip: str) -> None:
    host = Host(keypair(f"{own}{number}"), RealClock(), [TcpTransport()])
    peer = keypair(f"{other}{number}").peer_id
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run, [tcp_addr("0.0.0.0", FIRST_PORT + number)])
        print(json.dumps("ready"), flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        found: dict[str, object] = {"error": ""}
        try:
            await host.connect(peer, [tcp_addr(ip, FIRST_PORT + number)])
            await host.ping(peer)
        except RemoteError as error:
            found["error"] = str(error)
        await trio.sleep(STAY_S)
        best = host.links.best(peer)
        print(json.dumps(found | {"links": len(host.links), "first": best and best.initiator}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        nursery.cancel_scope.cancel()


async def main(own: str, other: str, ip: str, times: str) -> None:
    for number in range(int(times)):
        await meet(number, own, other, ip)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
