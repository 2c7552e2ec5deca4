"""One peer of the averaging benchmark, which runs the orders of its parent process.

Arguments: ADDRESS [RANK COUNT STORE]. It listens at ADDRESS; STORE is the rendezvous file of torch's gloo peers.
Without RANK, COUNT and STORE it uses neither gloo nor torch, so that 25 peers fit on a small machine. Times are from
the machine's monotonic clock, so that the parent can compare those of several peers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import trio

from peerd.averaging.allreduce import AllReduceService
from peerd.averaging.allreduce_round import AveragingPlan
from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.core.work import Worker
from peerd.messages.swarm import Mbs, Prepare, Prepared
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.run.runfile import AveragingSection
from peerd.wire.host.host import Host
from peerd.wire.host.line_meter import LineMeter
from scripts.benchmarks._remote_process import new_stack, obey, reply
from tests.kit.declared import ANY

if TYPE_CHECKING:
    from peerd.codec.error_feedback import ErrorFeedback

T = TypeVar("T")

PART_BYTES = AveragingSection().part_bytes
PATIENCE_S = 60.0
ORDER = "bench/1/prepare"  # the method by which a conductor orders a round, as in training


class ThreadWorker:
    """Runs jobs in a thread, one at a time, without torch."""

    def __init__(self) -> None:
        self._turn = trio.CapacityLimiter(1)

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        return await trio.to_thread.run_sync(job, limiter=self._turn)


class Gloo:
    """A gloo process group of the same processes, and peerd's error feedback, which needs torch as well."""

    def __init__(self, rank: int, count: int, store: str) -> None:
        import torch  # imported here, since processes without gloo do not need it
        import torch.distributed

        from peerd.codec.error_feedback import feedback_of

        self.feedback: Callable[[str], ErrorFeedback | None] = lambda code: feedback_of(AveragingSection(code=code))
        self._torch, self._group = torch, torch.distributed
        torch.set_num_threads(1)
        self._group.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)

    def sum(self, count: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        """Run one all-reduce. Returns its begin and end, and the sum."""
        vector = self._torch.ones(count)
        self._group.barrier()
        begin = time.monotonic()
        self._group.all_reduce(vector)
        return {"begin": begin, "end": time.monotonic()}, vector.numpy()

    def close(self) -> None:
        self._group.destroy_process_group()


class Averager:
    """The peer of this process."""

    def __init__(self, host: Host, rpc: Rpc, gloo: Gloo | None) -> None:
        self._host, self._rpc, self._gloo = host, rpc, gloo
        rpc.serve(ORDER, Prepare, self.prepare, declared=ANY)
        self._averaging = AllReduceService(rpc, host.id, host.pace)
        self._worker: Worker = ThreadWorker()
        self._group: tuple[str, ...] = ()
        self._vector = self._total = np.empty(0, dtype=np.float32)
        self._feedbacks: dict[str, ErrorFeedback | None] = {}  # by code, for the current vectors

    async def make(self, count: int) -> dict[str, Any]:
        """Use a vector of ones of this length in the next rounds."""
        self._vector = np.ones(count, dtype=np.float32)
        self._feedbacks.clear()
        return {}

    async def gloo(self, count: int) -> dict[str, Any]:
        assert self._gloo is not None
        answer, self._total = await trio.to_thread.run_sync(self._gloo.sum, count)
        return answer

    async def line(self) -> dict[str, Any]:
        """Measured rates of the peer's line."""
        line = self._host.line
        return {"up": line.up.told_bytes_per_s(), "down": line.down.told_bytes_per_s()}

    async def check(self, sum: float) -> dict[str, Any]:
        """Compare with the expected sum, without temporary arrays, whose allocation would slow down the next round."""
        furthest = max(sum - self._total.min(), self._total.max() - sum)
        return {"right": bool(furthest < 0.05 * sum)}

    async def meet(self, peers: dict[str, str]) -> dict[str, Any]:
        """Connect to all peers. Of each pair, the one with the smaller id dials."""
        for peer, addr in sorted(peers.items()):
            if peer > self._host.id.text:
                await self._host.connect(PeerId.parse(peer), [parse_addr(addr)])
        self._group = tuple(sorted(peers))
        return {}

    async def form(self, attempt: str) -> dict[str, Any]:
        """As conductor: order a round of one element per member, and wait until all members have answered."""
        begin = time.monotonic()
        order = Prepare(bytes(16), 1, 1, bytes.fromhex(attempt), b"", list(self._group), Mbs(), 1, PATIENCE_S)

        async def tell(peer: str) -> None:
            await self._rpc.call(PeerId.parse(peer), ORDER, order, Prepared, timeout_s=PATIENCE_S)

        async with trio.open_nursery() as nursery:
            for peer in self._group:
                nursery.start_soon(tell, peer)
        return {"seconds": time.monotonic() - begin}

    async def prepare(self, call: Incoming[Prepare]) -> Answer[Prepared]:
        """As a member, or as the conductor's own member: take part in the round that the conductor orders."""
        plan = AveragingPlan.of(call.body, PART_BYTES, PATIENCE_S)
        await self._averaging.sum(plan, np.ones(len(plan.group), dtype=np.float32), self._worker)
        return Answer(Prepared(True, Mbs(), []))

    async def sum(
        self,
        attempt: str,
        code: str,
        at: float,
        shares: dict[str, float] | None = None,
        part_bytes: int = PART_BYTES,
        s_per_byte: float = 0.0,
    ) -> dict[str, Any]:
        """Run one round with all peers, which begins at the time `at` that the parent sets.

        `shares` are by peer, or equal if missing. `s_per_byte` is what a conductor sends if all lines are stated. A
        coded round uses error feedback, as in training; a vector of ones stays usable with it for more rounds.
        """
        split = tuple(shares[peer] for peer in self._group) if shares else None
        plan = AveragingPlan(
            bytes.fromhex(attempt), self._group, part_bytes, PATIENCE_S, shares=split, s_per_byte=s_per_byte
        )
        feedback = self._feedback(code)
        await trio.sleep(max(0.0, at - time.monotonic()))
        if feedback is not None:
            await self._worker.run(lambda: feedback.begin(self._vector), name="add the residual")
        self._total = await self._averaging.sum(plan, self._vector, self._worker, feedback)
        if feedback is not None:
            feedback.settle()
        return {"end": time.monotonic()}

    def _feedback(self, code: str) -> ErrorFeedback | None:
        if self._gloo is not None and code not in self._feedbacks:
            self._feedbacks[code] = self._gloo.feedback(code)
        return self._feedbacks.get(code)


async def main(address: str, *place: str) -> None:
    gloo = Gloo(int(place[0]), int(place[1]), place[2]) if place else None
    stack = new_stack()
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, [parse_addr(address)])
        nursery.start_soon(
            LineMeter(stack.host, lambda link: True).run
        )  # measure links in the lab, too, whose peers are in one network
        averager = Averager(stack.host, stack.rpc, gloo)
        reply(peer=stack.host.id.text, addr=str(stack.host.addrs()[0]))
        await obey(averager)
        nursery.cancel_scope.cancel()
    if gloo is not None:
        gloo.close()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
