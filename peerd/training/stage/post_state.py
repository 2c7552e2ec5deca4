"""State of a post: its parameters and their position, built, loaded, stepped and saved here, and nowhere else.

Invariants: parameters change only by a step, a checkpoint of the post's own, or a stage-mate's state or total, one
change at a time (`moving`), from the position that they were thought to be at. `arrived` is called at each new position
before tasks that wait for it are woken. Where a change fails in the middle, as for want of memory, nobody knows what
the parameters are: `run` ends with that, and the role with it, to begin again from its checkpoint or a stage-mate.
Parameters that are not finite after a step are never kept nor offered: the post goes back to its newest checkpoint by
itself. As its mates have the same bits and do the same, its stage then lacks the swarm's position, and the conductor
sends all stages back to the newest one that they have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TypeVar

import trio
from torch import Tensor

from peerd.compute.changes import ParametersLost
from peerd.compute.experts.trunk_stage import TrunkStage
from peerd.compute.model.footprint import recomputes, refuse_if_too_large
from peerd.compute.model.offload import offloads
from peerd.compute.model.served_stage import Model, ServedStage
from peerd.compute.model.user_model import UserModel
from peerd.core.errors import ConfigError, NoMemory, PeerdError, Refused
from peerd.core.messages.swarm import Position
from peerd.core.run.runfile import RunFile
from peerd.machine.batch.divergence import AGAIN_STEPS
from peerd.machine.swarm.roster import START
from peerd.role import RoleContext
from peerd.signals import Signal
from peerd.training.catchup.catch_up import Elsewhere
from peerd.training.catchup.step_totals import StepTotal
from peerd.training.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.training.stage.averaging import Total
from peerd.training.stage.external_model import ExternalModel

T = TypeVar("T")


class PostState:
    """The state of one post. `own`: a user's model in place of a stage of the run's."""

    def __init__(
        self, ctx: RoleContext, stage: int, saving: StageCheckpoints, own: ExternalModel | None = None
    ) -> None:
        assert ctx.run is not None
        self._ctx, self._saving, self._own = ctx, saving, own
        self._run: RunFile = ctx.run
        self._worker = ctx.worker(ctx.device)
        self._served: ServedStage | UserModel | None = None
        self.recomputes = False  # layers are computed again in a backward
        self._before: Position | None = None  # the position that the last step began at
        self.stage = stage
        self.position = START
        self.moving = trio.Lock()
        self._lost: PeerdError | None = None
        self._diverged_at: int | None = None  # the step after which the parameters were not finite
        self.problem: str | None = None  # that they were, until the next step
        self._loses = Signal()
        self.stepped = Signal()  # at each new position
        self.restored: Callable[[Position, Position], None] = lambda before, target: None
        self.arrived: Callable[[bool], None] = lambda anew: None  # `anew`: otherwise than by a step of our own

    @property
    def model(self) -> Model:
        """The model, once it is built."""
        assert self._served is not None
        return self._served

    @property
    def built(self) -> bool:
        """True once there is a model."""
        return self._served is not None

    @property
    def served(self) -> ServedStage:
        """The stage that computes trainers' calls."""
        assert isinstance(self._served, ServedStage)
        return self._served

    @property
    def origins(self) -> list[Position]:
        """Positions that a gradient that counts may be computed at: this one, and in a delayed run the one before."""
        before = [self._before] if self._before is not None and self._run.optimizer.delayed else []
        return [self.position, *before]

    @property
    def trunk(self) -> TrunkStage:
        """The stage of a run with experts."""
        assert isinstance(self._served, TrunkStage)
        return self._served

    async def work(self, job: Callable[[], T], name: str, urgent: bool = False) -> T:
        """Run a job on the model's device; an urgent one goes before trainers' calls."""
        return await self._worker.run(job, name=name, urgent=urgent)

    async def reached(self, step: int) -> None:
        """Wait until the parameters have that step, or a later one."""
        while self.position.step < step:
            await self.stepped.wait()

    async def run(self) -> None:
        """Wait until the parameters are lost: ParametersLost; or have diverged once more: ConfigError."""
        while self._lost is None:
            await self._loses.wait()
        raise self._lost

    async def _change(self, job: Callable[[], T], name: str, urgent: bool = False) -> T:
        """Run a job that changes the parameters. What it raises goes on; had it begun to change any, they are lost."""
        before, done = self._changes, False
        try:
            result = await self.work(job, name, urgent)
            done = True
            return result
        finally:
            if not done and self._changes != before:
                told = f"stage {self.stage} has lost its parameters: “{name}” failed in the middle"
                self._lost = ParametersLost(f"{told}: {sys.exception()}")
                self._loses.notify()

    @property
    def _changes(self) -> int:
        """Changes of the parameters that were begun. A user's model ends its peer by itself when one fails."""
        return self._served.module.changes.begun if isinstance(self._served, ServedStage) else 0

    # --- beginning --------------------------------------------------------------------------------------------

    async def build(self) -> None:
        """Build the model at the run's start; a user's has the position of the parameters it comes with."""
        if self._own is None:
            need = partial(refuse_if_too_large, self._run, self.stage, self._ctx.device)
            await self.work(need, "see whether the stage fits")
            if offloads(self._run, self._ctx.device):
                self._ctx.log.event("stage.offloads", stage=self.stage)
            self.recomputes = self._run.experts is None and await self._choose_recomputation()
        self._served = await self.work(self._build, "build the stage")
        if self.recomputes:
            self._ctx.log.event("stage.recomputes", stage=self.stage)
        if self._own is not None:  # a user's first parameters are anything, not a function of the run's seed
            self.position = await self.work(self._own.model.here, "name the parameters")

    async def _choose_recomputation(self) -> bool:
        """Whether layers are to be computed again; not where the activations of own layers cannot be measured."""
        choose = partial(recomputes, self._run, self.stage, self._ctx.device)
        try:
            return await self.work(choose, "see whether activations fit")
        except ConfigError as error:
            told = f"the memory for activations is not known: {error}"
            self._ctx.log.event("stage.activations_unknown", level="warning", stage=self.stage, reason=told)
            return False

    def _build(self) -> ServedStage | UserModel:
        if self._own:
            return self._own.model
        if self._run.experts is not None:
            return TrunkStage(self._run, self._ctx.device)
        served = ServedStage(self._run, self.stage, self._ctx.device)
        self.recomputes = self.recomputes and served.module.recompute()
        return served

    async def return_to_checkpoint(self) -> None:
        """Go to the newest checkpoint of the post's own, if it has any."""
        await self._saving.open(self.stage)
        if self._saving.positions:
            await self.load_saved(self._saving.positions[-1])

    # --- moving -----------------------------------------------------------------------------------------------

    async def move(self, target: Position, how: Callable[[Position], Awaitable[None]]) -> Position:
        """Go to `target` by `how`, unless the parameters are there; shielded from a caller that hangs up."""
        with trio.CancelScope(shield=True):
            async with self.moving:
                if self.position != target:
                    await how(target)
        return self.position

    async def load_saved(self, target: Position) -> None:
        """Go back to a checkpoint of the post's own; START needs no file."""
        before = self.position
        if target == START and self._own is None:
            self._served = await self.work(self._build, "build the stage anew")
        elif self._own is not None and target not in self._saving.positions:
            raise Refused("there is no way back to that position here")
        else:
            state = await self._saving.load(target)
            async with self._changing():
                await self._change(lambda: self.model.load(state), "load the checkpoint")
        self._arrive(target, anew=True)
        self.restored(before, target)

    async def step(self, target: Position, total: Total) -> StepTotal:
        """Make the optimizer step to `target`; returns the leap that others make it by. `arrive` comes after it."""
        model, samples = self.model, self._run.batch.target_samples
        async with self._changing():
            return await self._change(lambda: total.step(model, target, samples), "step", urgent=True)

    def arrive(self, target: Position) -> None:
        """Note that a step of our own has led to `target`."""
        self._arrive(target, anew=False)
        self.problem = None

    async def has_diverged(self, target: Position) -> bool:
        """True when the step to `target` made parameters that are not finite: then the post has gone back, or stops."""
        if await self.work(self.model.is_finite, "look whether the parameters are finite", urgent=True):
            return False
        told = f"the run has diverged: parameters of stage {self.stage} are not finite after step {target.step}"
        before, self._diverged_at = self._diverged_at, target.step
        back = self._saving.positions[-1] if self._saving.positions else START
        has_none = self._own is not None and not self._saving.positions
        if has_none or (before is not None and target.step <= before + AGAIN_STEPS):
            why = "and there is no checkpoint to go back to" if has_none else "again"
            self._lost = ConfigError(f"{told}, {why}; lower optimizer.lr, or set optimizer.clip_norm")
            self._loses.notify()
            raise self._lost
        self.problem = f"{told}: this peer goes back to step {back.step}, once"
        self._ctx.log.event("run.diverged", level="warning", stage=self.stage, step=target.step, reason=self.problem)
        await self.load_saved(back)
        return True

    async def take_over(self, before: Position, position: Position, state: dict[str, Tensor]) -> None:
        """Go from `before` to `position` with a state from others; ValueError when it does not fit."""
        await self._catch_up(before, position, lambda: self.model.load(state), "load the downloaded state")

    async def step_on(self, before: Position, leap: StepTotal) -> None:
        """Make the optimizer step that others made; ValueError when it does not fit."""
        step = partial(leap.make, self.model, self._run.batch.target_samples)
        await self._catch_up(before, leap.target, step, "step as the others did")

    async def _catch_up(self, before: Position, position: Position, job: Callable[[], None], name: str) -> None:
        async with self.moving, self._changing(patient=True):
            if self.position != before:
                raise Elsewhere(f"this peer was moved to step {self.position.step} meanwhile")
            await self._change(job, name)
            self._arrive(position, anew=True)

    def _changing(self, patient: bool = False) -> AbstractAsyncContextManager[None]:
        return self._own.changing(patient) if self._own else nullcontext()

    def _arrive(self, position: Position, anew: bool) -> None:
        self._before, self.position = None if anew else self.position, position
        self.arrived(anew)
        self.stepped.notify()

    # --- keeping ----------------------------------------------------------------------------------------------

    @property
    def keeps_checkpoints(self) -> bool:
        """True unless a user's own loop keeps its checkpoints by itself."""
        return self._own is None or self._own.saves

    async def save_if_due(self) -> None:
        """Save if the run file wants a checkpoint of this step. For a caller that holds `moving`."""
        if self._saving.due(self.position.step):
            await self._save()

    async def save(self) -> None:
        """Freeze the state, once a step under way is done, and queue it for the disk, which is not waited for."""
        async with self.moving:  # else the parameters may be a step ahead of the position
            await self._save()

    async def _save(self) -> None:
        position = self.position
        if not self.keeps_checkpoints or not position.step or self._saving.has(position):
            return
        try:
            state = await self.work(lambda: self.model.freeze(), "freeze the state to save it")
        except NoMemory as error:
            self._saving.missed(position, error)
        else:
            self._saving.hand_in(position, state)
