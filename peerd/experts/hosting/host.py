"""The host of experts: chooses which experts this peer serves, announces them, and gives up those that others own.

A host first resumes the experts that it owned before, unless another host owns them now. Then it takes free experts in
an order of its own, a part of its capacity at a time, so that hosts that start together share the free ones. Every
`announce_s` it announces its experts. If two hosts serve one expert, the one that does not own it by its lineage
(`experts.owners.lineage`) stops serving it and logs how many updates are lost; `keepers`, which read the claims anyway,
do this. An expert with a checkpoint somewhere is never started from scratch: `keepers` restore it.

This module neither serves calls (`experts/calls/expert_server`) nor keeps checkpoints. A hostile host may claim any
expert; in a run with tokens the directory accepts only hosts that may serve experts.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import trio

from peerd.core.errors import ConfigError, LocalError, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.signals import Signal
from peerd.experts.calls.expert_server import ExpertModel, ExpertServer, ServerConfig, ServingStats
from peerd.experts.rules.claims import ClaimingHost, announcements, candidates, capacity, last_prefixes, to_take
from peerd.experts.rules.host_share import HostShare
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.messages.experts import Announced
from peerd.role.role import RoleContext
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, RunFile

_PARTS: Final = 4  # parts of the capacity, taken one at a time
_SPARE: Final = 8  # 1/8 of the capacity is reserved for orphans, unless the whole grid fits
_STEPS: Final = 4  # parts taken in one announcement period, so that announcements spread in between
_SMOOTHING: Final = 0.2  # weight of the last half period in the measured time of a sample
_TOGETHER_S: Final = 0.2  # experts often change several at once


class StoredModel(ExpertModel, Protocol):
    """An expert that can be saved and restored: `experts.model.hosted_expert.HostedExpert`."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it uses."""
        ...

    def snapshot(self) -> bytes:
        """Return weights, optimizer moments and version as bytes."""
        ...

    def load(self, data: bytes | bytearray) -> None:
        """Load a snapshot. Raises ValueError, before any change, if it does not fit."""
        ...


class HostClaim(Protocol):
    """A host's claim to own an expert, as read from the directory."""

    @property
    def host(self) -> PeerId: ...

    @property
    def generation(self) -> int: ...


Told = Mapping[Uid, Mapping[int, Sequence[HostClaim]]]  # by prefix, then by coordinate


class ClaimDirectory(Protocol):
    """The directory where hosts publish claims: `experts.calls.expert_directory.ExpertDirectory`."""

    async def below(self, prefixes: Iterable[Uid]) -> Told:
        """The claims below prefixes, at most one announcement period old."""
        ...

    async def read(self, prefixes: Iterable[Uid]) -> Told:
        """The claims below prefixes, read now."""
        ...

    async def announce(self, records: Iterable[Announced]) -> None:
        """Publish all experts that we host; records that are not in `records` are withdrawn."""
        ...

    async def add(self, records: Iterable[Announced]) -> None:
        """Publish these records in place of earlier ones under the same prefixes."""
        ...

    async def withdraw(self) -> None:
        """Withdraw all our records from the directory."""
        ...


@dataclass(frozen=True, slots=True)
class OwnExpert:
    """An expert that this host owned before its start. `taken`: the claim of another host that owns it now, if any."""

    generation: int
    taken: SeenClaim | None = None


class Keeper(Protocol):
    """Lets experts outlive their host: saves checkpoints of `host.experts`, and adopts orphans with `host.adopt`."""

    async def recall(self) -> Mapping[Uid, OwnExpert]:
        """This host's own experts whose newest checkpoint is on its own disk. Called first."""
        ...

    async def state(self, uid: Uid) -> bytes:
        """The checkpoint of an expert that `recall` returned. Raises ValueError if it is damaged."""
        ...

    async def orphans(self, uids: Collection[Uid]) -> Collection[Uid]:
        """Those of `uids` that have a checkpoint somewhere and must not be started from scratch."""
        ...

    def taking(self) -> Collection[Uid]:
        """Experts that it is about to adopt here; the host reserves capacity for them."""
        ...

    async def run(self, host: ExpertHost) -> None:
        """Save, adopt, and give up experts that others own by now, until cancelled."""
        ...

    async def hand_over(self, host: ExpertHost) -> None:
        """Hand over experts that others accept. Called when the host is about to leave and still announces all its
        experts.
        """
        ...

    async def leave(self, host: ExpertHost) -> None:
        """Save what is not saved yet. Called after the host has withdrawn its claims."""
        ...


@dataclass(slots=True)
class Hosted:
    """An expert that this peer hosts."""

    model: StoredModel
    generation: int


