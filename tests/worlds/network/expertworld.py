"""Peers of a run with experts in a simulated world: hosts that announce and answer as a test says, and a caller."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Refused
from peerd.experts.calls.expert_client import ExpertClient
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.messages.experts import Announced, Backward, Forward, Gradient, Name, Output
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.expert_network import ExpertCall
from peerd.run.grid import Grid, Uid, bitmap, grid_of
from peerd.run.runfile import RunFile
from tests.kit.declared import declared
from tests.kit.expert_runs import expert_run
from tests.kit.virtual_time import within
from tests.worlds.machines.fake_experts import frame as frame_of
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import Node, World

WIDTH = 3


def experts_run(*sides: int, **experts: Any) -> RunFile:
    """A run whose experts take and give vectors of WIDTH numbers."""
    return expert_run(*sides, width=WIDTH, **experts)


def frame(rows: int, value: float = 1.0, width: int = WIDTH, dtype: str = "float32") -> TensorFrame:
    """Samples that hold one value."""
    return frame_of(*[value] * rows, width=width, dtype=dtype)


def values_of(given: TensorFrame) -> list[float]:
    return sorted(set(np.frombuffer(bytes(given.payload), dtype=np.float32).tolist()))


def announcements(grid: Grid, experts: Iterable[Uid], generation: int = 0, **changes: Any) -> list[Announced]:
    """One record per prefix."""
    below = dict[Uid, set[int]]()
    for uid in experts:
        for prefix in grid.prefixes(uid):
            below.setdefault(prefix, set()).add(uid.at[len(prefix.at)])
    records = []
    for prefix, coordinates in sorted(below.items()):
        numbers = [generation] * len(coordinates) if len(prefix.at) == len(grid.sides) - 1 else []
        told: dict[str, Any] = {"versions": [0] * len(numbers), "queue_s": 0.0, "addrs": [], **changes}
        bits = bitmap(coordinates, grid.side_below(prefix))
        records.append(Announced(Name.of(prefix), bits, generations=numbers, **told))
    return records


Answers = Callable[[Incoming[Any]], Awaitable[Answer[Any]]]


@dataclass
class ExpertPeer:
    """One peer. As a host it multiplies samples by 2 and gradients by 3, and counts updates, unless told otherwise."""

    node: Node
    run: RunFile
    directory: ExpertDirectory
    client: ExpertClient
    experts: set[Uid] = field(default_factory=set)
    generation: int = 0
    updates: dict[Uid, int] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)  # bodies of the calls to it
    forward: Answers | None = None  # in place of its own
    backward: Answers | None = None
    _serves: bool = False

    async def host(self, *experts: Uid, generation: int = 0) -> None:
        """Announce and serve these experts."""
        self.experts |= set(experts)
        self.generation = generation
        self.serve()
        await self.directory.announce(announcements(grid_of(self.run), self.experts, generation))

    def serve(self) -> None:
        """Answer calls from now on."""
        if self._serves:
            return
        self._serves = True
        limits = declared(frames=2, frame_bytes=1 << 20)
        self.node.rpc.serve("expert/1/forward", Forward, functools.partial(self._answer, "forward"), declared=limits)
        self.node.rpc.serve("expert/1/backward", Backward, functools.partial(self._answer, "backward"), declared=limits)

    async def _answer(self, verb: str, call: Incoming[Any]) -> Answer[Any]:
        await trio.lowlevel.checkpoint()
        self.seen.append(call.body)
        other = self.forward if verb == "forward" else self.backward
        if other is not None:
            return await other(call)
        return self.answer(call)

    def answer(self, call: Incoming[Any]) -> Answer[Any]:
        """The answer of a host that does what it should."""
        uid = call.body.expert.uid
        if uid not in self.experts:
            raise Refused(f"expert {uid} is not here")
        backward = isinstance(call.body, Backward)
        rows = np.frombuffer(bytes(call.frames[-1].payload), dtype=np.float32) * np.float32(3 if backward else 2)
        told = TensorFrame("float32", call.frames[-1].shape, rows.tobytes())
        if not backward:
            return Answer(Output(self.generation, self.updates.get(uid, 0)), (told,))
        self.updates[uid] = self.updates.get(uid, 0) + 1
        return Answer(Gradient(self.generation, self.updates[uid]), (told,))


@dataclass
class ExpertWorld:
    """The peers of one world; the first is everybody's bootstrap."""

    world: World
    run: RunFile
    peers: list[ExpertPeer] = field(default_factory=list)

    async def start(self, skew_s: float = 0.0) -> ExpertPeer:
        """Another peer, which has joined; its wall clock may be off."""
        node = await self.world.start(skew_s=skew_s)
        if not self.world.bootstrap:
            self.world.bootstrap.append(node.full_addr)
        directory = ExpertDirectory(self.run, node.rpc, node.host, node.dht, node.clock)
        client = ExpertClient(self.run, node.rpc, directory, node.clock, InlineWorker())
        self.peers.append(ExpertPeer(node, self.run, directory, client))
        return self.peers[-1]


@asynccontextmanager
async def expert_world(run: RunFile, count: int = 3) -> AsyncIterator[ExpertWorld]:
    """A world of `count` peers."""
    with trio.fail_after(10_000):
        async with World(1, swarm()).running() as world:
            scene = ExpertWorld(world, run)
            for _ in range(count):
                await scene.start()
            yield scene


def in_expert_world(run: RunFile | None = None, count: int = 3) -> Any:
    """Decorates a test that takes a world of `count` peers."""
    return within(functools.partial(expert_world, run or experts_run(), count))


def asks_for(uids: Sequence[Uid], rows: int = 2) -> list[ExpertCall]:
    """Every expert is asked for the same samples."""
    return [ExpertCall(uid, tuple(range(rows)), (frame(rows),)) for uid in uids]
