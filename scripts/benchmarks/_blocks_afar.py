"""Figure 4 of Learning@home: throughput of a model of 224 blocks on four devices, with a delay after each block.

Hosts, calls and queues are real, but run in virtual time; the devices do not compute, and a fixed time is charged for
each batch. Callers train one batch after another: each batch passes all blocks forward and backward, with an
exponential delay after each, as in section 4.1. Model parallel training is a single such caller.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.experts.calls.expert_server import ExpertServer, ServerConfig
from peerd.messages.experts import Backward, Forward, Gradient, Name, Output
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, RunFile, fingerprint
from tests.worlds.roles.inline_worker import InlineWorker
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import Node, World

BLOCKS: Final = 224
DEVICES: Final = 4
CALLERS: Final = 64
DELAYS_MS: Final = (0, 50, 100, 200)
SAMPLES: Final = {"feedforward": 2048, "transformer": 4}  # of one batch
# A GTX 1080 at 6 TFLOP/s: 25.2M weights on 2048 rows; 12.6M weights and attention on 4 x 512.
FORWARD_S: Final = {"feedforward": 0.0172, "transformer": 0.0093}
BACKWARD_COST: Final = 3.0  # of a backward call, in forward passes: it recomputes the forward pass
WARM_S: Final = 10.0
WINDOW_S: Final = 30.0
_WIDTH: Final = 4  # values of the rows that are sent in place of batches


class StandIn:
    """An expert without weights."""

    def __init__(self) -> None:
        self.version = 0
        self.generation = 0
        self.model = self

    def forward(self, xs: Any) -> list[TensorFrame]:
        return list(xs)

    def backward(self, pairs: Any) -> list[TensorFrame]:
        self.version += 1
        return [gradient for _, gradient in pairs]


@dataclass(slots=True)
class Scene:
    """The hosts of one measurement."""

    run: RunFile
    kind: str
    delay_s: float
    hosts: list[Node] = field(default_factory=list)
    servers: list[ExpertServer] = field(default_factory=list)
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def row(self) -> TensorFrame:
        return TensorFrame("float32", (1, _WIDTH), np.zeros(_WIDTH, "float32").tobytes())

    async def serve(self, node: Node, device: int) -> None:
        """Serve one device's share of the blocks."""
        experts = {Uid(0, (b,)): StandIn() for b in range(device, BLOCKS, DEVICES)}
        forward_s = FORWARD_S[self.kind]
        config = ServerConfig(cost_s=lambda backward, n: n * forward_s * (BACKWARD_COST if backward else 1.0))
        server = ExpertServer(self.run, node.rpc, node.clock, experts, config)
        self.servers.append(server)
        await server.run(InlineWorker(), node.host.supervise)

    async def train(self, node: Node, number: int) -> None:
        """Run one caller. Its first batch starts at a random block, so that the callers are spread from the start."""
        rng = node.clock.rng(f"caller {number}")
        steps = [(block, False) for block in range(BLOCKS)] + [(block, True) for block in reversed(range(BLOCKS))]
        at = rng.randrange(len(steps))
        while True:
            block, backward = steps[at % len(steps)]
            await self._call(node, block, backward)
            at += 1
            if self.delay_s:
                await trio.sleep(rng.expovariate(1 / self.delay_s))

    async def _call(self, node: Node, block: int, backward: bool) -> None:
        run, name = fingerprint(self.run), Name(0, [block])
        host = self.hosts[block % DEVICES].id
        if backward:
            request = next(self.ids).to_bytes(16, "big")
            body = Backward(run, name, request, 0, 0)
            frames = (self.row(), self.row())
            await node.rpc.call(host, "expert/1/backward", body, Gradient, frames=frames, timeout_s=600.0)
        else:
            await node.rpc.call(
                host, "expert/1/forward", Forward(run, name), Output, frames=(self.row(),), timeout_s=600.0
            )

    def busy_s(self) -> float:
        return sum(server.stats.busy_s for server in self.servers)


async def _throughput(kind: str, callers: int, delay_s: float, window_s: float) -> float:
    """Samples per second through the whole model."""
    section = ExpertsSection(grid=[BLOCKS], layers=1, input=[_WIDTH], max_batch=1, top_k=1, timeout_s=600.0)
    scene = Scene(RunFile(run="blocks", experts=section), kind, delay_s)
    assert grid_of(scene.run).places == BLOCKS
    async with World(f"{kind} {callers} {delay_s}", swarm()).running() as world, trio.open_nursery() as nursery:
        scene.hosts = await world.start_many(DEVICES, bootstrap=True)
        for device, node in enumerate(scene.hosts):
            nursery.start_soon(scene.serve, node, device)
        (caller,) = await world.start_many(1)
        for node in scene.hosts:
            caller.host.learn(node.id, [node.addr])
            await caller.host.connect(node.id)
        for number in range(callers):
            nursery.start_soon(scene.train, caller, number)
        await trio.sleep(WARM_S)
        before = scene.busy_s()
        await trio.sleep(window_s)
        worked_s = scene.busy_s() - before
        nursery.cancel_scope.cancel()
    batch_s = BLOCKS * FORWARD_S[kind] * (1 + BACKWARD_COST)
    return worked_s / batch_s / window_s * SAMPLES[kind]


def measure_blocks(full: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Samples per second, as {asynchronous, model_parallel: {kind: {delay in ms: rate}}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, callers in (("asynchronous", CALLERS), ("model_parallel", 1)):
        window_s = (4 if full else 1) * (WINDOW_S if callers > 1 else 4 * WINDOW_S)
        found[name] = {
            kind: {str(ms): run_virtual(_throughput, kind, callers, ms / 1000, window_s, seed=ms) for ms in DELAYS_MS}
            for kind in SAMPLES
        }
    return found
