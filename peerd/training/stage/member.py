"""A member of a stage: what it serves (`serving`), averaging with its stage-mates, optimizer steps. Not a role.

What role `stage` is, and what role `trainer` holds where the model is one stage: a replica of its own; with `Own` it is
a user's model, whose gradients nobody else computes. Follows the run's conductor (it tells when to average and step)
and may be the conductor itself when it serves stage 0. Chooses its stage by need, takes its state from a checkpoint of
its own or from a stage-mate, and writes checkpoints. Invariants: parameters change only by commit, restore and
download, one at a time; every call names its step and is refused at any other; what a trainer hears is never computed
with parameters of two steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TypeVar

import trio
from torch import Tensor

from peerd.compute.model.served_stage import Model, ServedStage, Stale, Unusable, Vector
from peerd.compute.model.user_model import UserModel
from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.ids import PeerId, is_peer_text
from peerd.core.messages.progress import StageProgress
from peerd.core.messages.proof import receipt
from peerd.core.messages.swarm import (
    Commit,
    LineInfo,
    Mb,
    Mbs,
    MemberAnswer,
    MemberInfo,
    MemberSync,
    Moved,
    Position,
    Prepare,
    Prepared,
    Receipt,
    Restore,
)
from peerd.core.runfile import RunFile
from peerd.machine.averaging.allreduce import RoundFailed
from peerd.machine.averaging.stats import explained
from peerd.machine.conductor.member_list import KnownMembers
from peerd.machine.swarm.roster import START
from peerd.role import RoleContext
from peerd.service.rpc.rpc import Answer, Incoming, MethodLimits
from peerd.service.run_services import Training
from peerd.training.catchup.catch_up import CatchingUp, Elsewhere
from peerd.training.catchup.step_totals import Leap
from peerd.training.checkpoints.checkpoint_recovery import Recalling
from peerd.training.checkpoints.stage_checkpoints import Saving
from peerd.training.stage.admissions import Admissions
from peerd.training.stage.announcement import announce_now_and_then
from peerd.training.stage.averaging import Plans, Rounds, Total
from peerd.training.stage.external_model import Own
from peerd.training.stage.serving import Serving

T = TypeVar("T")

_SERVICES = ("stage/2", "average/1", "state/1")
_SYNC_WAIT_S = 2.0
_LEAVE_PATIENCE_S = 4.0


class StageMember:
    """See the module's header. `run`, `leave` and `status` are as in `peerd.role.Role`."""

    def __init__(self, ctx: RoleContext, training: Training | None = None, own: Own | None = None) -> None:
        """`training`: the run's services, when whoever holds this member uses them too."""
        assert ctx.run is not None
        self._ctx = ctx
        self._own = own
        self._run: RunFile = ctx.run
        self._training = training or Training(ctx.run, ctx.host, ctx.rpc, ctx.dht, ctx.clock)
        self._following = self._training.following
        self._conducting = self._training.conducting()
        self._saving = Saving(ctx, self._training.fingerprint)
        self._worker = ctx.worker(ctx.device)
        self._coding = ctx.worker("coding")
        self._session = int.from_bytes(ctx.clock.secure_bytes(6), "big")
        self._admissions = Admissions(self._training.fingerprint, lambda: self._following.conductor)
        ctx.host.book.members_by(self._admissions.has_admitted)
        self._serving = Serving(ctx, ctx.run, self._training.fingerprint, self)
        self._rounds = Rounds(ctx.run, self._training, self._coding, ctx.host.id)
        self._catching_up = CatchingUp(ctx, self._training, self._coding, self)
        self._recalling = Recalling(ctx, self._training, self._saving, self)
        self._tally = self._training.tally("stage", ctx.data_dir / "contributed.json", ctx.worker("files"))
        self._since = ctx.clock.wall()
        self._stage = -1
        self._served: ServedStage | UserModel | None = None
        self._position = START
        self._before: Position | None = None  # where the last step began
        self._averaged: Position | None = None  # where a commit would lead
        self._total: Total | None = None  # what it would step with
        self._counted: list[Mb] = []  # in the last mean that lies ready or was stepped with, and its digest
        self._digest = b""
        self._line_said: LineInfo | None = None
        self._leaving = False
        self.moving = trio.Lock()
        self.members: list[MemberInfo] = []
        self._listed = KnownMembers()
        self._term = 0
        self._seen, self._changes, self._resend = 0, -1, True  # what the conductor and we know of each other
        self._asking = trio.CancelScope()  # a report that waits for news
        self._told, self._news = 0, 0  # how often we had something to tell, and what of it is told
        self._stated, self._stepped = START, trio.Event()
        self._waits_for: str | None = "a stage to serve"
        self._complete = False

    # --- life -------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await self._training.compare_settings()
            self._stage = await self._choose_stage()
            self._served = await self.work(self._build, "build the stage")
            self._rounds.check(self._served)
            if self._own is not None:  # a user's first parameters are anything, not a function of the run's seed
                self._position = await self.work(self._own.model.here, "name the parameters")
            await self._return_to_checkpoint()
            self._since = self._ctx.clock.wall()
            async with trio.open_nursery() as nursery:
                await nursery.start(self._serving.boundary.run)
                if self._stage == 0:
                    self._following.joined_since = self._since
                    self._conducting.notes = lambda text: self._ctx.log.event("conductor", note=text)
                    self._conducting.solver = self._coding
                    await nursery.start(self._conducting.run)
                self._serve()
                self._waits_for = "the conductor"
                self._ctx.log.event("stage", stage=self._stage, step=self._position.step)
                announce = partial(announce_now_and_then, self._ctx, self._training, self._progress)
                nursery.start_soon(announce, lambda: self._stepped)
                nursery.start_soon(self._saving.run)
                nursery.start_soon(self._tally.run)
                nursery.start_soon(self._catching_up.run)
                nursery.start_soon(self._training.assembling().run, self._stage)
                if self._own is None:  # trainers do not call a user's model, and nobody keeps its checkpoints
                    nursery.start_soon(self._training.calling_in().run)
                    nursery.start_soon(self._recalling.run, self._stage)
                nursery.start_soon(self._follow)
                task_status.started()
        finally:
            for service in _SERVICES:
                self._ctx.rpc.unserve(service)

    async def leave(self) -> None:
        """Let the step under way end, so that nobody has to repeat our part; then say goodbye."""
        if self._served is None:
            return
        self._leaving = True
        with trio.move_on_after(_LEAVE_PATIENCE_S):
            while (self._served.held or self._served.early) and not self._complete:
                await self._stepped.wait()
        await self._save()
        with trio.move_on_after(_LEAVE_PATIENCE_S):
            await self._saving.written()
        await self._following.say_goodbye(self._training.fingerprint)
        await self._training.directory.withdraw(self._stage)

    @property
    def position(self) -> Position:
        """Where the parameters stand now."""
        return self._position

    @property
    def origins(self) -> list[Position]:
        """Where a gradient may have been computed that counts here: where we stand, and in a delayed run before."""
        before = [self._before] if self._before is not None and self._run.optimizer.delayed else []
        return [self._position, *before]

    @property
    def stage(self) -> int:
        """The stage that it serves; below 0 until it has chosen."""
        return self._stage

    @property
    def step(self) -> int:
        """How many global steps its parameters have made."""
        return self._position.step

    @property
    def served(self) -> ServedStage:
        """What trainers' calls are computed with."""
        served = self._need()
        assert isinstance(served, ServedStage)
        return served

    def receipt(self, step: int, mb: Mb) -> Receipt:
        """For a trainer to show: this peer holds that microbatch's gradient."""
        return receipt(self._ctx.host.sign, self._training.fingerprint, self._session, self._stage, step, mb)

    @property
    def admissions(self) -> Admissions:
        """What trainers were let in with."""
        return self._admissions

    @property
    def samples_per_s(self) -> float:
        """What its device does when it is never idle; 0: not known yet."""
        return self._serving.rate()

    @property
    def relieved(self) -> bool:
        """Does it leave, with others of its stage there to take its place?"""
        own = self._ctx.host.id.text
        return self._leaving and any(m.ready and m.stage == self._stage and m.peer != own for m in self.members)

    def status(self) -> dict[str, object]:
        held = len(self._served.held) * self._run.pipeline.microbatch if self._served else 0
        return {
            "stage": self._stage,
            "step": self._position.step,
            "next_step_in_s": self._following.step_in_s,
            "held_samples": held,
            "samples": self._serving.samples,
            "samples_per_s": self._serving.rate(),
            "coding": self._serving.boundary.choices,
            "conducts": self._conducting.acting,
            "conductor": self._following.conductor.text if self._following.conductor else None,
            "averaging": self._rounds.told(),
            "members": [{"peer": m.peer, "stage": m.stage, "ready": m.ready} for m in self.members],
            "complete": self._complete,
            "saved_steps": [p.step for p in self._saving.positions],
            "checkpoint": str(self._saving.directory) if self._stage >= 0 else None,
            "not_saved": self._saving.problem,
            "waits_for": self._why_waiting(),
        }

    def _why_waiting(self) -> str | None:
        waits = self._following.waits_for or self._catching_up.waits_for or self._recalling.waits_for
        if waits or not self._waits_for:
            return waits or self._rounds.waits_for
        problem = self._recalling.problem
        return f"{self._waits_for}; {problem}" if problem else self._waits_for

    # --- joining ----------------------------------------------------------------------------------------------

    async def _choose_stage(self) -> int:
        """The configured stage; else the one we have a checkpoint of; else the one with the fewest peers."""
        wanted = self._run.limits.stage
        if wanted is None:
            wanted = await self._saving.newest_stage(self._run.pipeline.stages)
        if wanted is not None:
            return wanted
        return await self._training.directory.needed_stage(self._since, self._ctx.clock)

    def _build(self) -> ServedStage | UserModel:
        return self._own.model if self._own else ServedStage(self._run, self._stage, self._ctx.device)

    def _changing(self, patient: bool = False) -> AbstractAsyncContextManager[None]:
        return self._own.changing(patient) if self._own else nullcontext()

    async def _return_to_checkpoint(self) -> None:
        if self._own and not self._own.saves:
            return
        await self._saving.open(self._stage)
        if self._saving.positions:
            await self._load_saved(self._saving.positions[-1])

    async def _load_saved(self, target: Position) -> None:
        """Go to a position of our own past; START needs no file."""
        if target == START and self._own is None:
            self._served = await self.work(self._build, "build the stage anew")
        elif self._own is not None and target not in self._saving.positions:
            raise Refused("there is no way back to that position here")
        else:
            state = await self._saving.load(target)
            async with self._changing():
                await self.work(lambda: self._need().load(state), "load the checkpoint")
        self._arrive_anew(target)
        self._ctx.log.event("restored", stage=self._stage, step=target.step)

    async def take_over(self, before: Position, position: Position, state: dict[str, Tensor]) -> None:
        """Go from `before` to `position` with a state from others; ValueError when it does not fit."""
        await self._catch_up(before, position, lambda: self.model.load(state), "load the downloaded state")

    async def step_on(self, before: Position, leap: Leap) -> None:
        """Make the optimizer step that others made; ValueError when it does not fit."""
        step = partial(leap.make, self.model, self._run.batch.target_samples)
        await self._catch_up(before, leap.target, step, "step as the others did")

    async def _catch_up(self, before: Position, position: Position, job: Callable[[], None], name: str) -> None:
        async with self.moving, self._changing(patient=True):
            if self._position != before:
                raise Elsewhere(f"this peer was moved to step {self._position.step} meanwhile")
            await self.work(job, name)
            self._arrive_anew(position)

    async def reached(self, step: int) -> None:
        """Wait until the parameters stand at that step, or further."""
        while self._position.step < step:
            await self._stepped.wait()

    def say_where(self) -> None:
        """Tell the conductor at once where the parameters stand now."""
        self._news += 1
        self._asking.cancel()

    @property
    def model(self) -> Model:
        """What this member holds, once it is built."""
        return self._need()

    def _need(self) -> ServedStage | UserModel:
        assert self._served is not None
        return self._served

    def _arrive(self, position: Position) -> None:
        self._before, self._position = self._position, position
        self._averaged, self._total = None, None
        self._admissions.arrive()
        self._stepped.set()
        self._stepped = trio.Event()

    def _arrive_anew(self, position: Position) -> None:
        """Arrive otherwise than by a step of our own."""
        self._counted, self._digest = [], b""
        self._rounds.forget()
        self._arrive(position)
        self._before = None

    async def work(self, job: Callable[[], T], name: str, urgent: bool = False) -> T:
        """Run a job on the model's device; an urgent one goes before what trainers ask for."""
        return await self._worker.run(job, name=name, urgent=urgent)

    # --- following --------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Report to the conductor, take its word on where the swarm stands."""
        while True:
            told = self._news
            with trio.CancelScope() as self._asking:
                answer = await self._following.ask("swarm/2/member", self._report, MemberAnswer, _SYNC_WAIT_S + 8.0)
            if self._asking.cancelled_caught:
                continue
            self._seen, self._resend, self._told = answer.version, answer.resend, told
            self._admissions.follow(self._following.conductor)
            self._rounds.call_off_unless_of(self._following.conductor)
            self._take(answer)
            if answer.current is not None:
                self._catching_up.swarm_at(answer.current, self._stated)

    def _report(self) -> MemberSync:
        self._resend |= self._told != self._news
        if self._following.changes != self._changes:
            self._changes, self._seen, self._resend = self._following.changes, 0, True
            self._listed.forget()
        say_all, self._stated = self._resend, self._position
        line = self._rounds.line()
        news, self._line_said = line != self._line_said, line
        return MemberSync(
            run=self._training.fingerprint,
            session=self._session,
            stage=self._stage,
            position=self._position,
            prepared=self._averaged,
            saved=self._saving.told,
            held=Mbs.of(self._need().held) if say_all else None,
            counted=Mbs.of(self._counted if say_all else []),
            addrs=self._training.directory.own_addrs(),
            since=self._since,
            term=self._term,
            seen=self._seen,
            wait_s=0.0 if say_all or self._listed.more else _SYNC_WAIT_S,
            line=line if say_all or news else None,
            early=Mbs.of(self._need().early if say_all else []),
            listed=self._listed.version,
            digest=self._digest if say_all else b"",
        )

    def _take(self, answer: MemberAnswer) -> None:
        self._conducting.term = self._term = max(self._term, answer.term)
        self._following.note_forecast(answer.forecast)
        if (members := self._listed.take(answer.members)) is not None:
            self.members = self._following.note_members(members)
        self._complete = answer.complete
        self._waits_for = answer.waits_for or None
        self._recalling.swarm_is_lost(answer.lost)

    def _progress(self) -> StageProgress:
        """For the directory; the conductor's tells when the step is due."""
        conductor, step_in_s = self._following.conductor, self._following.step_in_s
        foretells = self._conducting.acting and step_in_s is not None
        return StageProgress(
            stage=self._stage,
            since=self._since,
            step=self._position.step,
            held=len(self._need().held) * self._run.pipeline.microbatch,
            samples_per_s=self._serving.rate(),
            device=self._ctx.device,
            conductor=conductor.text if conductor else "",
            waits_for=(self._why_waiting() or "")[:200],
            addrs=self._training.directory.own_addrs(),
            step_at=self._ctx.clock.wall() + (step_in_s or 0.0) if foretells else 0.0,
            client=self._training.directory.only_dials,
        )

    # --- serving ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        rpc = self._ctx.rpc
        orders = MethodLimits(body_bytes=1 << 20, calls_per_peer=4)
        if self._own is None:
            self._serving.serve()
        rpc.serve("stage/2/prepare", Prepare, self._prepare, limits=orders)
        rpc.serve("stage/2/commit", Commit, self._commit, limits=orders)
        rpc.serve("stage/2/restore", Restore, self._restore, limits=orders)
        self._catching_up.offer(self._stage)

    # --- the conductor's orders -------------------------------------------------------------------------------

    def _obey(self, peer: PeerId, run: bytes) -> None:
        if run != self._training.fingerprint:
            raise Refused("your run file differs from this run's")
        if peer != self._following.conductor:
            raise Refused("this peer does not follow you")

    async def _prepare(self, call: Incoming[Prepare]) -> Answer[Prepared]:
        body = call.body
        self._obey(call.peer, body.run)
        if not all(map(is_peer_text, body.group)):
            raise ProtocolViolation("the group names somebody who can't be a peer", call.peer)
        if body.step != self._position.step or self._ctx.host.id.text not in body.group:
            return Answer(Prepared(False, body.assigned, []))
        plans = self._rounds.plans(body, call.peer)
        self._rounds.call_off_for(body.attempt)
        async with self.moving:
            with self._rounds.under_way(body.attempt, call.peer):
                return Answer(await self._average(body, plans))

    async def _average(self, order: Prepare, plans: Plans) -> Prepared:
        """Bring our part, take the sum."""
        self._serving.closing = True
        try:
            vector = await self.work(lambda: self._part_of(order), "copy the gradient", urgent=True)
            if isinstance(vector, list):
                return Prepared(False, Mbs.of(vector), [])
            total = await self._rounds.total(plans, vector, self._need().low_rank)
            digest = await self._rounds.digest(total)
        except Unusable as error:
            self._ctx.log.event("not summed", level="warning", step=order.step, reason=str(error))
            return Prepared(False, Mbs(), [], refused=Mbs.of(error.mbs))
        except RoundFailed as error:
            self._ctx.log.event("averaging failed", level="warning", step=order.step, reason=explained(error))
            return Prepared(False, Mbs(), list(error.lost))
        except Stale as error:
            raise Refused(str(error)) from None
        finally:
            self._serving.closing = False
        self._total, self._averaged = total, Position(order.step + 1, order.lineage)
        self._counted, self._digest = list(order.assigned), digest
        return Prepared(True, Mbs(), [], digest)

    def _part_of(self, order: Prepare) -> Vector | list[Mb]:
        """On the device: what we bring to the average, or what is missing for it. One job: nothing comes between."""
        served = self._need()
        if missing := served.keep_only(order.step, order.assigned):
            return missing
        if refused := served.unusable(order.step):
            raise Unusable(refused)
        return served.vector()

    async def _commit(self, call: Incoming[Commit]) -> Answer[Moved]:
        self._obey(call.peer, call.body.run)
        return await self._move(call.body.target, self._step_to)

    async def _restore(self, call: Incoming[Restore]) -> Answer[Moved]:
        self._obey(call.peer, call.body.run)
        return await self._move(call.body.target, self._load_saved)

    async def _move(self, target: Position, how: Callable[[Position], Awaitable[None]]) -> Answer[Moved]:
        """Go to `target` unless we are there; a caller that hangs up does not stop it half-way."""
        with trio.CancelScope(shield=True):
            async with self.moving:
                if self._position != target:
                    await how(target)
        return Answer(Moved(self._position))

    async def _step_to(self, target: Position) -> None:
        served, total = self._need(), self._total
        if target != self._averaged or total is None:
            raise Refused("no such average lies ready here")
        samples, before = self._run.batch.target_samples, self._position
        async with self._changing():
            leap = await self.work(lambda: total.step(served, target, samples), "step", urgent=True)
        self._catching_up.keep(before, leap)
        samples = len(self._counted) * self._run.pipeline.microbatch
        self._tally.add(samples=samples, bytes_aggregated=self._rounds.newly_aggregated_bytes())
        self._arrive(target)
        if self._saving.due(target.step):
            await self._save()

    async def _save(self) -> None:
        """Copy the state; how long the disk takes to hold it, nobody waits for."""
        kept = self._own is None or self._own.saves
        if kept and self._position.step and not self._saving.has(self._position):
            self._saving.hand_in(self._position, await self.work(self._need().state, "copy the state"))
