"""Experts on two other hosts, over real sockets, equal the same experts in one process: outputs, gradients, updates."""

from __future__ import annotations

import random

import pytest
import torch
import trio
from torch import Tensor

from peerd.core.addr import tcp_addr
from peerd.core.keys import Keypair
from peerd.experts.calls.blocking import BlockingExperts
from peerd.experts.calls.expert_client import ExpertClient
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.experts.calls.expert_server import ExpertServer
from peerd.experts.hosting.host import Hosted
from peerd.experts.model.dmoe import DMoE
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.experts.rules.claims import ClaimingHost, announcements
from peerd.model.worker import DeviceWorker
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, ModelSection, RunFile
from peerd.wire.clock import RealClock
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.kit.local_experts import LocalExperts

pytestmark = [pytest.mark.socket, pytest.mark.slow]
WIDTH = 16


def the_run() -> RunFile:
    section = ExpertsSection(grid=[4, 4], layers=1, hidden=32, top_k=3, timeout_s=30.0, grace_s=30.0)
    return RunFile(run="equal", seed=5, model=ModelSection(d_model=WIDTH, layers=1), experts=section)


def stack_of(number: int) -> PeerStack:
    rng = random.Random(number)
    return peer_stack(Keypair(rng.randbytes(32)), RealClock(), [TcpTransport()])


def two_hosts(run: RunFile) -> list[dict[Uid, Hosted]]:
    """Every expert, half of them on each host."""
    uids = [grid_of(run).uid(number) for number in range(16)]
    return [{uid: Hosted(HostedExpert(run, uid), 0) for uid in uids[half::2]} for half in range(2)]


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(layer: DMoE, updates: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Output, gradient of the input and of the gate, of each update."""
    found = []
    for update in range(updates):
        x = values(12, WIDTH, seed=update).requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.backward(0.1 * values(12, WIDTH, seed=update + 100))
        assert x.grad is not None
        assert layer.gate.weight.grad is not None
        found.append((y.detach(), x.grad, layer.gate.weight.grad.clone()))
    return found


def assert_same_experts(local: LocalExperts, shares: list[dict[Uid, Hosted]]) -> None:
    """Weights, moments and counts of all that learnt, bit for bit."""
    touched: dict[Uid, int] = {uid: e.version for uid, e in local.experts.items() if e.version}
    assert len(touched) >= 8
    for uid, version in touched.items():
        hosted = next(share[uid] for share in shares if uid in share).model
        assert hosted.version == version
        assert hosted.snapshot() == local.experts[uid].snapshot(), uid


async def test_experts_on_other_hosts_equal_those_of_one_process() -> None:
    run = the_run()
    grid, stacks = grid_of(run), [stack_of(number) for number in range(3)]
    shares = await trio.to_thread.run_sync(two_hosts, run)
    async with trio.open_nursery() as nursery, DeviceWorker("cpu", threads=1) as worker:
        await nursery.start(stacks[0].run, [tcp_addr("127.0.0.1", 0)], [])
        way_in = stacks[0].host.addrs()[:1]
        await nursery.start(stacks[1].run, [tcp_addr("127.0.0.1", 0)], way_in)
        await nursery.start(stacks[2].run, [], way_in)
        for stack, experts in zip(stacks, shares, strict=False):
            server = ExpertServer(run, stack.rpc, stack.clock, experts)
            await nursery.start(server.run, worker, stack.host.supervise)
            board = ExpertDirectory(run, stack.rpc, stack.host, stack.dht, stack.clock)
            await board.announce(announcements(grid, dict.fromkeys(experts, (0, 0)), ClaimingHost(queue_s=0.0)))
        caller = stacks[2]
        directory = ExpertDirectory(run, caller.rpc, caller.host, caller.dht, caller.clock)
        remote = BlockingExperts(ExpertClient(run, caller.rpc, directory, caller.clock, worker))
        local = LocalExperts(run)
        layer, reference = DMoE(run, 0, remote), DMoE(run, 0, local)
        reference.load_state_dict(layer.state_dict())
        mine = await trio.to_thread.run_sync(train, layer, 10)
        remote.close()
        nursery.cancel_scope.cancel()
    theirs = await trio.to_thread.run_sync(train, reference, 10)
    for step, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        for name, a, b in zip(("output", "input's gradient", "gate's gradient"), one, other, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=0), f"{name} of update {step}"
    await trio.to_thread.run_sync(assert_same_experts, local, shares)
