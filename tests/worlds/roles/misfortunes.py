"""Misfortunes of peers, none of malice: they are killed, stand still, are cut off, lose files, move, leave and join."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import trio

from peerd.core.errors import LocalError
from roles.aggregator import AuxAggregatorRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.network.athome import Homes
from tests.worlds.network.members import Organizer
from tests.worlds.roles.virtualroles import PacedDevice, Roles
from tests.worlds.simulation.nat import KINDS
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import World

REPLACE = os.replace
PAUSES_S = (0.0, 1.0, 5.0, 15.0)
LEAVES_WITHIN_S = 30.0
SLOWER = 10.0
MICROBATCH = ("forward", "backward", "loss", "expert forward", "expert backward")  # jobs of a device
ROUGH = SimLine(latency_s=0.3, jitter_s=0.05, up_mbit_s=1, down_mbit_s=4, loss=0.02)
SKEWS_S = (2.0, -20.0)  # of the one clock that is wrong, in half of all cases


def public_ip(number: int) -> str:
    """An address of the internet, each in another network: those of one share a vote on what time it is."""
    return f"{20 + number}.0.0.1"


class Misfortunes:
    """Faults injected into a swarm's peers: each method is one fault, of the named peer, for so many seconds."""

    def __init__(self, world: World, roles: Roles, rng: random.Random, at_home: bool = False) -> None:
        """`at_home`: peers live behind routers of all kinds, and the first node is a relay."""
        self._world, self._roles, self._rng, self._stages = world, roles, rng, roles.run.pipeline.stages
        tokens = roles.run.access.allow == "tokens"
        self._organizer = Organizer(roles.run) if tokens else None
        self._homes = Homes(world, self._organizer) if at_home else None
        self._names: list[str] = []  # of all but helpers
        self._moved = 0  # changes of address
        self._wrong, self._skew_s = rng.randrange(1, 13), rng.choice(SKEWS_S)  # a wrong clock: of which node, if any
        self._unlucky = ""  # the one peer whose disk fails, if any
        self.full: set[str] = set()  # peers whose disks are
        self._lost = False  # peers of a stage went all at once: what was made is on their disks alone
        roles.owner = self._follow_advice
        self.told: list[str] = []

    async def _start(self, kind: str, role: type) -> None:
        number = len(self._world.nodes)
        name = f"{kind}{number}"
        if role is not AuxAggregatorRole:
            self._names.append(name)
        network = self._homes.program(self._rng.choice(KINDS)) if self._homes is not None else None
        skew_s = self._skew_s if number == self._wrong else 0.0
        await self._world.start(name, program=self._roles.program(role, network), ip=public_ip(number), skew_s=skew_s)

    def story(self) -> str:
        """Misfortunes so far, the status of each peer, and its last events."""
        stands = [f"{name}: {role.status()}" for name, role in sorted(self._roles.live.items())]
        return "\n".join([*self.told, *stands, self._roles.story()])

    def _tell(self, text: str) -> None:
        self.told.append(f"{trio.current_time():.1f} {text}")

    async def _kill(self, name: str, for_s: float) -> None:
        if self._world.nodes[name].up:
            silent = self._rng.random() < 0.5
            self._tell(f"{name} is killed{' silently' if silent else ''} for {for_s} s")
            await self._world.kill(self._world.nodes[name], silent=silent)
            await self._back(name, for_s)

    async def _back(self, name: str, after_s: float) -> None:
        await trio.sleep(after_s)
        if self._world.nodes[name].gone.is_set():  # else another misfortune has brought it back
            await self._world.restart(self._world.nodes[name])

    async def _stall(self, name: str, for_s: float) -> None:
        self._tell(f"{name} stands still for {for_s} s")
        self._world.net.stall(name)
        await trio.sleep(for_s)
        self._world.net.resume(name)

    async def _cut(self, name: str, _for_s: float) -> None:
        other, both = self._rng.choice([one for one in self._names if one != name]), self._rng.random() < 0.5
        self._tell(f"{name} does not reach {other}{', nor the reverse' if both else ''}")
        self._world.net.block(name, other, both=both)
        await trio.lowlevel.checkpoint()

    async def _part(self, _name: str, for_s: float) -> None:
        names = self._rng.sample(self._names, len(self._names))
        far = names[: self._rng.randrange(1, len(names))]
        self._tell(f"{', '.join(far)} are cut off from all others for {for_s} s")
        self._world.net.partition(far, [*names[len(far) :], "boot"])
        await trio.sleep(for_s)
        self._world.net.heal()

    async def _slow(self, name: str, for_s: float) -> None:
        device = self._roles.devices.get(name)
        if not isinstance(device, PacedDevice):
            return  # it has not come up yet
        self._tell(f"{name} is {SLOWER:g} times as slow for {for_s} s")
        device.microbatch_s *= SLOWER
        await trio.sleep(for_s)
        device.microbatch_s /= SLOWER

    async def _lack_memory(self, name: str, for_s: float) -> None:
        """Something else on the machine takes the device's memory: some jobs fail, of microbatches or of all kinds."""
        device = self._roles.devices.get(name)
        if not isinstance(device, PacedDevice):
            return
        of_all, often = self._rng.random() < 0.5, self._rng.choice([0.05, 0.3, 1.0])
        self._tell(f"{name}'s device fails in {often:.0%} of {'all' if of_all else 'microbatches'} for {for_s} s")

        def fails(job: str) -> str:
            if self._rng.random() >= often or not (of_all or job in MICROBATCH):
                return ""
            return self._rng.choice(["before", "after"])

        device.fails = fails
        await trio.sleep(for_s)
        device.fails = lambda job: ""

    def replace(self, source: Any, target: Any) -> None:
        """Stands in for `os.replace`, with which all that is written to a disk ends."""
        path = Path(target)
        within = self._roles.directory in path.parents
        if within and path.relative_to(self._roles.directory).parts[0] in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        REPLACE(source, target)

    async def _fill_disk(self, name: str, for_s: float) -> None:
        """Something else on the machine takes the disk: nothing more can be written."""
        self._tell(f"the disk of {name} is full for {for_s} s")
        self.full.add(name)
        await trio.sleep(for_s)
        self.full.discard(name)

    async def _lose_stage(self, _name: str, for_s: float) -> None:
        """All peers of a stage go at once, or of a run of replicas all there are, and come back one by one."""
        if self._unlucky:
            return
        self._lost, stage = True, self._rng.randrange(self._stages)
        lost = [name for name in self._names if self._serves(name, stage)]
        self._tell(f"stage {stage} is lost for {for_s} s: {', '.join(lost)}")
        for name in lost:
            await self._world.kill(self._world.nodes[name], silent=self._rng.random() < 0.5)
        async with trio.open_nursery() as nursery:
            for name in lost:
                nursery.start_soon(self._back, name, for_s + self._rng.choice(PAUSES_S))

    def _serves(self, name: str, stage: int) -> bool:
        role: Any = self._roles.live.get(name)
        if not self._world.nodes[name].up or role is None:
            return False
        member = role.replica if isinstance(role, TrainerRole) else role
        return stage in [post.stage for post in getattr(member, "posts", [])]

    async def _lose_all(self, _name: str, for_s: float) -> None:
        """The power fails everywhere; what peers have on their disks is all that is left."""
        if self._unlucky:
            return
        self._lost = True
        self._tell(f"all are lost for {for_s} s")
        lost = [name for name in self._names if self._world.nodes[name].up]
        for name in lost:
            await self._world.kill(self._world.nodes[name], silent=True)
        async with trio.open_nursery() as nursery:
            for name in lost:
                nursery.start_soon(self._back, name, for_s + self._rng.choice(PAUSES_S))

    async def _lose_boot(self, _name: str, for_s: float) -> None:
        """The peer through which all join, at home the relay too, is gone."""
        boot = self._world.nodes["boot"]
        if boot.up:
            self._tell(f"the bootstrap peer is killed for {for_s} s")
            await self._world.kill(boot, silent=self._rng.random() < 0.5)
            await self._back("boot", for_s)

    async def _lose_files(self, name: str, for_s: float) -> None:
        name = self._unlucky or name
        if self._world.nodes[name].up and self._may_lose_files(name):
            self._unlucky = name
            self._tell(f"{name} is killed for {for_s} s and loses its files")
            await self._world.kill(self._world.nodes[name])
            shutil.rmtree(self._roles.directory / name, ignore_errors=True)
            await self._back(name, for_s)

    def _may_lose_files(self, name: str) -> bool:
        """True where others have what it has: a swarm that has lost a stage's state waits ten minutes for it."""
        stages = [stage for stage in range(self._stages) if self._serves(name, stage)]
        others = [other for other in self._names if other != name]
        return not self._lost and all(any(self._serves(other, stage) for other in others) for stage in stages)

    async def _spoil_file(self, name: str, _for_s: float) -> None:
        """A file of a peer that runs is cut short, or has another byte, as by a disk that fails."""
        await trio.lowlevel.checkpoint()
        name = self._unlucky or name
        if not self._may_lose_files(name):
            return
        self._unlucky = name
        files = sorted(path for path in (self._roles.directory / name).rglob("*") if path.is_file())
        file = self._rng.choice([path for path in files if path.stat().st_size] or [None])
        if file is None:
            return
        content = bytearray(file.read_bytes())
        at = self._rng.randrange(len(content))
        if cut := self._rng.random() < 0.5:
            del content[at:]
        else:
            content[at] ^= 1 << self._rng.randrange(8)
        self._tell(f"{file.name} of {name} is {'cut' if cut else 'wrong'} at {at}")
        file.write_bytes(content)

    def _follow_advice(self, name: str, advice: str) -> bool:
        """Do with a file what the message of a role that ended says, as its owner would, and start the peer again."""
        found = re.search(r"; delete (\S+) to go on", advice) or re.match(r"(\S+) (is of|names|has) ", advice)
        if found is None or name != self._unlucky:
            return False
        self._tell(f"{name} ended: {advice}")
        for file in (self._roles.directory / name).rglob(Path(found[1]).name):
            file.unlink()
        assert self._world._nursery is not None
        self._world._nursery.start_soon(self._again, name)
        return True

    async def _again(self, name: str) -> None:
        """Start a peer again whose role has ended: when its process has."""
        await self._world.nodes[name].gone.wait()
        await self._back(name, 1.0)

    async def _move(self, name: str, for_s: float) -> None:
        """A machine is carried to another place and has another address there."""
        if self._world.nodes[name].up:
            await self._world.kill(self._world.nodes[name], silent=True)
            self._moved += 1
            self._world.net.readdress(name, f"{130 + self._moved}.0.0.1")
            self._tell(f"{name} has another address after {for_s} s")
            await self._back(name, for_s)

    async def _rough(self, name: str, for_s: float) -> None:
        self._tell(f"{name} has a bad line for {for_s} s")
        self._world.net.set_line(name, ROUGH)
        await trio.sleep(for_s)
        self._world.net.set_line(name, self._world.nodes[name].first_line)

    async def _revoke(self, name: str, for_s: float) -> None:
        """A peer's token is taken back by mistake, and it is given another later."""
        assert self._organizer is not None
        if not self._organizer.has_token(name):
            return  # it has not come up yet
        told = self._rng.choice([one for one in self._names if one != name])
        self._tell(f"the token of {name} is revoked, as {told} hears; it has another after {for_s} s")
        self._organizer.revoke(name, told)
        await trio.sleep(for_s)
        self._organizer.renew(name)

    async def _fail_role(self, name: str, _for_s: float) -> None:
        """A role fails and begins again in its process, whose links and services live on."""
        await trio.lowlevel.checkpoint()
        if name in self._roles.live:
            self._tell(f"the role of {name} fails and begins again")
            self._roles.lives[name].cancel()

    async def _restart_router(self, name: str, _for_s: float) -> None:
        assert self._homes is not None
        self._tell(f"the router of {name} is switched off and on")
        self._homes.restart_router(name)
        await trio.lowlevel.checkpoint()

    async def _join(self, _name: str, _for_s: float) -> None:
        trains = self._stages == 1 or self._rng.random() < 0.3
        self._tell(f"a {'trainer' if trains else 'stage peer'} joins")
        await self._start("trainer" if trains else "stage", TrainerRole if trains else StageRole)

    async def _leave(self, name: str, for_s: float) -> None:
        role: Any = self._roles.live.get(name)
        if role is None or not self._world.nodes[name].up:
            return
        self._tell(f"{name} leaves for {for_s} s")
        node, patience = self._world.nodes[name], trio.move_on_after(LEAVES_WITHIN_S)
        gone = node.gone  # it may be killed meanwhile, and is brought back by that
        try:
            with patience:
                await role.leave()
        except* LocalError:
            assert gone.is_set() or not node.up, "only of a process that is gone, no call can be made"
        assert not patience.cancelled_caught, f"{name} does not come to leave\n{self.story()}"
        if node.up and not gone.is_set():
            await self._world.kill(node)
            await self._back(name, for_s)
