"""Reader of the learning curve that a backbone writes: JSON lines, read on from where the last look ended.

Thinned out evenly where it is long. A line that makes no sense is left out, and one still being written is read later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from peerd.commands.status.run_pulse import LossHistory

LOOK_BYTES: Final = 4 << 20  # of the file's end at the first look, and at each later one


class CurveFile:
    """The file's training and validation losses, as far as `read` has come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._train, self._valid = LossHistory(), LossHistory()

    @property
    def train(self) -> list[tuple[float, float]]:
        return [(step, loss) for step, loss in self._train.told()]

    @property
    def valid(self) -> list[tuple[float, float]]:
        return [(step, loss) for step, loss in self._valid.told()]

    def read(self) -> None:
        """Take in whole lines that are new; a file that is not there has none."""
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
                self._train.note(told.get("step"), told.get("loss"))
                self._valid.note(told.get("valid_step"), told.get("valid_loss"))
            except (ValueError, AttributeError, RecursionError):
                continue