@dataclass(slots=True)
class HostTally:
    """Counters and rates of one host since its start."""

    adopted: int = 0  # experts with a generation above 0, or from a checkpoint
    updates_per_s: float = 0.0  # in the last announcement period
    sample_s: float = 0.0  # the device's time for a sample, smoothed; 0 before the first
    _seen: tuple[float, ServingStats] | None = field(default=None, repr=False)

    def look(self, now: float, stats: ServingStats) -> None:
        """Measure the rates; call it once in half a period."""
        if self._seen is not None and now > self._seen[0]:
            since, before = self._seen
            self.updates_per_s = (stats.updates - before.updates) / (now - since)
            if stats.samples > before.samples:
                measured = (stats.busy_s - before.busy_s) / (stats.samples - before.samples)
                self.sample_s += _SMOOTHING * (measured - self.sample_s) if self.sample_s else measured
        self._seen = now, replace(stats)


class ExpertHost:
    """Hosts experts of one run on this peer.

    `build` makes the initial model of an expert, on the worker; `fits` measures how many experts fit into memory.
    """

    def __init__(
        self,
        ctx: RoleContext,
        board: ClaimDirectory,
        build: Callable[[Uid], StoredModel],
        fits: Callable[[], int],
        config: ServerConfig | None = None,
    ) -> None:
        assert ctx.run is not None
        run: RunFile = ctx.run
        self.experts: dict[Uid, Hosted] = {}
        self.keepers: list[Keeper] = []
        self.tally = HostTally()
        self.capacity = 0
        self.grid = grid_of(run)
        self.server = ExpertServer(run, ctx.rpc, ctx.clock, self.experts, config)
        self._ctx, self._run, self._board, self._build, self._fits = ctx, run, board, build, fits
        self._me = ctx.host.id.text
        self._period_s = (run.experts or ExpertsSection()).announce_s
        self._worker = ctx.worker(ctx.device)
        self._coming: set[Uid] = set()
        self._changed = Signal()
        self._telling = trio.Lock()  # if two announcements overlapped, the older one could remain
        self._leaving = False

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Host experts until cancelled. Reports started after the first announcement."""
        measured = await self._worker.run(self._fits, name="see how many experts fit")
        self.capacity = capacity(self._run.limits.experts, measured, self.grid)
        if not self.capacity:
            raise ConfigError("no expert of this run fits into this machine's memory (limits.memory_gb)")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(self.server.run, self._worker, self._ctx.host.supervise))
            await self._recall()
            await self._take_free()
            await self._announce()
            for keeper in self.keepers:
                nursery.start_soon(keeper.run, self)
            task_status.started()
            nursery.start_soon(self._fill)
            nursery.start_soon(self._keep_announced)
            await self._measure()

    async def leave(self) -> None:
        """Hand over the experts that others accept, withdraw the rest, and save experts without a current checkpoint.

        Calls in progress are still answered.
        """
        self._leaving = True
        for keeper in self.keepers:
            await keeper.hand_over(self)
        await self._board.withdraw()
        for keeper in self.keepers:
            await keeper.leave(self)

    def room(self) -> int:
        """Number of experts that still fit."""
        return 0 if self._leaving else max(0, self.capacity - len(self.experts.keys() | self._coming))

    def share(self) -> HostShare:
        """This host's experts, free places and speed, to be published."""
        taking = sum(len(keeper.taking()) for keeper in self.keepers)
        return HostShare(len(self.experts), max(0, self.room() - taking), self.tally.sample_s)

    async def hold(self, uid: Uid) -> None:
        """Pause updates of an expert until `release` or `drop`; returns when no update is running."""
        await self.server.hold(uid)

    def release(self, uid: Uid) -> None:
        """Resume updates of an expert."""
        self.server.release(uid)

    async def adopt(self, uid: Uid, generation: int, state: bytes | bytearray | None) -> None:
        """Host an expert, from a checkpoint or, if `state` is None, from its initial weights.

        Raises ValueError if the checkpoint does not fit, Refused if the expert is hosted here already or there is no
        room, and LocalError if it is not in the grid.
        """
        if not self.grid.is_expert(uid):
            raise LocalError(f"expert {uid} is not in the grid")
        if uid in self.experts or uid in self._coming:
            raise Refused(f"expert {uid} is hosted here already", self._ctx.host.id)
        if not self.room():
            raise Refused(f"no room for expert {uid} beside {len(self.experts)} others", self._ctx.host.id)
        self._coming.add(uid)
        try:
            model = await self._worker.run(partial(self._made, uid, state), name="build an expert")
        finally:
            self._coming.discard(uid)
        self.experts[uid] = Hosted(model, generation)
        if generation or state is not None:
            self.tally.adopted += 1
            self._ctx.log.event("expert.taken", expert=str(uid), generation=generation, version=model.version)
        self._changed.notify()

    async def drop(self, uid: Uid, why: str) -> None:
        """Stop hosting an expert; waiting calls are refused with the reason `why`."""
        if self.experts.pop(uid, None) is not None:
            self.server.forget(uid, why)
            self._changed.notify()
        await trio.lowlevel.checkpoint()

    def status(self) -> dict[str, object]:
        """The host's experts, rates and counters, for `peerd status`."""
        stats = self.server.stats
        return {
            "hosted": len(self.experts),
            "capacity": self.capacity,
            "updates": stats.updates,
            "updates_per_s": round(self.tally.updates_per_s, 2),
            "queue": self.server.queued,
            "queue_s": round(self.server.queue_s(), 3),
            "batch": round(stats.samples / stats.batches, 1) if stats.batches else 0.0,
            "adopted": self.tally.adopted,
            "repeats": stats.repeats,
            "stale": stats.stale,
            "refused": stats.refused,
        }

    # --- choosing -------------------------------------------------------------------------------------------------

    def _made(self, uid: Uid, state: bytes | bytearray | None) -> StoredModel:
        model = self._build(uid)
        if state is not None:
            model.load(state)
        return model

    async def _recall(self) -> None:
        """Resume this host's own experts, except those that other hosts own now."""
        for keeper in self.keepers:
            for uid, mine in sorted((await keeper.recall()).items()):
                if mine.taken is not None:
                    to, generation = mine.taken.peer.text, mine.taken.generation
                    self._ctx.log.event("expert.left_to", expert=str(uid), to=to, generation=generation)
                elif self.room() and uid not in self.experts and self.grid.is_expert(uid):
                    await self._resume(uid, mine.generation, keeper)

    async def _resume(self, uid: Uid, generation: int, keeper: Keeper) -> None:
        try:
            await self.adopt(uid, generation, await keeper.state(uid))
        except (Refused, ValueError) as error:
            self._ctx.log.event("expert.not_loaded", level="warning", expert=str(uid), why=str(error))

    async def _take_free(self) -> int:
        """Take experts that no host claims, up to a part of the capacity; returns their number."""
        taking = [uid for keeper in self.keepers for uid in keeper.taking()]
        whole = self.capacity >= self.grid.layers * self.grid.places
        room = self.room() - len(taking) - (0 if whole else self.capacity // _SPARE)
        share = min(room, math.ceil(self.capacity / _PARTS))
        if share <= 0:
            return 0
        looked_at = candidates(self.grid, self._ctx.clock.rng("experts"), self.capacity)
        seen = self._claimed(await self._board.below(last_prefixes(looked_at)))
        free = to_take(looked_at, {*seen, *self.experts, *taking}, len(looked_at))
        for keeper in self.keepers:
            orphans = set(await keeper.orphans(free))
            free = [uid for uid in free if uid not in orphans]
        # The claims may be a period old; hosts that started with us may have taken experts since.
        chosen = free[:share]
        seen = self._claimed(await self._board.read(last_prefixes(chosen)))
        return sum([await self._begin(uid) for uid in chosen if uid not in seen])

    async def _begin(self, uid: Uid) -> bool:
        """Start an expert from its initial weights. Returns False if it runs here already or no capacity is left."""
        try:
            await self.adopt(uid, 0, None)
        except Refused:
            return False
        return True

    async def _fill(self) -> None:
        """Take more experts until there is no room, and check periodically for new free ones."""
        while True:
            await trio.sleep(self._period_s / _STEPS)
            if not await self._take_free():
                await trio.sleep(self._period_s)

    # --- claims ---------------------------------------------------------------------------------------------------

    async def _keep_announced(self) -> None:
        """Announce this host's experts once in each period, and soon after a change."""
        while True:
            with trio.move_on_after(self._period_s):
                await self._changed.wait()
                await trio.sleep(_TOGETHER_S)
            await self._announce()

    async def _announce(self) -> None:
        async with self._telling:
            if not self._leaving:
                await self._publish(self._board.announce, self._records())

    async def tell(self, uid: Uid) -> None:
        """Announce one expert in addition to the published ones; returns when others can read it."""
        async with self._telling:
            if uid in self.experts and not self._leaving:
                above = set(self.grid.prefixes(uid))
                await self._publish(self._board.add, [r for r in self._records() if r.prefix.uid in above])

    def _records(self) -> list[Announced]:
        hosted = {uid: (hosted.generation, hosted.model.version) for uid, hosted in sorted(self.experts.items())}
        return announcements(self.grid, hosted, ClaimingHost(queue_s=self.server.queue_s()))

    async def _publish(self, publish: Callable[[list[Announced]], Awaitable[None]], records: list[Announced]) -> None:
        try:
            await publish(records)
        except RemoteError as error:
            self._ctx.log.event("dht.announce_failed", level="warning", reason=str(error))

    async def _measure(self) -> None:
        """Measure the rate of updates periodically."""
        while True:
            await trio.sleep(self._period_s / 2)
            self.tally.look(self._ctx.clock.now(), self.server.stats)

    @staticmethod
    def _claimed(told: Told) -> set[Uid]:
        """The experts that some host claims."""
        return {prefix.below(coordinate) for prefix, below in told.items() for coordinate in below}
