"""Rate of calls to experts in another process of this machine, and of the same work in one process.

Remote: a `peerd join --role expert` process, called from here over TCP on loopback; each caller sends one batch after
another forward and backward. Local: the same experts called in turn, without a network. Both compute with one thread.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
import torch
import trio
from multiaddr import Multiaddr

from peerd.codec.frames import to_frame
from peerd.experts.calls.expert_client import ExpertClient
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.model.worker import DeviceWorker, use_threads
from peerd.role.peer_stack import PeerStack
from peerd.run.expert_network import ExpertCall
from peerd.run.grid import Uid
from peerd.run.runfile import ExpertsSection, LimitsSection, ModelSection, RunFile
from scripts.benchmarks._remote_process import new_stack
from scripts.process_swarm import ProcessSwarm

WIDTH: Final = 1024
BATCH: Final = 64
EXPERTS: Final = 8
CALLERS: Final = (1, 8, 32)


def the_run() -> RunFile:
    """A run with eight experts of 1024 - 4096 - 1024 on one host."""
    section = ExpertsSection(
        block="ffn1", grid=[EXPERTS], layers=1, top_k=1, timeout_s=120.0, announce_s=2.0, max_batch=16 * BATCH, copies=0
    )
    return RunFile(
        run="experts",
        model=ModelSection(d_model=WIDTH, layers=1),
        experts=section,
        limits=LimitsSection(experts=EXPERTS),
        listen=["/ip4/127.0.0.1/tcp/0"],
    )


def local_rate(seconds: float) -> float:
    """Batches per second, forward and backward, in this process."""
    use_threads(1)
    run = the_run()
    experts = [HostedExpert(run, Uid(0, (number,))) for number in range(EXPERTS)]
    x, gradient = to_frame(torch.randn(BATCH, WIDTH)), to_frame(torch.randn(BATCH, WIDTH) / BATCH)
    experts[0].backward([(x, gradient)])  # the first call of torch is slower
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        expert = experts[done % EXPERTS]
        expert.forward([x])
        expert.backward([(x, gradient)])
        done += 1
    return done / (time.perf_counter() - began)


def remote_rates(seconds: float) -> dict[str, float]:
    """Batches per second, by number of callers."""
    with (
        tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder,
        ProcessSwarm(Path(folder), msgspec.to_builtins(the_run())) as swarm,
    ):
        host = swarm.join("host", "expert")
        swarm.until(lambda: (host.role().get("hosted") or 0) >= EXPERTS, "the host has not all experts")
        return {str(count): trio.run(_measure, host.addr(), count, seconds) for count in CALLERS}


async def _measure(address: str, callers: int, seconds: float) -> float:
    stack = new_stack()
    async with trio.open_nursery() as nursery, DeviceWorker("cpu", threads=1) as worker:
        await nursery.start(stack.run, [], [Multiaddr(address)])
        rate = await _call(stack, worker, callers, seconds)
        nursery.cancel_scope.cancel()
    return rate


async def _call(stack: PeerStack, worker: DeviceWorker, callers: int, seconds: float) -> float:
    run = the_run()
    directory = ExpertDirectory(run, stack.rpc, stack.host, stack.dht, stack.clock)
    client = ExpertClient(run, stack.rpc, directory, stack.clock, worker)
    rows = tuple(range(BATCH))
    x, gradient = to_frame(torch.randn(BATCH, WIDTH)), to_frame(torch.randn(BATCH, WIDTH) / BATCH)
    done = 0

    async def train(number: int) -> None:
        nonlocal done
        uid = Uid(0, (number % EXPERTS,))
        while True:
            await directory.below([uid.prefix])
            (answer,) = await client.forward([ExpertCall(uid, rows, (x,))], BATCH)
            assert answer is not None
            await client.backward([ExpertCall(uid, rows, (x, gradient), answer.served)])
            done += 1

    async with trio.open_nursery() as nursery:
        for number in range(callers):
            nursery.start_soon(train, number)
        await trio.sleep(seconds / 3)
        before, began = done, trio.current_time()
        await trio.sleep(seconds)
        made, passed_s = done - before, trio.current_time() - began
        nursery.cancel_scope.cancel()
    return made / passed_s
