"""`kept.json`: the list of a keeper's complete checkpoint sets. Can be read before torch is loaded.

The list is written after each set. A listed set may be deleted or damaged since; opening the set shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError
from peerd.messages.swarm import Position
from peerd.run.home import write_atomically


class _Set(msgspec.Struct, frozen=True):
    step: int
    lineage: str
    stages: int


class _Sets(msgspec.Struct, frozen=True):
    run: str
    sets: list[_Set]


class KeptList:
    """The list of one run's checkpoint sets in a keeper's data directory."""

    def __init__(self, data_dir: Path, run: str) -> None:
        self.path = data_dir / "checkpoints" / run / "kept.json"
        self._run = run

    def read(self) -> list[Position]:
        """The positions of the sets, oldest first; empty if the list does not exist or cannot be read."""
        try:
            found = from_json(self.path.read_bytes(), _Sets)
            return sorted(Position(one.step, bytes.fromhex(one.lineage)) for one in found.sets)
        except (OSError, ValueError):
            return []

    def write(self, positions: Sequence[Position], stages: int) -> None:
        """Replace the list atomically. Raises ConfigError, which names the file, if it cannot be written."""
        sets = [_Set(position.step, position.lineage.hex(), stages) for position in positions]
        text = msgspec.json.format(msgspec.json.encode(_Sets(self._run, sets)), indent=2)
        try:
            write_atomically(self.path, text + b"\n", mode=0o644)
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror or error}") from error
