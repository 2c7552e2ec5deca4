"""Checkpoint recovery: fetches a checkpoint of a member's stage from backbones when the swarm has no common position.

When every stage has members and there is no position that all stages can reach (a stage's peers were all lost; or all
are new, and the run is far beyond its start), the conductor says so, and each stage fetches the newest position that
backbones announce. It becomes a checkpoint of our own, which is reported to the conductor like any other. Two members
of a stage fetch at once, the others only when that fails. Not a role; serves nothing.

Any peer may claim to be a backbone. Its word on a position counts where this peer saw the position, where members
signed that they reached it, where two backbones in different networks keep it, where the conductor has proof, or where
the user trusts it: the run file names it as a bootstrap peer, or `--trust` does (`CommitProofs.counts`). Else `problem`
offers the choice.

A hostile keeper may announce a position that it cannot give (the next older one is tried), send bytes that differ from
its digests or another position (it is named and left alone), or a state of its own making: then it is believed only as
far as no other keeper of that position contradicts it, and only if the state is finite, of the right shape and of its
step. Where keepers contradict each other, the majority's state is taken; of two, no peer can tell which lies: neither
is believed, the next older position is tried, and `problem` names both.
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
from peerd.core.errors import ConfigError, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import SUSPECTS
from peerd.core.messages.state import StateRequest
from peerd.core.messages.swarm import Position
from peerd.machine.swarm.roster import START
from peerd.role import RoleContext
from peerd.service.run_services import RunServices
from peerd.signals import Signal
from peerd.training.catchup.catch_up import CatchingMember, ConductorReports
from peerd.training.catchup.validate import checked
from peerd.training.checkpoints.stage_checkpoints import StageCheckpoints

_LOOK_S: Final = 2.0  # between two looks at the positions that backbones announce
_FAILED_S: Final = 30.0  # before a position that could not be had is tried again
_PATIENCE_S: Final = 60.0  # for the other stages to fetch the same position; then an older one may be the common one
_AT_ONCE: Final = 2  # members of one stage that fetch without waiting for each other
_PROOFS_S: Final = 10.0  # for keepers to show proofs, in one look,
_ASKED_AT_ONCE: Final = 16  # and how many are asked side by side


class CheckpointRecovery:
    """The recovery of one member; `run` does the work."""

    def __init__(
        self,
        ctx: RoleContext,
        services: RunServices,
        saving: StageCheckpoints,
        joiner: CatchingMember,
        reports: ConductorReports,
    ) -> None:
        self.waits_for: str | None = None
        self.problem: str | None = None  # the reason that the last position that was tried is not to be had
        self._ctx, self._services, self._saving, self._joiner, self._reports = ctx, services, saving, joiner, reports
        self._fetcher = services.kept_fetcher()
        self._fetcher.notes = lambda text: ctx.log.event("stage.download_noted", note=text)
        self._fetcher.folder = ctx.data_dir
        self._files = ctx.worker("files")
        self._lost_since: float | None = None
        self._news = Signal()
        self._patient_until = 0.0
        self._patience_s = _PATIENCE_S
        self._wanted = frozenset[Position]()  # proven to the conductor
        self._failed = BoundedDict[Position, float](SUSPECTS)  # position -> time until which it is not tried again
        self._asked = BoundedDict[tuple[PeerId, Position], float](SUSPECTS)  # for a proof -> when
        self._asked_last = BoundedDict[PeerId, float](SUSPECTS)  # likewise, for any position
        self._told: Position | None = None  # the last position that the log named as in doubt

    def swarm_is_lost(self, lost: bool, wanted: Sequence[Position] = ()) -> None:
        """Take the conductor's word on whether the swarm is without a common position, and on which are proven."""
        self._wanted = frozenset(wanted)
        if lost == (self._lost_since is not None):
            return
        self._lost_since = trio.current_time() if lost else None
        self._patient_until, self._patience_s, self.waits_for, self.problem = 0.0, _PATIENCE_S, None, None
        self._news.notify()

    async def run(self, stage: int) -> None:
        """Fetch one position after another, the newest first, while the swarm is lost."""
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
        """The position to fetch now; None: none."""
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
        """The positions that backbones announce, the newest first and of one step the most kept, with their keepers."""
        found: dict[Position, list[PeerId]] = {}
        for peer, positions in sorted(self._services.directory.kept.items()):
            for position in {p for p in positions if p.step > 0}:
                found.setdefault(position, []).append(peer)
        return sorted(found.items(), key=lambda one: (one[0].step, len(one[1]), one[0].lineage), reverse=True)

    def _counts(self, position: Position, keepers: Sequence[PeerId]) -> bool:
        """True for a position that was surely the run's, to the conductor or to this peer."""
        return position in self._wanted or self._services.proofs.counts(position, keepers)

    async def _look_for_proofs(self) -> None:
        """Ask keepers for proofs of positions that only they bear out, for a bounded time; say what is missing.

        Each is asked for its newest first. Those that were not asked for longest come first: many strangers, with any
        number of positions, leave a keeper that has a proof a turn.
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
            f"backbone {keepers[0].short} keeps step {position.step}, which no member known here, and no "
            f"backbone in another network, bears out (to take its word: --trust {keepers[0].text})"
        )
        if position != self._told:
            self._told = position
            self._ctx.log.event("checkpoint.in_doubt", level="warning", step=position.step, reason=self.problem)

    def _doubted(self) -> list[tuple[Position, list[PeerId]]]:
        """The positions that backbones announce, and that do not count, before the newest one that does."""
        kept, counts = self._kept(), self._counts
        return list(takewhile(lambda one: one[0] not in self._saving.positions and not counts(*one), kept))

    def _to_ask(self, doubted: Sequence[tuple[Position, list[PeerId]]]) -> list[tuple[PeerId, Position]]:
        """Some keepers to ask for proofs now, each with its newest position for which it was not asked just now."""
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
            await self._ctx.host.connect(keeper)  # also tells in which network it is
        if await self._services.proofs.learn(keeper, position):
            proven.add(position)

    async def _recall(self, position: Position, stage: int) -> bool:
        self.waits_for = f"the checkpoint of step {position.step} from a backbone"
        outline = await self._joiner.work(self._joiner.model.outline, "outline the state")
        request = StateRequest(self._services.fingerprint, stage, of=position)
        try:
            found, items = await self._fetcher.fetch(
                partial(self._services.directory.keepers, position), request, outline, self._files
            )
            state = await self._files.run(partial(checked, found, items), name="check a kept checkpoint")
        except (RemoteError, ValueError) as error:
            self._failed[position] = trio.current_time() + _FAILED_S
            self.problem = f"the checkpoint of step {position.step} cannot be had: {error}"
            self._ctx.log.event(
                "checkpoint.not_recalled", level="warning", stage=stage, step=position.step, reason=str(error)
            )
            return False
        finally:
            self.waits_for = None
        try:
            await self._saving.save(position, state, hold=True)
        except ConfigError as error:
            self._failed[position] = trio.current_time() + _FAILED_S
            self.problem = f"the checkpoint of step {position.step} cannot be kept: {error}"
            self._ctx.log.event(
                "checkpoint.not_saved", level="warning", stage=stage, step=position.step, reason=str(error)
            )
            return False
        self.problem = None
        self._patient_until = trio.current_time() + self._patience_s
        self._patience_s *= 2
        self._ctx.log.event("checkpoint.recalled", stage=stage, step=position.step)
        self._reports.tell()
        return True
