"""Checkpoint recovery: fetches a checkpoint of a member's stage from backbones when the swarm has no common position.

This happens when every stage has members but no position can be reached by all stages: a stage lost all its peers, or
all peers are new and the run is far beyond its start. The conductor reports this to its members. Each stage then
fetches the newest position that backbones announce, stores it as a checkpoint of its own and reports it to the
conductor like any other. Two members of a stage fetch at once; the others fetch only if these fail. Not a role; serves
no calls.

Any peer may claim to be a backbone. A position that it announces counts only if this peer has seen the position, if
members signed that they reached it, if two backbones in different networks keep it, if the conductor has proof of it,
or if the user trusts the backbone: the run file lists it as a bootstrap peer, or `--trust` names it
(`CommitProofs.counts`). Otherwise `problem` offers this choice to the user.

A hostile keeper may announce a position that it cannot deliver: the next older one is tried. It may send bytes that do
not match its digests, or another position: it is logged and avoided. It may send a state that it made up: such a state
is accepted only if no other keeper of that position contradicts it, its values are finite, its shapes are right and it
is of its step. If keepers contradict each other, the majority's state is used. If only two do, a peer cannot find out
which one lies: it accepts neither, tries the next older position, and `problem` names both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Final

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import ConfigError, NoMemory, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import SUSPECTS
from peerd.core.signals import Signal
from peerd.messages.state import StateRequest
from peerd.messages.swarm import Position
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.state.catchup.catch_up import CatchingMember, ConductorReports
from peerd.state.catchup.validate import checked
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.swarm.roster import START

_LOOK_S: Final = 2.0  # between two reads of the positions that backbones announce
_FAILED_S: Final = 30.0  # before a position that could not be fetched is tried again
_PATIENCE_S: Final = 60.0  # for the other stages to fetch the same position; then an older one may be the common one
_AT_ONCE: Final = 2  # members of one stage that fetch at the same time
_PROOFS_S: Final = 10.0  # time for keepers to send proofs, in each round
_ASKED_AT_ONCE: Final = 16  # keepers asked concurrently


class CheckpointRecovery:
    """The checkpoint recovery of one member. `run` does the work."""

    def __init__(
        self,
        ctx: RoleContext,
        services: RunServices,
        saving: StageCheckpoints,
        joiner: CatchingMember,
        reports: ConductorReports,
    ) -> None:
        self.waits_for: str | None = None
        self.problem: str | None = None  # why the last position tried could not be fetched
        self._ctx, self._services, self._saving, self._joiner, self._reports = ctx, services, saving, joiner, reports
        self._fetcher = services.kept_fetcher()
        self._fetcher.notes = lambda text: ctx.log.event("stage.download_noted", note=text)
        self._fetcher.folder = ctx.data_dir
        self._files = ctx.worker("files")
        self._lost_since: float | None = None
        self._news = Signal()
        self._patient_until = 0.0
        self._patience_s = _PATIENCE_S
        self._wanted = frozenset[Position]()  # those that the conductor has proof of
        self._failed = BoundedDict[Position, float](SUSPECTS)  # position -> time before which it is not retried
        self._asked = BoundedDict[tuple[PeerId, Position], float](SUSPECTS)  # asked for a proof -> time
        self._asked_last = BoundedDict[PeerId, float](SUSPECTS)  # time of the last question about any position
        self._told: Position | None = None  # the position last logged as unconfirmed

    def swarm_is_lost(self, lost: bool, wanted: Sequence[Position] = ()) -> None:
        """Process the conductor's report: whether the swarm lacks a common position, and which positions are proven."""
        self._wanted = frozenset(wanted)
        if lost == (self._lost_since is not None):
            return
        self._lost_since = trio.current_time() if lost else None
        self._patient_until, self._patience_s, self.waits_for, self.problem = 0.0, _PATIENCE_S, None, None
        self._news.notify()

    async def run(self, stage: int) -> None:
        """While the swarm lacks a common position, fetch one position after another, newest first."""
        while True:
            if self._lost_since is None:
                await self._news.wait()
                continue
            await self._services.directory.refresh()
            await self._look_for_proofs()
            position = self._next(trio.current_time(), stage)
            if position is None or not await self._recall(position, stage):
                await trio.sleep(_LOOK_S)

    def _next(self, now: float, stage: int) -> Position | None:
        """The position to fetch now, or None."""
        since = self._lost_since
        mates = sorted(m.peer for m in self._reports.members if m.stage == stage)
        own = self._ctx.host.id.text
        rank = mates.index(own) if own in mates else 0
        if since is None or now < max(self._patient_until, since + max(0, rank - _AT_ONCE + 1) * _PATIENCE_S):
            return None
        for position, keepers in self._kept():
            waits = position in self._saving.positions or self._failed.get(position, now) > now
            if not waits and self._counts(position, keepers):
                return position
        return None

    def _kept(self) -> list[tuple[Position, list[PeerId]]]:
        """The positions that backbones announce, with their keepers.

        Sorted from the newest step to the oldest; positions of the same step from the most keepers to the fewest.
        """
        found: dict[Position, list[PeerId]] = {}
        for peer, positions in sorted(self._services.directory.kept.items()):
            for position in {p for p in positions if p.step > 0}:
                found.setdefault(position, []).append(peer)
        return sorted(found.items(), key=lambda one: (one[0].step, len(one[1]), one[0].lineage), reverse=True)

    def _counts(self, position: Position, keepers: Sequence[PeerId]) -> bool:
        """True if the conductor or this peer is certain that the position was part of the run."""
        return position in self._wanted or self._services.proofs.counts(position, keepers)

    async def _look_for_proofs(self) -> None:
        """Ask keepers for proofs of positions that only they confirm, for a bounded time; report a position without
        proof.

        Each keeper is first asked for its newest position. Keepers that were not asked for longest come first, so that
        a keeper with a proof gets its turn no matter how many strangers announce positions.
        """
        doubted = self._doubted()
        with trio.move_on_after(_PROOFS_S):
            while asked := self._to_ask(doubted):
                proven = set[Position]()
                async with trio.open_nursery() as nursery:
                    for keeper, position in asked:
                        self._asked[keeper, position] = self._asked_last[keeper] = trio.current_time()
                        nursery.start_soon(self._ask_for_proof, keeper, position, proven)
                doubted = [one for one in doubted if one[0] > max(proven, default=START)]
        doubted = self._doubted()
        if not doubted or self.problem is not None:
            return
        position, keepers = doubted[0]
        self.problem = (
            f"backbone {keepers[0].short} keeps step {position.step}, but no known member and no backbone "
            f"in another network confirms that it belongs to this run (to trust it: --trust {keepers[0].text})"
        )
        if position != self._told:
            self._told = position
            self._ctx.log.event("checkpoint.in_doubt", level="warning", step=position.step, reason=self.problem)

    def _doubted(self) -> list[tuple[Position, list[PeerId]]]:
        """The announced positions that do not count, down to the newest one that does, with their keepers."""
        kept, counts = self._kept(), self._counts
        return list(takewhile(lambda one: one[0] not in self._saving.positions and not counts(*one), kept))

    def _to_ask(self, doubted: Sequence[tuple[Position, list[PeerId]]]) -> list[tuple[PeerId, Position]]:
        """Up to 16 keepers to ask for a proof now, each with its newest position that it was not asked for in the last
        30 s.
        """
        now = trio.current_time()
        newest: dict[PeerId, Position] = {}
        for position, keepers in doubted:
            for keeper in keepers:
                if keeper not in newest and now - self._asked.get((keeper, position), -math.inf) >= _FAILED_S:
                    newest[keeper] = position
        order = sorted(newest, key=lambda keeper: self._asked_last.get(keeper, -math.inf))
        return [(keeper, newest[keeper]) for keeper in order[:_ASKED_AT_ONCE]]

    async def _ask_for_proof(self, keeper: PeerId, position: Position, proven: set[Position]) -> None:
        with suppress(RemoteError):
            await self._ctx.host.connect(keeper)  # also shows its network
        if await self._services.proofs.learn(keeper, position):
            proven.add(position)

    async def _recall(self, position: Position, stage: int) -> bool:
        self.waits_for = f"the checkpoint of step {position.step} from a backbone"
        outline = await self._joiner.work(self._joiner.model.outline, "outline the state")
        request = StateRequest(self._services.fingerprint, stage, of=position)
        try:
            found, items, _ = await self._fetcher.fetch(
                partial(self._services.directory.keepers, position), request, outline, self._files
            )
            state = await self._files.run(partial(checked, found, items), name="check a kept checkpoint")
        except (RemoteError, ValueError, NoMemory) as error:
            self._failed[position] = trio.current_time() + _FAILED_S
            self.problem = f"the checkpoint of step {position.step} could not be fetched: {error}"
            self._ctx.log.event(
                "checkpoint.fetch_failed", level="warning", stage=stage, step=position.step, reason=self.problem
            )
            return False
        finally:
            self.waits_for = None
        try:
            await self._saving.save(position, state, hold=True)
        except ConfigError as error:
            self._failed[position] = trio.current_time() + _FAILED_S
            self.problem = f"the checkpoint of step {position.step} could not be saved: {error}"
            self._ctx.log.event(
                "checkpoint.not_saved", level="warning", stage=stage, step=position.step, reason=str(error)
            )
            return False
        self.problem = None
        self._patient_until = trio.current_time() + self._patience_s
        self._patience_s *= 2
        self._ctx.log.event("checkpoint.fetched", stage=stage, step=position.step)
        self._reports.tell()
        return True
