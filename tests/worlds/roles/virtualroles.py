"""Roles that run under virtual time: programs for a World's nodes, what they hold, a small run, a paced device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import trio

from peerd.core.errors import ConfigError, NoMemory
from peerd.core.work import Worker
from peerd.daemon.daemon import RESTART_PAUSES_S
from peerd.log import EventLog
from peerd.model.changes import ParametersLost
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.run.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.runs import changed
from tests.worlds.machines.fakehost import leaves
from tests.worlds.network.world import home_world
from tests.worlds.roles.contexts import DEVICES, role_context
from tests.worlds.roles.inline_worker import InlineWorker
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import Node, World

T = TypeVar("T")


def virtual_run(folder: Path, text_bytes: tuple[int, ...], stages: int = 1, **sections: Any) -> RunFile:
    """A run of a tiny model on texts of these sizes, which are made in `folder`; `sections`: see `changed`."""
    for i, size in enumerate(text_bytes):
        text = bytes((7 * i + 13 * j * j + j // 3) % 251 or 251 for j in range(size))
        (folder / f"text{i}.txt").write_bytes(text)
    run = RunFile(
        run="virtual",
        seed=5,
        model=ModelSection(d_model=8, heads=1, layers=stages, context=8),
        pipeline=PipelineSection(stages=stages, microbatch=1),
        optimizer=OptimizerSection(name="adamw", lr=1e-3),
        batch=BatchSection(target_samples=24),
        data=DataSection(path=str(folder / "*.txt"), holdout=0.1),
        evaluate=EvaluateSection(every_steps=0),
        checkpoint=CheckpointSection(every_steps=0),
    )
    return changed(run, **sections)


class PacedDevice(InlineWorker):
    """One on which a microbatch takes its time."""

    def __init__(self, microbatch_s: float) -> None:
        super().__init__()
        self.microbatch_s = microbatch_s
        self.fails: Callable[[str], str] = lambda job: ""  # "before" or "after" it, by the job's name; "": not at all

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        cost_s = self.microbatch_s if name == "backward" else cost_s
        job = partial(self._fail, when, job) if (when := self.fails(name)) else job
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)

    @staticmethod
    def _fail(when: str, job: Callable[[], object]) -> Any:
        if when == "after":  # or in the middle, for all that anybody knows
            job()
        raise torch.OutOfMemoryError("CUDA out of memory")


def _hold_to(route: Collection[str], services: RunServices) -> None:
    """Let the pipelines of these services know of no other peers."""
    pipeline = services.pipeline

    def held(*grants: Any) -> Any:
        made = pipeline(*grants)
        update = made.update
        made.update = lambda members: update([one for one in members if one.peer in route])  # type: ignore[method-assign]
        return made

    services.pipeline = held  # type: ignore[method-assign]


class Roles:
    """Programs that run one role, and the roles that they run, by node."""

    def __init__(self, run: RunFile, directory: Path, worker: Callable[[], Worker] = InlineWorker) -> None:
        self.run, self.directory, self.worker = run, directory, worker
        self.live: dict[str, Any] = {}
        self.logs: dict[str, EventLog] = {}
        self.devices: dict[str, Worker] = {}
        self.lives: dict[str, trio.CancelScope] = {}  # of roles; a cancelled one begins again
        self.owner: Callable[[str, str], bool] | None = None  # told a node and why its role could not go on

    def program(
        self,
        role: Callable[[RoleContext], Any],
        network: Any = None,
        run: RunFile | None = None,
        route: Collection[str] | None = None,
    ) -> Any:
        """A node's program. `run`: the run file as this peer has it, in place of everybody's. `route`: the only peers
        that a trainer calls.
        """
        network, own = network or swarm(), run or self.run

        async def program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
            below = trio.CancelScope()

            async def stand(*, task_status: trio.TaskStatus[None]) -> None:
                with below:
                    await network(node, task_status=task_status)

            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(stand)
                    below.shield = True  # what a role stands on ends after it
                    await self._live(node, role, own, route, nursery, task_status)
                except* ConfigError as errors:
                    first = next(error for error in leaves(errors))
                    if self.owner is None or not self.owner(node.name, str(first)):
                        raise
                    nursery.cancel_scope.cancel()  # the process ends
                finally:
                    self.live.pop(node.name, None)
                    below.cancel()

        return program

    async def _live(
        self,
        node: Node,
        role: Callable[[RoleContext], Any],
        run: RunFile,
        route: Collection[str] | None,
        nursery: trio.Nursery,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Run a role on a network that stands."""
        workers = {name: self.worker() for name in DEVICES}
        self.logs[node.name] = log = EventLog(node.clock)
        self.devices[node.name] = workers["cpu"]
        ctx = role_context(node, run, self.directory / node.name, workers.__getitem__, log)
        assert ctx.services is not None
        if route is not None:
            _hold_to(route, ctx.services)
        if run.pipeline.placement == "network":
            nursery.start_soon(ctx.services.link_watch.run)
        task_status.started()
        while True:
            self.live[node.name] = built = role(ctx)
            with trio.CancelScope() as self.lives[node.name]:
                try:
                    await built.run()
                except* (NoMemory, ParametersLost) as errors:
                    log.event("role.failed", why=str(leaves(errors)))
                else:
                    await trio.sleep_forever()
            await trio.lowlevel.checkpoint_if_cancelled()  # it was not the role that was ended, but its process
            del self.live[node.name]
            await trio.sleep(RESTART_PAUSES_S[0])

    def of(self, kind: type) -> list[Any]:
        return [role for _, role in sorted(self.live.items()) if isinstance(role, kind)]

    def steps(self) -> list[int]:
        return [role.position.step for role in self.of(StageRole)]

    def story(self) -> str:
        return "\n".join(f"{name}: {event}" for name, log in self.logs.items() for event in log.recent(12))

    def serving(self, stage: int) -> list[str]:
        """Names of the peers that serve a stage."""
        found = [(name, role) for name, role in sorted(self.live.items()) if isinstance(role, StageRole)]
        return [name for name, role in found if stage in [post.stage for post in role.posts]]

    def conductors(self) -> list[str]:
        """Names of the peers that conduct the run."""
        return [name for name, role in sorted(self.live.items()) if conducts(role)]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Events with one of these names from the logs of all peers."""
        return [event for log in self.logs.values() for event in log.recent(200) if event["name"] in names]

    def conductor_notes(self) -> list[str]:
        """Everybody's notes about the conductor's duty."""
        return [str(event["note"]) for event in self.events("conductor.noted")]

    def replica_step(self) -> int:
        """The newest of the replicas' steps."""
        return max((role.replica.position.step for role in self.of(TrainerRole)), default=0)


