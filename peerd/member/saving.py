"""Checkpoints of a stage peer: when they are due, where they lie, which positions it can return to.

A thin layer over `peerd.compute.checkpoint` that knows positions (step and lineage) and keeps files off the
device's worker. Not a role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from peerd.compute.checkpoint import Checkpoints, Manifest
from peerd.core.errors import ConfigError
from peerd.core.training import Position
from peerd.role import RoleContext


class Saving:
    """The checkpoints of one peer in one run. `open` comes before everything but `newest_stage`."""

    def __init__(self, ctx: RoleContext, fingerprint: bytes, spare: int = 0) -> None:
        """`spare`: how many more checkpoints to keep than the run says."""
        assert ctx.run is not None
        self._settings = ctx.run.checkpoint
        self._keep = ctx.run.checkpoint.keep + spare
        self._total_steps = ctx.run.optimizer.total_steps
        self._fingerprint = fingerprint
        self._root = ctx.data_dir / "checkpoints" / ctx.run.run
        self._files = ctx.worker("files")
        self._checkpoints: Checkpoints | None = None
        self.directory: Path = self._root
        self.positions: list[Position] = []  # oldest first

    async def newest_stage(self, stages: int) -> int | None:
        """The stage of which we have the newest checkpoint, if any."""

        def look() -> int | None:
            steps = {s: self._open(s).steps() for s in range(stages) if self._of_stage(s).is_dir()}
            found = [(max(saved), s) for s, saved in steps.items() if saved]
            return max(found)[1] if found else None

        return await self._files.run(look, name="look for checkpoints")

    async def open(self, stage: int) -> None:
        """Find what is saved of `stage`; ConfigError names a checkpoint that cannot be read."""
        self.directory = self._of_stage(stage)

        def look() -> tuple[Checkpoints, list[Position]]:
            checkpoints = self._open(stage)
            checkpoints.clean()
            return checkpoints, [_position(checkpoints.manifest(step)) for step in checkpoints.steps()]

        self._checkpoints, self.positions = await self._files.run(look, name="list checkpoints")

    async def drop(self, steps: Sequence[int]) -> None:
        """Forget the checkpoints of `steps`."""
        checkpoints = self._checkpoints
        assert checkpoints is not None

        def remove() -> None:
            for step in steps:
                checkpoints.remove(step)

        await self._files.run(remove, name="drop checkpoints")
        self.positions = [p for p in self.positions if p.step not in steps]

    def due(self, step: int) -> bool:
        """Is a checkpoint to be written after `step`?"""
        every = self._settings.every_steps
        return step == self._total_steps or (every > 0 and step % every == 0)

    async def save(self, position: Position, state: Mapping[str, Tensor], hold: bool = False) -> None:
        """Write a checkpoint; older ones beyond the number to keep go. `hold`: this one stays, however old it is."""
        checkpoints = self._checkpoints
        assert checkpoints is not None
        lineage = {"lineage": position.lineage.hex()}

        def write() -> list[int]:
            if hold:
                checkpoints.hold(position.step)
            checkpoints.save(position.step, state, lineage)
            return checkpoints.steps()

        kept = await self._files.run(write, name="write a checkpoint")
        others = [p for p in self.positions if p.step != position.step]
        self.positions = sorted(p for p in [*others, position] if p.step in kept)

    async def load(self, position: Position) -> dict[str, Tensor]:
        """The state saved at `position`; ConfigError when it is not there or broken."""
        checkpoints = self._checkpoints
        assert checkpoints is not None
        state, manifest = await self._files.run(lambda: checkpoints.load(position.step), name="read a checkpoint")
        if _position(manifest) != position:
            raise ConfigError(f"the checkpoint of step {position.step} in {self.directory} is of another branch")
        return dict(state)

    def _of_stage(self, stage: int) -> Path:
        return self._root / f"stage-{stage}"

    def _open(self, stage: int) -> Checkpoints:
        return Checkpoints(self._of_stage(stage), keep=self._keep, fingerprint=self._fingerprint, stage=stage)


def _position(manifest: Manifest) -> Position:
    return Position(manifest.step, bytes.fromhex(str(manifest.extra["lineage"])))
