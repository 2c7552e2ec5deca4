"""Keeper of a run's checkpoints on a peer that does not train: fetches the states of all stages at one position.

Not a role. A set is written only after the states of all stages have arrived, were checked and proved to be of the same
position, so a set never mixes two steps. An incomplete set is deleted: at once if the disk is full, at the next start
after a crash. The files are the same as a stage peer's. One set more than the run's `checkpoint.keep` is kept, so that
writing a set does not cost a complete one. `kept.json` lists the complete sets. The keeper reports to no conductor and
contributes no gradient. It serves only `kept/1`: its checkpoints, to stage peers that have lost theirs. While a set is
fetched it is in unnamed files in the data directory, so that memory use does not grow with the model; without disk
space for them the fetch fails. For hostile donors see `state.snapshot`; a donor that lies costs one attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import trio
from torch import Tensor

from peerd.core.errors import ConfigError, NoMemory, RemoteError
from peerd.core.ids import PeerId
from peerd.messages.state import StateRequest, TensorSpec
from peerd.messages.swarm import Position
from peerd.model.frozen_state import FrozenState
from peerd.model.stage.footprint import state_outline
from peerd.model.stage.served_stage import items_of
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.run.runfile import LoopSection
from peerd.state.catchup.validate import checked
from peerd.state.checkpoints.evidence_store import EvidenceStore
from peerd.state.checkpoints.kept_list import KeptList
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.state.snapshot import StateItem, StateServer

_TRIES = 6  # attempts to get all stages at one position while the swarm steps
_AGAIN_S = 10.0  # pause between attempts at the same step
_LONGEST_S = 60.0  # longest pause after failed attempts, even at a new step


class CheckpointKeeper:
    """Fetches and keeps the checkpoint sets of one run. Call `open` first."""

    def __init__(self, ctx: RoleContext, services: RunServices) -> None:
        assert ctx.run is not None
        run = ctx.run
        self._ctx, self._services = ctx, services
        self._settings, self._total_steps = run.checkpoint, run.optimizer.total_steps
        stages = range(run.pipeline.stages)
        self._savings = [StageCheckpoints(ctx, services.fingerprint, spare=1) for _ in stages]
        self._fetchers = [services.fetcher() for _ in stages]
        for fetcher in self._fetchers:
            fetcher.folder, fetcher.needs_file = ctx.data_dir, True
        self._outlines: list[list[TensorSpec]] = []
        self._files = ctx.worker("files")
        self._tried_step, self._tried_at, self._failures = -1, 0.0, 0
        self._giving: StateServer | None = None
        self._list = KeptList(ctx.data_dir, run.run)
        self._store = EvidenceStore(ctx, services, lambda: self.kept)

    async def open(self) -> None:
        """Find the kept sets, delete incomplete ones, and serve the rest to peers that ask.

        Raises ConfigError, which names the checkpoint, if one cannot be read.
        """
        for stage, saving in enumerate(self._savings):
            await saving.open(stage)
        await self._drop_what_is_not_whole()
        await self._store.open()
        self._giving = self._services.kept_giving()
        for stage in range(len(self._savings)):
            self._giving.offer_named(self._services.fingerprint, stage, partial(self._kept_of, stage), self._files)

    async def _kept_of(self, stage: int, position: Position) -> tuple[Position, list[StateItem]] | None:
        """Load a checkpoint for peers that have lost theirs; its file is mapped, not read into memory.

        Returns None if the position is not kept or its file is unreadable.
        """
        if position not in self.kept:
            return None
        try:
            state = await self._savings[stage].load(position)
        except ConfigError as error:
            self._ctx.log.event(
                "checkpoint.not_given", level="warning", stage=stage, step=position.step, reason=str(error)
            )
            return None
        return position, [StateItem(*item) for item in items_of(state)]

    async def _drop_what_is_not_whole(self) -> None:
        """Delete incomplete sets, because each would take the place of a complete set in some stages."""
        whole = set(self.kept)
        for saving in self._savings:
            await saving.drop([p.step for p in saving.positions if p not in whole])

    @property
    def kept(self) -> list[Position]:
        """The positions with a checkpoint of every stage, oldest first."""
        return sorted(set.intersection(*(set(saving.positions) for saving in self._savings)))

    def tidy(self) -> None:
        """Release states that no peer fetches any longer. Call it periodically."""
        if self._giving is not None:
            self._giving.let_go()

    def due(self, step: int, final_step: int | None = None) -> bool:
        """True if a set should be fetched now that the swarm is at `step`. `final_step` is the step with which the run
        ends, if its peers report that it ends.
        """
        now, every = trio.current_time(), self._settings.every_steps
        pause_s = min(2.0**self._failures, _LONGEST_S) if self._failures else 0.0
        if step == self._tried_step:
            pause_s = max(pause_s, _AGAIN_S)
        if step <= 0 or now - self._tried_at < pause_s:
            return False
        if final_step is not None and final_step > 0 and self._last_up_to(final_step) < final_step:
            return True
        last = self._last_up_to(step)
        if self._total_steps and step >= self._total_steps:
            return last < self._total_steps
        return every > 0 and step // every > last // every

    def _last_up_to(self, step: int) -> int:
        """Newest kept step that is not after `step`, or 0 if none is kept."""
        return max((p.step for p in self.kept if p.step <= step), default=0)

    async def keep(self, step: int, donors: Sequence[Sequence[PeerId]]) -> Position | None:
        """Fetch and write a set, and return its position. `donors` are the peers of each stage.

        Returns None if no set could be fetched; the log has the reason. Raises ConfigError if it cannot be written.
        """
        self._tried_step, self._tried_at = step, trio.current_time()
        self._failures += 1
        position = await self._attempt(step, donors)
        if position is not None:
            self._failures = 0
            await self._store.prove(position)
        return position

    async def _attempt(self, step: int, donors: Sequence[Sequence[PeerId]]) -> Position | None:
        if not await self._outline(donors):
            return None
        for _ in range(_TRIES):
            found: dict[int, tuple[Position, FrozenState]] = {}
            async with trio.open_nursery() as nursery:  # concurrently, so that all stages freeze the same position
                for stage, peers in enumerate(donors):
                    nursery.start_soon(self._fetch, stage, peers, found)
            if len(found) < len(self._savings):
                return None
            positions = {position for position, _ in found.values()}
            if len(positions) == 1:
                (position,) = positions
                return position if await self._write(position, {s: state for s, (_, state) in found.items()}) else None
        self._ctx.log.event(
            "checkpoint.not_kept", level="warning", step=step, reason="the stages made a step during each attempt"
        )
        return None

    async def _outline(self, donors: Sequence[Sequence[PeerId]]) -> bool:
        """Determine the tensor specs of each stage's state from the shapes of the run's model.

        The model of a user's own training loop exists only on the users' peers: they send its tensor specs, which are
        checked against the digest in the run file.
        """
        run = self._services.run
        if run.loop is not None and not self._outlines:
            return await self._ask_for_outline(run.loop, donors[0])
        for stage in range(len(self._outlines), len(self._savings)):
            outline = partial(state_outline, run, stage)
            self._outlines.append(await self._files.run(outline, name="outline a stage"))
        return True

    async def _ask_for_outline(self, loop: LoopSection, peers: Sequence[PeerId]) -> bool:
        wanted, request = (bytes.fromhex(loop.layout), loop.layout_bytes), StateRequest(self._services.fingerprint, 0)
        for peer in peers:
            try:
                self._outlines.append(await self._fetchers[0].layout(peer, request, wanted))
            except RemoteError as error:
                self._ctx.log.event("checkpoint.not_kept", level="warning", stage=0, reason=str(error))
            else:
                return True
        return False

    async def _fetch(self, stage: int, peers: Sequence[PeerId], found: dict[int, tuple[Position, FrozenState]]) -> None:
        request = StateRequest(self._services.fingerprint, stage)
        try:
            if not peers:
                raise ValueError("no peer of the stage is announced")
            fetcher, expected = self._fetchers[stage], self._outlines[stage]
            fetched = await fetcher.fetch(list(peers), request, expected, self._files)
            state = await self._files.run(partial(checked, *fetched), name="check a state")
            found[stage] = fetched.position, FrozenState(state, room=fetched.room)
        except (RemoteError, ValueError, NoMemory) as error:
            self._ctx.log.event("checkpoint.not_kept", level="warning", stage=stage, reason=str(error))

    async def _write(self, position: Position, states: Mapping[int, Mapping[str, Tensor] | FrozenState]) -> bool:
        if position.step <= 0 or position in self.kept:
            return False
        self._hold_the_furthest(position)
        try:
            for stage, saving in enumerate(self._savings):
                await saving.save(position, states[stage])
        except ConfigError:
            await self._drop_what_is_not_whole()
            raise
        listed = partial(self._list.write, self.kept, len(self._savings))
        await self._files.run(listed, name="list what is kept")
        return True

    def _hold_the_furthest(self, position: Position) -> None:
        """Protect the newest set if the run returned to an earlier position: the set's peers or proof may come back."""
        furthest = max(self.kept, default=position)
        if furthest.step > position.step:
            for saving in self._savings:
                saving.hold(furthest)
