"""State of a post: its parameters and their position. Only this module builds, loads, steps and saves them.

Invariants: parameters change only by a step, a checkpoint of the post's own, or a stage-mate's state or total; one
change at a time (`moving`), and only from the expected position. `arrived` is called at each new position before tasks
that wait for it are woken. If a change fails in the middle, for example for lack of memory, the parameters are
undefined: `run` raises, and the role restarts from its checkpoint or a stage-mate's state. Parameters that are not
finite after a step are never saved nor offered: the post returns to its newest checkpoint by itself. As its stage-mates
have the same bits and do the same, the stage then lacks the swarm's position, and the conductor sends all stages back
to their newest common position.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TypeVar

import trio
from torch import Tensor

from peerd.averaging.rounds.averaging_rounds import Total
from peerd.core.errors import ConfigError, NoMemory, PeerdError, Refused
from peerd.core.signals import Signal
from peerd.experts.model.trunk_stage import TrunkStage
from peerd.messages.swarm import Position
from peerd.model.changes import ParametersLost
from peerd.model.stage.footprint import recomputes, refuse_if_too_large
from peerd.model.stage.offload import offloads
from peerd.model.stage.served_stage import Model, ServedStage
from peerd.model.stage.user_model import UserModel
from peerd.pipeline.stage.external_model import ExternalModel
from peerd.role.role import RoleContext
from peerd.run.runfile import RunFile
from peerd.state.catchup.catch_up import PositionChanged
from peerd.state.catchup.copy_room import room_for_copy
from peerd.state.catchup.step_totals import StepTotal
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.swarm.batch.divergence import AGAIN_STEPS
from peerd.swarm.roster import START

T = TypeVar("T")


class PostState:
    """The state of one post. `own` is a user's model that replaces the run's model."""

    def __init__(
        self, ctx: RoleContext, stage: int, saving: StageCheckpoints, own: ExternalModel | None = None
    ) -> None:
        assert ctx.run is not None
        self._ctx, self._saving, self._own = ctx, saving, own
        self._run: RunFile = ctx.run
        self._worker = ctx.worker(ctx.device)
        self._served: ServedStage | UserModel | None = None
        self.recomputes = False  # whether the backward pass recomputes layers
        self._before: Position | None = None  # the position before the last step
        self.stage = stage
        self.position = START
        self.moving = trio.Lock()
        self._lost: PeerdError | None = None
        self._diverged_at: int | None = None  # the step after which the parameters were not finite
        self.problem: str | None = None  # text on that, until the next step
        self._loses = Signal()
        self.stepped = Signal()  # notified at each new position
        self.restored: Callable[[Position, Position], None] = lambda before, target: None
        self.arrived: Callable[[bool], None] = lambda anew: None  # `anew`: not by a step of our own

    @property
    def model(self) -> Model:
        """The model. Call `build` first."""
        assert self._served is not None
        return self._served

    @property
    def built(self) -> bool:
        """True once the model is built."""
        return self._served is not None

    @property
    def served(self) -> ServedStage:
        """The stage that computes trainers' calls."""
        assert isinstance(self._served, ServedStage)
        return self._served

    @property
    def origins(self) -> list[Position]:
        """Positions at which a gradient that counts may be computed: the current one; in a delayed run also the
        previous one.
        """
        before = [self._before] if self._before is not None and self._run.optimizer.delayed else []
        return [self.position, *before]

    @property
    def trunk(self) -> TrunkStage:
        """The trunk stage of a run with experts."""
        assert isinstance(self._served, TrunkStage)
        return self._served

    async def work(self, job: Callable[[], T], name: str, urgent: bool = False) -> T:
        """Run a job on the model's device. Urgent jobs run before trainers' calls."""
        return await self._worker.run(job, name=name, urgent=urgent)

    async def reached(self, step: int) -> None:
        """Wait until the parameters are at that step or a later one."""
        while self.position.step < step:
            await self.stepped.wait()

    async def run(self) -> None:
        """Wait, and raise ParametersLost if a change failed midway, or ConfigError if the parameters diverged again."""
        while self._lost is None:
            await self._loses.wait()
        raise self._lost

    async def _change(self, job: Callable[[], T], name: str, urgent: bool = False) -> T:
        """Run a job that may change the parameters, and raise its errors. If it failed midway, the parameters are
        lost.
        """
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
        """Number of changes of the parameters that were begun. A user's model stops its peer by itself if a change
        fails.
        """
        return self._served.module.changes.begun if isinstance(self._served, ServedStage) else 0

    # --- beginning --------------------------------------------------------------------------------------------

    async def build(self) -> None:
        """Build the model with the run's initial parameters. A user's model gets a position derived from its
        parameters.
        """
        if self._own is None:
            need = partial(refuse_if_too_large, self._run, self.stage, self._ctx.device)
            await self.work(need, "see whether the stage fits")
            if offloads(self._run, self._ctx.device):
                self._ctx.log.event("stage.offloads", stage=self.stage)
            self.recomputes = self._run.experts is None and await self._choose_recomputation()
        self._served = await self.work(self._build, "build the stage")
        if self.recomputes:
            self._ctx.log.event("stage.recomputes", stage=self.stage)
        if self._own is not None:  # a user's first parameters do not follow from the run's seed
            self.position = await self.work(self._own.model.here, "name the parameters")

    async def _choose_recomputation(self) -> bool:
        """True if the backward pass should recompute layers; False if a user's layers cannot be measured."""
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
        """Load the newest checkpoint of this post, if there is one."""
        await self._saving.open(self.stage)
        if self._saving.positions:
            await self.load_saved(self._saving.positions[-1])

    # --- moving -----------------------------------------------------------------------------------------------

    async def move(self, target: Position, how: Callable[[Position], Awaitable[None]]) -> Position:
        """Reach `target` by calling `how`, unless the parameters are there already. Shielded from a caller that
        disconnects.
        """
        with trio.CancelScope(shield=True):
            async with self.moving:
                if self.position != target:
                    await how(target)
        return self.position

    async def load_saved(self, target: Position) -> None:
        """Return to this post's checkpoint of `target`. START needs none, unless the model is a user's own.

        Raises Refused if the model is a user's own and this post has no checkpoint of `target`.
        """
        before = self.position
        if target == START and self._own is None:
            self._served = await self.work(self._build, "build the stage anew")
        elif self._own is not None and target not in self._saving.positions:
            raise Refused("this peer has no checkpoint of that position")
        else:
            state = await self._saving.load(target)
            async with self._changing():
                await self._change(lambda: self.model.load(state), "load the checkpoint")
        self._arrive(target, anew=True)
        self.restored(before, target)

    async def step(self, target: Position, total: Total) -> StepTotal:
        """Make the optimizer step to `target`; returns the leap (the step with its total) for others. Then call
        `arrive`.
        """
        model, samples = self.model, self._run.batch.target_samples
        async with self._changing():
            return await self._change(lambda: total.step(model, target, samples), "step", urgent=True)

    def arrive(self, target: Position) -> None:
        """Record that a step of our own has led to `target`."""
        self._arrive(target, anew=False)
        self.problem = None

    async def has_diverged(self, target: Position) -> bool:
        """True if the step to `target` made parameters that are not finite; the post has then returned to a checkpoint.

        Raises ConfigError, as `run` does, if that happened within the last 100 steps too or there is no checkpoint.
        """
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
        """Replace the parameters, now at `before`, by others' state at `position`. ValueError if it does not fit."""
        await self._catch_up(before, position, lambda: self.model.load(state), "load the downloaded state")

    async def step_on(self, before: Position, leap: StepTotal) -> None:
        """Make the optimizer step that others made. Raises ValueError if it does not fit."""
        step = partial(leap.make, self.model, self._run.batch.target_samples)
        await self._catch_up(before, leap.target, step, "step as the others did")

    async def _catch_up(self, before: Position, position: Position, job: Callable[[], None], name: str) -> None:
        async with self.moving, self._changing(patient=True):
            if self.position != before:
                raise PositionChanged(f"another task moved this peer to step {self.position.step} meanwhile")
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
        """True unless a user's own loop saves its checkpoints itself."""
        return self._own is None or self._own.saves

    async def save_if_due(self) -> None:
        """Save if the run file asks for a checkpoint of this step. The caller must hold `moving`."""
        if self._saving.due(self.position.step):
            await self._save()

    async def save(self) -> None:
        """Freeze the state after the current step and queue it for the disk, without waiting for the disk."""
        async with self.moving:  # without it the parameters may be a step ahead of the position
            await self._save()

    async def _save(self) -> None:
        position = self.position
        if not self.keeps_checkpoints or not position.step or self._saving.has(position):
            return
        room = partial(room_for_copy, self._run, self._ctx.data_dir)
        try:
            state = await self.work(lambda: self.model.freeze(room), "freeze the state to save it")
        except NoMemory as error:
            self._saving.missed(position, error)
        else:
            self._saving.hand_in(position, state)