def conducts(role: Any) -> bool:
    """True for a stage peer or a replica that conducts the run."""
    member = role.replica if isinstance(role, TrainerRole) else role if isinstance(role, StageRole) else None
    return member is not None and member._services.conducting.acting


@asynccontextmanager
async def pipeline_world(
    roles: Roles, stage_peers: int, *trainers: str, seed: int = 1, network: Any = None, step: int = 3
) -> AsyncIterator[World]:
    """A world at home with stage peers that choose their stages, and trainers; entered once all peers made `step`."""
    async with home_world(seed) as world:
        for number in range(stage_peers):
            await world.start(f"stage{number}", program=roles.program(StageRole, network))
        for name in trainers:
            await world.start(name, program=roles.program(TrainerRole, network))

        def ready() -> bool:
            return len(roles.steps()) == stage_peers and min(roles.steps()) >= step

        assert await world.until(ready, within_s=120), roles.story()
        yield world


@asynccontextmanager
async def replica_world(roles: Roles, count: int, *, seed: int = 1, step: int = 3) -> AsyncIterator[World]:
    """A world at home with trainers of whole replicas; entered once one of them has made `step`."""
    async with home_world(seed) as world:
        await start_replicas(world, roles, count)
        assert await world.until(lambda: roles.replica_step() >= step, within_s=120), roles.story()
        yield world


async def start_replicas(world: World, roles: Roles, count: int) -> None:
    """Start trainers of whole replicas."""
    for number in range(count):
        await world.start(f"replica{number}", program=roles.program(TrainerRole))
