"""Chaos without malice: a swarm that begins, has misfortunes at random, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import trio

from peerd.access.access_guard import REFRESH_S
from peerd.pipeline.stage.post_state import PostState
from roles.aggregator import AuxAggregatorRole
from roles.backbone import BackboneRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.roles.misfortunes import PAUSES_S, Misfortunes, public_ip

MISFORTUNES = 8
LAST_S = (3.0, 8.0, 14.0, 25.0, 40.0)
BACK_WITHIN_S = 60.0
STEPS = 4


async def in_no_thread(job: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """Stands in for `trio.to_thread.run_sync`: while a thread works, virtual time would run away."""
    await trio.lowlevel.checkpoint()
    return job(*args)


class Chaos(Misfortunes):
    """A swarm that begins, has misfortunes, each drawn at random, and goes on."""

    async def run(self) -> None:
        """Begin, have misfortunes, and go on."""
        with mock.patch("os.replace", self.replace):
            await self.begin()
            await self.strike()
            await self.goes_on()

    async def begin(self) -> None:
        """Start the swarm: two peers a stage, or one more, and two trainers; of one stage, four replicas."""
        await self._boot()
        for _ in range(2 * self._stages + self._rng.randrange(2) if self._stages > 1 else 0):
            await self._start("stage", StageRole)
        for _ in range(2 if self._stages > 1 else 4):
            await self._start("trainer", TrainerRole)
        if self._rng.random() < 0.3:
            await self._start("helper", AuxAggregatorRole)
        assert await self._world.until(lambda: min(self.steps()) >= 3, within_s=BACK_WITHIN_S), self.story()

    async def _boot(self) -> None:
        network = self._homes.program("public", relay=True) if self._homes is not None else None
        if self._rng.random() < 0.7:  # it keeps checkpoints; else it knows of no run
            network = self._roles.program(BackboneRole, network)
        boot = await self._world.start("boot", program=network, ip=public_ip(0))
        self._world.bootstrap.append(boot.full_addr)

    async def strike(self) -> None:
        """Let misfortunes come, some of them together, and mend all that is left to mend."""
        kinds = (
            *[self._kill] * 2,
            *[self._stall] * 2,
            self._cut,
            self._part,
            self._slow,
            self._join,
            self._leave,
            self._lose_stage,
            self._lose_all,
            self._lose_boot,
            self._lose_files,
            self._spoil_file,
            self._move,
            self._rough,
            self._fail_role,
            *[self._lack_memory] * 2,
            self._fill_disk,
        )
        if self._homes is not None:
            kinds = (*kinds, self._restart_router)
        if self._organizer is not None:
            kinds = (*kinds, *[self._revoke] * 3)
        async with trio.open_nursery() as nursery:
            for _ in range(MISFORTUNES):
                nursery.start_soon(self._rng.choice(kinds), self._rng.choice(self._names), self._rng.choice(LAST_S))
                await trio.sleep(self._rng.choice(PAUSES_S))
        self._world.net.heal()
        for name in self._names:
            self._world.net.resume(name)
        self._tell("all is mended")

    async def goes_on(self) -> None:
        """Wait until every peer takes part in new steps, in one swarm."""
        seen: set[int] = set()

        def on() -> bool:
            steps = self.steps()
            if self._parted():
                seen.clear()
            seen.add(max(steps))
            return len(steps) == len(self._names) and len(seen) > STEPS and max(steps) - min(steps) <= 1

        # A token that was renewed is looked for every twenty seconds, and shown to those that refused the old one.
        within_s = BACK_WITHIN_S if self._organizer is None else BACK_WITHIN_S + 3 * REFRESH_S
        assert await self._world.until(on, within_s=within_s), self.story()

    def _parted(self) -> bool:
        """True while a part that was cut off goes on by itself."""
        return len({role._services.following.conductor for role in self._trained()}) > 1

    def _trained(self) -> list[Any]:
        """All roles that make the run's steps."""
        return [role for role in self._roles.live.values() if isinstance(role, StageRole | TrainerRole)]

    def steps(self) -> list[int]:
        """The step of each peer that has one."""
        return [role.status()["step"] for role in self._trained()]

    def states(self) -> list[PostState]:
        """The model's parts that peers hold."""
        members = [r.replica if isinstance(r, TrainerRole) else r for r in self._roles.live.values()]
        return [post.state for member in members for post in getattr(member, "posts", [])]
