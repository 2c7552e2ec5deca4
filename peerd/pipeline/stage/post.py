"""Post: one stage of the run, served by this peer, from entering the stage until leaving it.

Gets its state from its own checkpoint or a stage-mate, serves trainers (`serving`), executes the conductor's orders
(`orders`), reports to the conductor (`session`), and on stage 0 is ready to become the conductor itself. A process may
have several posts at once, of different stages, and enter and leave them while it runs. Invariants: every call names
its step and is refused at any other; no answer to a trainer is computed with parameters of two steps; when `run` ends,
the post no longer serves or offers anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from peerd.averaging.rounds.averaging_rounds import AveragingRounds
from peerd.averaging.rounds.line_info import rest_text
from peerd.core.errors import ProtocolViolation, Refused, RemoteError
from peerd.core.limits import MICROBATCHES, SLOW_DISK_BYTES_PER_S
from peerd.messages.contributions import Rest
from peerd.messages.encoding import Empty
from peerd.messages.progress import StageProgress
from peerd.messages.proof import receipt
from peerd.messages.swarm import Mb, MemberAnswer, MemberInfo, Position, PostLoad, Receipt, Relocate
from peerd.model.stage.served_stage import ServedStage
from peerd.pipeline.stage.admissions import Admissions
from peerd.pipeline.stage.announcement import announce_now_and_then
from peerd.pipeline.stage.external_model import ExternalModel
from peerd.pipeline.stage.handover import HandOver
from peerd.pipeline.stage.orders import PostOrders
from peerd.pipeline.stage.post_state import PostState
from peerd.pipeline.stage.serving import ServingCalls
from peerd.pipeline.stage.session import ConductorSession, Holdings, PostReport
from peerd.pipeline.stage.stage_works import stage_works
from peerd.pipeline.stage_calls import StageHandlers
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile, precision_text
from peerd.run.stage_plan import planned_stage
from peerd.state.catchup.catch_up import CatchUp
from peerd.state.catchup.step_totals import StepTotal
from peerd.state.checkpoints.checkpoint_recovery import CheckpointRecovery
from peerd.state.checkpoints.evidence_store import EvidenceStore
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints

_LEAVE_PATIENCE_S: Final = 4.0
_LIST_S: Final = 2.0  # for the conductor's list of remaining members
_BRANCH_S: Final = 30.0  # for writing a checkpoint that no other peer may have, plus the time for its bytes


class Post:
    """A stage served by this peer. `stepped` is called after each step with the number of this post's samples in it."""

    def __init__(self, ctx: RoleContext, services: RunServices, stage: int, own: ExternalModel | None = None) -> None:
        assert ctx.run is not None
        self.stage = stage
        self.stepped: Callable[[int], None] = lambda samples: None
        self.moves_to: Callable[[int, str], None] | None = None  # handles an order to move; None if the peer must stay
        self._ctx, self._services, self._own = ctx, services, own
        self._run: RunFile = ctx.run
        self._following, self._conducting = services.following, services.conducting
        self._coding = ctx.worker("coding")
        self.saving = StageCheckpoints(ctx, services.fingerprint)
        self.state = PostState(ctx, stage, self.saving, own)
        self.session = ConductorSession(services, stage, self)
        every = ctx.run.evaluate.every_steps
        self.admissions = Admissions(services.fingerprint, lambda: self._following.conductor, every)
        ctx.host.book.members_by(self.admissions.has_helped)
        self.serving = ServingCalls(ctx, ctx.run, self)
        self.handover = HandOver(ctx, services, self, self.serving)
        self._rounds = AveragingRounds(ctx.run, services, self._coding, ctx.host.id, ctx.data_dir)
        self.orders = PostOrders(ctx, self.state, self._rounds, self.serving, self._coding)
        self.catching_up = CatchUp(ctx, services, self._coding, self.state, self.session)
        self._recalling = CheckpointRecovery(ctx, services, self.saving, self.state, self.session)
        self._store = EvidenceStore(ctx, services, lambda: self.saving.positions)
        self.state.arrived, self.orders.stepped = self._arrived, self._made_step
        self.state.restored = self._restored
        self.catching_up.keep_branch = self._keep_branch
        self._leaving = self._ends = False
        self._state_bytes = 0
        self._write_until = math.inf  # deadline for writing while leaving, by trio's clock
        self._waits_for: str | None = "the stage to be built"
        self._complete = False
        self._rest: Rest | None = None  # set while it contributes no gradients
        self._announcing = trio.CancelScope()
        self.announced = trio.Event()  # set once the directory has its record

    # --- life -------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the stage until cancelled."""
        await self.state.build()
        self._rounds.check(self.state.model)
        specs = await self.state.work(self.state.model.outline, "outline the state")
        self._state_bytes = sum(spec.nbytes for spec in specs)
        self._look_for_room()
        await self.state.return_to_checkpoint()
        await self._store.open()
        self.session.since = self._ctx.clock.wall()
        first = self.stage == 0
        with self._services.calls.serving(self.stage, self._handlers()), self._services.proofs.serving():
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self.serving.boundary.run)
                    if first:
                        await self._conduct(nursery)
                    self.catching_up.offer(self.stage)
                    self._waits_for = "the conductor"
                    self._ctx.log.event("stage.entered", stage=self.stage, step=self.state.position.step)
                    self._start_all(nursery)
                    task_status.started()
            finally:
                self.catching_up.withdraw()
                if first:
                    self._following.joined_since = None

    async def _conduct(self, nursery: trio.Nursery) -> None:
        """Run the conductor's service, as all peers of stage 0 do. It is idle unless this peer has the duty."""
        self._conducting.notes = lambda text: self._ctx.log.event("conductor.noted", note=text)
        self._conducting.warnings = lambda text: self._ctx.log.event("conductor.noted", level="warning", note=text)
        self._conducting.solver = self._coding
        self._conducting.know_state(self._state_bytes)
        if self._run.pipeline.stages > 1:  # a single stage needs no assignment
            works = await self._coding.run(partial(stage_works, self._run), name="compare the stages")
            plans = self._run.pipeline.placement == "network"
            self._conducting.know_stages(works, self._ctx.worker("planning") if plans else None)
        await nursery.start(self._conducting.run)
        self._following.joined_since = self.session.since  # from now on this peer may become conductor

    def _start_all(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._announce)
        nursery.start_soon(self.state.run)
        nursery.start_soon(self.saving.run)
        nursery.start_soon(self.catching_up.run)
        nursery.start_soon(self._services.assembling().run, self.stage)
        nursery.start_soon(self._recalling.run, self.stage)
        nursery.start_soon(self._store.run)
        nursery.start_soon(self.session.run)
        nursery.start_soon(self.handover.run)

    async def _announce(self) -> None:
        with self._announcing:
            await announce_now_and_then(self._ctx, self._services, self._progress, self.state.stepped, self.announced)

    def _handlers(self) -> StageHandlers:
        orders, serving = self.orders, self.serving
        handlers = StageHandlers(
            prepare=orders.prepare,
            commit=orders.commit,
            restore=orders.restore,
            transfer=self.transfer,
            samples_per_s=serving.rate,
        )
        if self._own is not None or self._run.experts is not None:
            return handlers  # trainers never call a user's model or another peer's trunk
        return replace(
            handlers,
            forward=serving.forward,
            loss=serving.loss,
            passes=self.handover.passes,
            objections={
                "forward": serving.forward_objection,
                "loss": serving.loss_objection,
                "passes": self.handover.objection,
            },
        )

    async def transfer(self, call: Incoming[Relocate]) -> Answer[Empty]:
        """Handle the conductor's order to serve another stage. Raises Refused if this peer stays."""
        body = call.body
        if not body.target < self._run.pipeline.stages:
            raise ProtocolViolation(f"the run has no stage {body.target}", call.peer)
        if self.moves_to is None or body.target == self.stage:
            planned = planned_stage(self._run, self._ctx.host.id.text) == self.stage and not self._run.limits.stages
            why = "the run's plan assigns it" if planned else "its user chose it"
            raise Refused(f"this peer serves stage {self.stage}, because {why}")
        self.moves_to(body.target, "".join(char if char.isprintable() else "?" for char in body.why))
        return Answer(Empty())

    async def leave(
        self, patience_s: float | None = None, may_go: Callable[[], bool] = lambda: True, ends: bool = False
    ) -> bool:
        """Wait for the current step to end, if it can, so that no trainer must repeat our part; then leave the stage.

        Returns False, and continues to serve, if `may_go` then forbids it. `ends` is True if the process ends as well.
        """
        if not self.state.built:
            return True
        self._leaving = True
        with trio.move_on_after(_LEAVE_PATIENCE_S if patience_s is None else patience_s):
            while self._is_at_work and not (self._complete or self._stands_still or self._works_alone):
                await self.state.stepped.wait()
        if not may_go():
            self._leaving = False
            return False
        self.orders.close()  # the state written now must stay the newest
        self._announcing.cancel()
        await self.session.say_goodbye()
        await self._write_last(ends)
        return True

    async def announce_end(self) -> None:
        """Announce, in all records from now on, that this peer leaves soon and that the run may end with its state."""
        self._ends = True
        try:
            await self._services.directory.announce(self._progress())
        except RemoteError as error:
            self._ctx.log.event("dht.announce_failed", level="warning", reason=str(error))

    async def _write_last(self, ends: bool) -> None:
        """Write the post's last state; if other peers have it, do not wait for a slow disk.

        The last two holders of a state may leave at the same time, so after our goodbye the conductor is asked for the
        remaining members. The time is limited, because the device or the disk may hang.
        """
        disk_s = _BRANCH_S + self._state_bytes / SLOW_DISK_BYTES_PER_S
        self._write_until = trio.current_time() + disk_s
        try:
            with trio.move_on_after(disk_s):
                if self._is_unsaved:
                    await self._look_who_is_left()
                patience_s = _LEAVE_PATIENCE_S if self.unsaved is None else disk_s
                if self.unsaved is not None:
                    await self._services.directory.withdraw(self.stage)  # no peer should rely on us meanwhile
                with trio.move_on_after(patience_s):
                    await self.state.save()
                    await self.saving.written()
        finally:
            if ends and not self.catching_up.is_apart:  # else there is time to write, or no other peer has it
                self.saving.give_up()
            self._write_until = -math.inf

    async def _look_who_is_left(self) -> None:
        """Fetch the conductor's member list after our goodbye. If no conductor answers, assume that no peer is left."""
        found = None
        with trio.move_on_after(_LIST_S):
            found = await self._following.list_members(self._services.fingerprint)
        self.session.members = found.members if found is not None else []

    @property
    def _is_unsaved(self) -> bool:
        """True while the newest state of this post is not on its disk."""
        built = self.state.built and self.state.keeps_checkpoints
        return built and bool(self.step) and self.state.position not in self.saving.positions

    @property
    def unsaved(self) -> str | None:
        """A sentence on the state that would be lost if this process ended now.

        None if no state would be lost, or if the device and the disk have had enough time.
        """
        own = self._ctx.host.id.text
        if not self._is_unsaved or trio.current_time() > self._write_until:
            return None
        if any(m.ready and m.stage == self.stage and m.peer != own for m in self.members):
            return None
        what = f"step {self.step}" if self._own is not None else f"step {self.step} of stage {self.stage}"
        return f"saving {what}, which no other peer is known to have"

    # --- for its parts ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of global steps in the parameters."""
        return self.state.position.step

    @property
    def served(self) -> ServedStage:
        """The stage that computes trainers' calls."""
        return self.state.served

    def receipt(self, step: int, mb: Mb) -> Receipt:
        """A signed receipt, for the trainer to show, that this peer holds that microbatch's gradient."""
        return receipt(self._ctx.host.sign, self._services.fingerprint, self.session.id, self.stage, step, mb)

    @property
    def members(self) -> list[MemberInfo]:
        """All members and helpers of the swarm, as the conductor last listed them."""
        return self.session.members

    @property
    def relieved(self) -> bool:
        """True if this peer is leaving the post and other peers of the stage are ready."""
        own = self._ctx.host.id.text
        return self._leaving and any(m.ready and m.stage == self.stage and m.peer != own for m in self.members)

    @property
    def _is_at_work(self) -> bool:
        """True while this post has work of this step, or of the next one, that another peer would have to repeat."""
        model = self.state.model
        return bool(model.held or model.early or self.handover.in_flight or self.serving.load.present)

    @property
    def _hands_over(self) -> bool:
        return self._own is None and self._run.pipeline.stages > 1

    @property
    def _stands_still(self) -> bool:
        """True while no step can be completed, because a stage has no peer."""
        staffed = {m.stage for m in self.members if m.since}
        return not staffed.issuperset(range(self._run.pipeline.stages))

    @property
    def _works_alone(self) -> bool:
        """True while a user's own loop has no other peer, so no other microbatches can complete the step."""
        return self._own is not None and all(m.peer == self._ctx.host.id.text for m in self.members)

    def _arrived(self, anew: bool) -> None:
        self.orders.arrived(anew)
        self.admissions.arrive()
        self.handover.arrived(self.step)
        self._look_for_room()

    def _look_for_room(self) -> None:
        if self._own is None:  # a user's model takes no microbatches
            self.handover.look_for_room()

    def _restored(self, before: Position, target: Position) -> None:
        """Log a return to `target`. A step back is a warning, unless this peer conducts and the conductor logs it."""
        back = target.step < before.step
        warns = back and not (self.stage == 0 and self._conducting.acting)
        facts = {"before": before.step} if back else {}
        level = "warning" if warns else "info"
        self._ctx.log.event("stage.restored", level=level, stage=self.stage, step=target.step, **facts)

    async def _keep_branch(self, position: Position) -> None:
        """Save a checkpoint of a position that only a part of the run reached, before leaving it.

        The wait for the disk is limited.
        """
        if self.state.position == position:
            await self.state.save()
            with trio.move_on_after(_BRANCH_S + self._state_bytes / SLOW_DISK_BYTES_PER_S):
                await self.saving.written()
            self.saving.hold(position)

    def _made_step(self, before: Position, leap: StepTotal, counted: int) -> None:
        self.catching_up.keep(before, leap)
        self._services.proofs.evidence.stepped(leap.target, self._following.established)
        facts = {"stage": self.stage, "step": leap.target.step, "digest": self.orders.digest.hex()[:16]}
        self._ctx.log.event("stage.stepped", level="debug", **facts)
        self.stepped(counted * self._run.pipeline.microbatch)

    # --- conductor --------------------------------------------------------------------------------------------

    def report(self, whole: bool) -> PostReport:
        """Our report to the conductor, as `session.ReportingPost.report`."""
        orders, model, seen = self.orders, self.state.model, self._services.proofs.evidence.seen
        return PostReport(
            line=self._rounds.line(),
            position=self.state.position,
            prepared=orders.prepared,
            saved=self.saving.told,
            load=self._load(),
            holdings=Holdings(model.held, orders.counted, model.early, orders.digest, seen) if whole else None,
        )

    def _load(self) -> PostLoad:
        load = self.serving.load.look(trio.current_time())
        return PostLoad(min(load.rate, 1e9), load.busy, min(load.queue, MICROBATCHES), self.moves_to is not None)

    def heard(self, answer: MemberAnswer, stated: Position) -> None:
        """Process the conductor's answer, as `session.ReportingPost.heard`."""
        self.admissions.follow(self._following.conductor)
        self.handover.note_members(self.members)
        self._rounds.call_off_unless_of(self._following.conductor)
        self._conducting.term = self.session.term
        self._complete = answer.complete
        self.serving.spared_at = stated.step if answer.spared else -1
        self._waits_for = answer.waits_for or None
        self._recalling.swarm_is_lost(answer.lost, answer.wanted)
        self._note_rest(answer.rests)
        if answer.current is not None:
            rests, established = answer.rests is not None, self._following.established
            self._services.proofs.evidence.told(answer.current, established, rests=rests)
            if answer.rests is None:  # a resting peer does not need the swarm's state
                self.catching_up.swarm_at(answer.current, stated, answer.apart)

    def _note_rest(self, rest: Rest | None) -> None:
        """Record whether the conductor lets this post rest; log each change."""
        before, self._rest = self._rest, rest
        if rest is not None and before is None:
            self._ctx.log.event("stage.rests", stage=self.stage, reason=self._rest_text())
        elif rest is None and before is not None:
            self._ctx.log.event("stage.contributes", stage=self.stage)

    def _rest_text(self) -> str | None:
        return rest_text(self._rest, self._services.line_speeds()) if self._rest is not None else None

    # --- status -----------------------------------------------------------------------------------------------

    def _why_waiting(self) -> str | None:
        if self.state.problem:
            return self.state.problem
        waits = self._following.waits_for or self._rest_text()
        waits = waits or self.catching_up.waits_for or self._recalling.waits_for
        waits = waits or self._rounds.waits_for  # a round reports its progress, which the conductor cannot
        if waits or not self._waits_for:
            return waits
        problem = self._recalling.problem
        return f"{self._waits_for}; {problem}" if problem else self._waits_for

    def status(self) -> dict[str, object]:
        """Plain data, as `peerd.role.role.Role.status`."""
        held = len(self.state.model.held) * self._run.pipeline.microbatch if self.state.built else 0
        conducts = self.stage == 0 and self._conducting.acting
        return {
            "stage": self.stage,
            "step": self.step,
            "next_step_in_s": self._following.step_in_s,
            "held_samples": held,
            "samples": self.serving.samples,
            "samples_per_s": self.serving.rate(),
            "busy": self._load().busy,
            "coding": self.serving.boundary.choices,
            "handover": self.handover.status() if self.state.built and self._hands_over else None,
            "conducts": conducts,
            "conductor": self._following.conductor.text if self._following.conductor else None,
            "precision": None if self._own is not None else precision_text(self._run),
            "recomputes": self.state.recomputes,
            "averaging": self._rounds.told(),
            "members": [{"peer": m.peer, "stage": m.stage, "ready": m.ready} for m in self.members],
            "complete": self._complete,
            "rests": self._rest is not None,
            "saved_steps": [p.step for p in self.saving.positions],
            "checkpoint": str(self.saving.directory),
            "not_saved": self.saving.problem,
            "waits_for": self._why_waiting(),
        }

    def _progress(self) -> StageProgress:
        """Our record for the directory. The conductor's record also has the predicted time of the step."""
        conductor, step_in_s = self._following.conductor, self._following.step_in_s
        load = self._load()
        foretells = self.stage == 0 and self._conducting.acting and step_in_s is not None
        return StageProgress(
            stage=self.stage,
            since=self.session.since,
            step=self.step,
            held=len(self.state.model.held) * self._run.pipeline.microbatch,
            samples_per_s=self.serving.rate(),
            device=self._ctx.device,
            conductor=conductor.text if conductor else "",
            waits_for=(self._why_waiting() or "")[:200],
            addrs=self._services.directory.own_addrs(),
            step_at=self._ctx.clock.wall() + (step_in_s or 0.0) if foretells else 0.0,
            client=self._services.directory.only_dials,
            busy=load.busy,
            queue=load.queue,
            also=[stage for stage in self._services.calls.stages if stage != self.stage],
            ends=self._ends,
        )
