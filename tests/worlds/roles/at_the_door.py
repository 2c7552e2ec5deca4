"""Churn at the door: many peers join a swarm at once while its stage peers are killed, all behind two addresses.

`AtTheDoor` starts a backbone, founders and trainers, lets newcomers in at random moments, kills a serving stage peer
now and then, and keeps a record of each: the longest pause between steps, how many peers conducted at once, who was put
aside, and when each newcomer served or gave a reason for waiting.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from roles.backbone import BackboneRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.world import World

LOOK_S: Final = 0.1
KILLS: Final = ((True, True), (False, False), (True, False), (False, True))  # is it the conductor, and silently?
PLACES: Final = ("2a00:1450:4001:1::", "2a00:1450:4001:2::")  # IPv6: the peers of a /64 share a place


@dataclass(slots=True)
class Newcomer:
    """One joiner. Times are seconds of virtual time; infinite: not yet."""

    came_at: float
    served_s: float = float("inf")  # from its start until the conductor listed it as ready, or counted its work
    silent_s: float = 0.0  # longest time in which it neither served nor gave a reason
    heard_at: float = 0.0
    said: Counter[str] = field(default_factory=Counter)


class AtTheDoor:
    """See the module's header. Call `begin`, then `churn`, then read what was seen."""

    def __init__(self, world: World, roles: Roles, rng: random.Random) -> None:
        """`rng` draws when newcomers come, what they do, and who is killed how."""
        self.world, self.roles, self.rng = world, roles, rng
        self.newcomers: dict[str, Newcomer] = {}
        self.killed: list[str] = []
        self.gaps: list[tuple[float, float, int]] = []  # (seconds, at, step) between two steps, the longest first
        self.fell_back: list[tuple[float, int, int]] = []  # (at, from step, to step)
        self.conducting: Counter[int] = Counter()  # number of conductors -> looks
        self.most_conductors_s = 0.0  # longest time with more than one
        self.story: list[str] = []
        self._number = 0

    def tell(self, text: str) -> None:
        self.story.append(f"{trio.current_time():7.1f} {text}")

    async def start(self, kind: str, role: Any) -> str:
        self._number += 1
        name = f"{kind}{self._number:02d}"
        ip = f"{PLACES[self._number % len(PLACES)]}{self._number:x}"
        await self.world.start(name, program=self.roles.program(role), ip=ip)
        return name

    async def begin(self, peers: int, trainers: int, step: int = 4) -> None:
        """A backbone, stage peers and trainers that have made some steps."""
        boot = await self.world.start("boot", program=self.roles.program(BackboneRole), ip="2a00:1450:4001:3::1")
        self.world.bootstrap.append(boot.full_addr)
        for _ in range(peers):
            await self.start("stage", StageRole)
        for _ in range(trainers):
            await self.start("trainer", TrainerRole)
        stages = self.roles.run.pipeline.stages
        ready = lambda: len(self.roles.steps()) >= stages and min(self.roles.steps(), default=0) >= step  # noqa: E731
        assert await self.world.until(ready, within_s=120), self.roles.story()

    async def churn(self, joiners: int, within_s: float, kill_each_s: float, watched_s: float) -> None:
        """Let newcomers in within `within_s`, kill a stage peer every `kill_each_s`, and watch for `watched_s`."""
        async with trio.open_nursery() as nursery:
            for at in sorted(self.rng.uniform(0, within_s) for _ in range(joiners)):
                trainer = self.rng.random() < 0.2
                nursery.start_soon(self._join, at, "trainer" if trainer else "stage")
            nursery.start_soon(self._kill_now_and_then, within_s, kill_each_s)
            await self._watch(watched_s)
            nursery.cancel_scope.cancel()

    async def _join(self, after_s: float, kind: str) -> None:
        await trio.sleep(after_s)
        number = len(self.newcomers)
        began = trio.current_time()
        self.tell(f"a {kind} joins")
        key = f"pending{number}"
        self.newcomers[key] = Newcomer(began, heard_at=began)
        name = await self.start(kind, TrainerRole if kind == "trainer" else StageRole)
        self.newcomers[name] = self.newcomers.pop(key)

    async def _kill_now_and_then(self, within_s: float, each_s: float) -> None:
        until = trio.current_time() + within_s
        for conducts, silent in itertools.cycle(KILLS):
            if trio.current_time() + each_s > until:
                return
            await trio.sleep(each_s)
            await self._kill(self._victim(conducts), silent)

    def _victim(self, conducts: bool) -> str:
        """The conductor, or another stage peer that serves: one of the two that came first, or any."""
        conductors = self.roles.conductors()
        if conducts and conductors:
            return conductors[0]
        ready = self._ready
        stages = [name for name, role in sorted(self.roles.live.items()) if isinstance(role, StageRole)]
        serving = [name for name in stages if self.world.nodes[name].id.text in ready and name not in conductors]
        return self.rng.choice([*serving[:2], self.rng.choice(serving)])

    async def _kill(self, name: str, silent: bool) -> None:
        conducts = ", which conducts," if name in self.roles.conductors() else ""
        stage = self.roles.live[name].stage
        self.tell(f"{name} of stage {stage}{conducts} is killed{' silently' if silent else ''}")
        self.killed.append(name)
        await self.world.kill(self.world.nodes[name], silent=silent)

    # --- what is seen -----------------------------------------------------------------------------------------

    @property
    def _ready(self) -> set[str]:
        """The peers that a conductor lists as ready."""
        found = set[str]()
        for name in self.roles.conductors():
            role: Any = self.roles.live[name]
            machine = role._services.conducting.machine
            found |= {m.peer.partition("/")[0] for m in machine.members() if m.ready}
        return found

    def step(self) -> int:
        """The step of the run: the newest that a trainer knows."""
        return max((role.status()["step"] for role in self.roles.of(TrainerRole)), default=0)

    async def _watch(self, for_s: float) -> None:
        until = trio.current_time() + for_s
        step, since, several_since = self.step(), trio.current_time(), None
        while trio.current_time() < until:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            if (at := self.step()) != step:
                if at < step:
                    self.fell_back.append((now, step, at))
                    self.tell(f"the run goes from step {step} to step {at}")
                self.gaps.append((round(now - since, 1), round(since, 1), step))
                step, since = at, now
            conductors = self.roles.conductors()
            self.conducting[len(conductors)] += 1
            several_since = None if len(conductors) < 2 else now if several_since is None else several_since
            if several_since is not None:
                self.most_conductors_s = max(self.most_conductors_s, now - several_since)
            self._look_at_newcomers(now)
        self.gaps.append((round(trio.current_time() - since, 1), round(since, 1), step))
        self.gaps.sort(reverse=True)

    def _look_at_newcomers(self, now: float) -> None:
        ready = self._ready
        for name, one in self.newcomers.items():
            role: Any = self.roles.live.get(name)
            if name in self.killed:
                continue
            why = role.status()["waits_for"] if role is not None else ""
            if isinstance(role, TrainerRole):
                serves = role.status()["microbatches"]["counted"] > 0
            else:
                serves = name in self.world.nodes and self.world.nodes[name].id.text in ready
            if serves:
                one.served_s = min(one.served_s, now - one.came_at)
            if why:
                one.said[str(why)] += 1
            if why or one.served_s < float("inf"):
                one.heard_at = now
            one.silent_s = max(one.silent_s, now - one.heard_at)

    def put_aside(self) -> list[str]:
        """Notes on living peers that were put aside, all of them honest."""
        notes = [note for note in self.roles.conductor_notes() if "put aside" in note]
        dead = [self.world.nodes[name].id.text[-8:] for name in self.killed]
        return [note for note in notes if not any(f"…{end} " in note for end in dead)]

    def unserved(self) -> dict[str, Newcomer]:
        """Newcomers, not killed, that never served."""
        living = {name: one for name, one in self.newcomers.items() if name not in self.killed}
        return {name: one for name, one in living.items() if one.served_s == float("inf")}

    def report(self) -> str:
        """All that was seen, as text."""
        late = sorted(self.newcomers.items(), key=lambda item: -item[1].served_s)
        lines = [
            f"gaps {self.gaps[:6]}",
            f"fell back {self.fell_back}",
            f"conductors {dict(self.conducting)}, several for {self.most_conductors_s:.1f} s",
            f"put aside {len(self.put_aside())}: {self.put_aside()}",
            *(
                f"{name}: served after {one.served_s:.1f}, silent {one.silent_s:.1f}, killed {name in self.killed}, "
                f"said {one.said.most_common(3)}"
                for name, one in late[:12]
            ),
            *self.story,
        ]
        return "\n".join(lines)
