"""`kept.json`: which whole sets of checkpoints a keeper has. Read before anything of torch is there.

The list is written after a set is; what it names may be gone or broken, which whoever opens the sets finds out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from peerd.core.errors import ConfigError
from peerd.core.messages.swarm import Position


class _Set(msgspec.Struct, frozen=True):
    step: int
    lineage: str
    stages: int


class _Sets(msgspec.Struct, frozen=True):
    run: str
    sets: list[_Set]


class KeptList:
    """The list of one run below a keeper's data directory."""

    def __init__(self, data_dir: Path, run: str) -> None:
        self.path = data_dir / "checkpoints" / run / "kept.json"
        self._run = run

    def read(self) -> list[Position]:
        """What it names, oldest first; nothing when there is none, or it cannot be read."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_Sets)
            return sorted(Position(one.step, bytes.fromhex(one.lineage)) for one in found.sets)
        except (OSError, ValueError):
            return []

    def write(self, positions: Sequence[Position], stages: int) -> None:
        """Replace it, whole or not at all; ConfigError names the file that could not be written."""
        sets = [_Set(position.step, position.lineage.hex(), stages) for position in positions]
        text = msgspec.json.format(msgspec.json.encode(_Sets(self._run, sets)), indent=2)
        aside = self.path.with_name(self.path.name + ".new")
        try:
            aside.write_bytes(text + b"\n")
            os.replace(aside, self.path)
        except OSError as error:
            raise ConfigError(f"{aside}: {error.strerror or error}") from error
