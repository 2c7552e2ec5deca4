"""Checkpoints of a stage peer: their schedule, their folder, and the positions that the peer can return to.

A thin layer over `peerd.model.checkpoint` that knows positions (step and lineage) and keeps file access off the
device's worker. Not a role. Training never waits for the disk: a queued state is read and written in the background,
piece by piece, one checkpoint at a time; a newer state replaces one that is still waiting. A full or hanging disk, or a
lack of memory, costs only checkpoints: `problem` reports it, and the next checkpoint that is due is tried again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio
from torch import Tensor

from peerd.core.errors import ConfigError, NoMemory, PeerdError, WorkCancelled
from peerd.core.limits import SAVED_TOLD, SLOW_DISK_BYTES_PER_S
from peerd.core.signals import Signal
from peerd.messages.swarm import Position
from peerd.model.checkpoint import Checkpoints, Manifest
from peerd.model.frozen_state import FrozenState
from peerd.model.run_record import write_record
from peerd.role.role import RoleContext
from peerd.run.runfile import disk_bytes

_HANGS_S = 30.0  # duration of a write, plus the time for its bytes, after which `problem` reports it


class StageCheckpoints:
    """The checkpoints of one peer in one run. Call `open` before any other method except `stages`."""

    def __init__(self, ctx: RoleContext, fingerprint: bytes, spare: int = 0) -> None:
        """`spare` is the number of checkpoints to keep in addition to the run's `checkpoint.keep`."""
        assert ctx.run is not None
        self._settings, self._run = ctx.run.checkpoint, ctx.run
        self._keep = ctx.run.checkpoint.keep + spare
        self._total_steps = ctx.run.optimizer.total_steps
        self._fingerprint = fingerprint
        self._root = ctx.data_dir / "checkpoints" / ctx.run.run
        self._ctx, self._files = ctx, ctx.worker("files")
        self._checkpoints: Checkpoints | None = None
        self._waiting: tuple[Position, FrozenState] | None = None
        self._writing: tuple[Position, float, FrozenState] | None = None  # (position, start time, state)
        self._failed: str | None = None
        self._recorded = False  # whether the run's settings are written
        self._news = Signal()
        self.directory: Path = self._root
        self._stage = -1
        self.positions: list[Position] = []  # oldest first
        self._recalled: set[Position] = set()  # fetched from backbones; never deleted as old ones

    @property
    def told(self) -> list[Position]:
        """The positions to report to the conductor, oldest first: those fetched from backbones, to which others may
        return, and the newest of our own.
        """
        recalled = [p for p in self.positions if p in self._recalled][-SAVED_TOLD:]
        others = [p for p in self.positions if p not in self._recalled]
        return sorted([*recalled, *others[max(0, len(others) - SAVED_TOLD + len(recalled)) :]])

    @property
    def problem(self) -> str | None:
        """Why the newest checkpoint is not on disk, if the user can do something about it; else None."""
        if self._writing is not None:
            position, begun, state = self._writing
            for_s = trio.current_time() - begun
            if for_s > _HANGS_S + state.nbytes / SLOW_DISK_BYTES_PER_S:
                step = position.step
                return f"the checkpoint of step {step} is not yet written to {self.directory} after {for_s:.0f} s"
        return self._failed

    def has(self, position: Position) -> bool:
        """True if the position is saved or queued."""
        coming = [one[0] for one in (self._waiting, self._writing) if one is not None]
        return position in self.positions or position in coming

    def hand_in(self, position: Position, state: FrozenState) -> None:
        """Queue a checkpoint to be written; it replaces one that is still waiting."""
        self._waiting = position, state
        self._tell()

    async def written(self) -> None:
        """Wait until all queued checkpoints are written."""
        while self._waiting is not None or self._writing is not None:
            await self._news.wait()

    def give_up(self) -> None:
        """Stop writing after the current piece of the current checkpoint, and discard the checkpoint that waits."""
        waiting, self._waiting = self._waiting, None
        if self._writing is not None:
            self._writing[2].give_up()
        for position, state in [(one[0], one[-1]) for one in (self._writing, waiting) if one is not None]:
            reason = f"this peer leaves before all {state.nbytes / 1e6:.1f} MB are written"
            self._ctx.log.event("checkpoint.given_up", stage=self._stage, step=position.step, reason=reason)
        self._tell()

    async def run(self) -> None:
        """Write queued checkpoints until cancelled."""
        while True:
            while self._waiting is None:
                await self._news.wait()
            (position, state), self._waiting = self._waiting, None
            self._writing = position, trio.current_time(), state
            try:
                await self.save(position, state)
            except (ConfigError, NoMemory) as error:
                self.missed(position, error)
            except WorkCancelled:
                pass  # already logged
            else:
                self._failed = None
                self._ctx.log.event("checkpoint.saved", stage=self._stage, step=position.step)
            del state
            self._writing = None
            self._tell()

    def missed(self, position: Position, error: PeerdError) -> None:
        """Record and log that a position has no checkpoint, and why."""
        level = "debug" if self._failed else "warning"  # warn only once
        self._failed = f"no checkpoint of step {position.step}: {error}"
        self._ctx.log.event("checkpoint.not_saved", level=level, step=position.step, reason=str(error))

    def _tell(self) -> None:
        self._news.notify()

    async def stages(self, stages: int) -> list[int]:
        """The stages with checkpoints on this disk, the one with the newest checkpoint first."""

        def look() -> list[int]:
            steps = {s: self._open(s).steps() for s in range(stages) if self._of_stage(s).is_dir()}
            return [s for _, s in sorted(((max(saved), s) for s, saved in steps.items() if saved), reverse=True)]

        return await self._files.run(look, name="look for checkpoints")

    async def open(self, stage: int) -> None:
        """Find the saved checkpoints of `stage`. Raises ConfigError, which names the checkpoint, if one is
        unreadable.
        """
        self.directory, self._stage = self._of_stage(stage), stage

        def look() -> tuple[Checkpoints, list[Position]]:
            checkpoints = self._open(stage)
            checkpoints.clean()
            return checkpoints, [_position(checkpoints.manifest(step)) for step in checkpoints.steps()]

        self._checkpoints, self.positions = await self._files.run(look, name="list checkpoints")

    async def drop(self, steps: Sequence[int]) -> None:
        """Delete the checkpoints of `steps`."""
        checkpoints = self._checkpoints
        assert checkpoints is not None

        def remove() -> None:
            for step in steps:
                checkpoints.remove(step)

        await self._files.run(remove, name="drop checkpoints")
        self.positions = [p for p in self.positions if p.step not in steps]

    def hold(self, position: Position) -> None:
        """Protect the checkpoint of `position`, if it exists, from being deleted as an old one."""
        if self._checkpoints is not None and position in self.positions:
            self._checkpoints.hold(position.step)

    def due(self, step: int) -> bool:
        """True if a checkpoint should be written after `step`."""
        every = self._settings.every_steps
        return step == self._total_steps or (every > 0 and step % every == 0)

    async def save(self, position: Position, state: Mapping[str, Tensor] | FrozenState, hold: bool = False) -> None:
        """Write a checkpoint and delete the oldest ones beyond the number to keep. `hold` protects this one from
        deletion.
        """
        checkpoints = self._checkpoints
        assert checkpoints is not None
        if hold:
            self._recalled.add(position)
        lineage = {"lineage": position.lineage.hex()}

        def write() -> list[int]:
            self._record()
            if hold:
                checkpoints.hold(position.step)
            checkpoints.save(position.step, state, lineage)
            return checkpoints.steps()

        kept = await self._files.run(write, name="write a checkpoint")
        others = [p for p in self.positions if p.step != position.step]
        self.positions = sorted(p for p in [*others, position] if p.step in kept)

    def _record(self) -> None:
        """Write the run's settings once, for `peerd export`. Errors are ignored: peers can use a checkpoint without
        them.
        """
        if not self._recorded:
            with contextlib.suppress(OSError):
                write_record(self._root, self._run, self._fingerprint)
                self._recorded = True

    async def load(self, position: Position) -> dict[str, Tensor]:
        """Load the state saved at `position`. Raises ConfigError if it is missing or damaged."""
        checkpoints = self._checkpoints
        assert checkpoints is not None
        state, manifest = await self._files.run(lambda: checkpoints.load(position.step), name="read a checkpoint")
        if _position(manifest) != position:
            raise ConfigError(f"the checkpoint of step {position.step} in {self.directory} belongs to another branch")
        if (held := state.get("step")) is not None and int(held) != position.step:
            wrong = f"the checkpoint of step {position.step} in {self.directory} holds the state of step {int(held)}"
            raise ConfigError(f"{wrong}; delete step-{position.step:08d}.json to go on without it")
        return dict(state)

    def _of_stage(self, stage: int) -> Path:
        return self._root / f"stage-{stage}"

    def _open(self, stage: int) -> Checkpoints:
        return Checkpoints(self._of_stage(stage), self._keep, self._fingerprint, stage, disk_bytes(self._run))


def _position(manifest: Manifest) -> Position:
    return Position(manifest.step, bytes.fromhex(str(manifest.extra["lineage"])))
