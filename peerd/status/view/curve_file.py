"""Reads the learning curve that a backbone writes: a growing file of JSON lines.

Long curves are thinned out evenly. Invalid lines are skipped, and a line still being written is left for the next read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from peerd.status.run_pulse import LossHistory

LOOK_BYTES: Final = 4 << 20  # most that one read takes, from the end of the file


class CurveFile:
    """Training and validation losses of a learning curve, as far as `read` has read the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self.train, self.valid = LossHistory(), LossHistory()

    def read(self) -> None:
        """Read the lines that were completed since the last call. Does nothing if the file does not exist."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                self._at = max(self._at, end - LOOK_BYTES) if self._at <= end else 0
                file.seek(self._at)
                data = file.read(LOOK_BYTES)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            try:
                told = json.loads(line)
                self.train.note(told.get("step"), told.get("loss"))
                self.valid.note(told.get("valid_step"), told.get("valid_loss"))
            except (ValueError, AttributeError, RecursionError):
                continue
