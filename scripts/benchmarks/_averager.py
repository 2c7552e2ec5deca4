"""One peer of the averaging benchmark: takes orders from its input, a JSON object a line, and answers likewise.

Started with `python -m benchmarks._averager RANK COUNT STORE`: STORE is the file over which torch's gloo peers meet.
Times are those of the machine's monotonic clock, so that the parent can compare what several peers say.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import trio

from benchmarks._far import new_host
from peerd.compute.choice import Plan
from peerd.compute.feedback import ErrorFeedback
from peerd.compute.worker import DeviceWorker
from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.machine.allreduce import AveragingPlan
from peerd.net.clock import RealClock
from peerd.service.averaging import Averaging
from peerd.service.rpc import Rpc

PART_BYTES = 1 << 20
PATIENCE_S = 60.0


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def gloo(order: dict[str, Any]) -> dict[str, Any]:
    """One all-reduce by torch."""
    vector = torch.ones(order["count"])
    dist.barrier()
    begin = time.monotonic()
    dist.all_reduce(vector)
    return {"begin": begin, "end": time.monotonic(), "right": bool((vector == dist.get_world_size()).all())}


class Averager:
    """This process's peer."""

    def __init__(self, rank: int, averaging: Averaging, worker: DeviceWorker) -> None:
        self._rank = rank
        self._averaging = averaging
        self._worker = worker
        self._vector = np.empty(0, dtype=np.float32)

    def make(self, order: dict[str, Any]) -> dict[str, Any]:
        """The vector of the rounds to come."""
        self._vector = np.ones(order["count"], dtype=np.float32)
        return {}

    async def sum(self, order: dict[str, Any], group: tuple[str, ...]) -> dict[str, Any]:
        """One round with everybody; begins at the time that the parent names."""
        code = order["code"]
        coder = ErrorFeedback(Plan(code)) if code != "none" else None
        plan = AveragingPlan(bytes.fromhex(order["attempt"]), group, PART_BYTES, PATIENCE_S)
        await trio.sleep(order["at"] - time.monotonic())
        begin = time.monotonic()
        total = await self._averaging.sum(plan, self._vector, self._worker, coder)
        end = time.monotonic()
        return {"begin": begin, "end": end, "right": bool(np.abs(total - len(group)).max() < 0.05 * len(group))}


async def main(rank: int, count: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    host = new_host()
    rpc = Rpc(host, RealClock())
    read: Callable[[], str] = sys.stdin.readline
    async with trio.open_nursery() as nursery, DeviceWorker("coding", threads=1) as worker:
        await nursery.start(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        await nursery.start(rpc.run)
        averager = Averager(rank, Averaging(rpc, host.id), worker)
        say({"peer": host.id.text, "addr": str(host.addrs()[0])})
        group: tuple[str, ...] = ()
        while line := await trio.to_thread.run_sync(read):
            order = json.loads(line)
            if order["do"] == "meet":
                peers = {peer: addr for peer, addr in order["peers"].items() if peer != host.id.text}
                for peer, addr in sorted(peers.items()):
                    await host.connect(PeerId.parse(peer), [parse_addr(addr)])
                group = tuple(sorted(order["peers"]))
                say({})
            elif order["do"] == "make":
                say(averager.make(order))
            elif order["do"] == "gloo":
                say(await trio.to_thread.run_sync(gloo, order))
            else:
                say(await averager.sum(order, group))
        nursery.cancel_scope.cancel()
    dist.destroy_process_group()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
