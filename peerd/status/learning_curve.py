"""A run's learning curve on disk: JSON lines, one for each observed global step, and the same data as a Parquet table.

Steps only increase. A restart continues after the last complete line and removes a line that a crash or a full disk cut
short; a reader in another thread sees complete lines only. When a swarm returns to an older checkpoint, no lines are
written until it has passed the last recorded step. The table is rebuilt from the lines now and then, written to a
temporary file and renamed; it needs pyarrow (extra `data`). All methods are synchronous and access the disk. Calls of
`append` must not overlap, nor calls of `write_table`. Imports no torch, because a backbone that only observes has none.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import msgspec

from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError

NO_PYARROW = "no Parquet table without the pyarrow package: pip install 'peerd[data]'; the JSON lines are complete"


class CurvePoint(msgspec.Struct, frozen=True):
    """The swarm at one global step. Losses are in nats per token; rates cover the whole swarm."""

    step: int
    time: float  # Unix seconds, by the observer's clock
    loss: float | None  # None if no trainer reported one
    valid_loss: float | None  # None if not evaluated since the previous line
    valid_step: int | None  # step of `valid_loss`
    peers: list[int]  # number in each stage
    trainers: int
    samples_per_s: float
    tokens_per_s: float


class LearningCurves:
    """The learning-curve files of one run. Only one process writes them. Call `open` first."""

    def __init__(self, folder: Path, run: str) -> None:
        """`run` may contain any character; one that a file name cannot contain is written as `%` and its hexadecimal
        code.
        """
        name = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}" for c in run)
        self.lines = folder / f"{name}.jsonl"
        self.table = folder / f"{name}.parquet"
        self.step = 0  # of the last line
        self.valid_step = 0  # of the newest evaluation in the file
        self._whole_bytes = 0  # offset of the end of the last complete line

    def open(self) -> None:
        """Find the curve's last step and cut off an incomplete last line. Raises ConfigError if a line is
        unreadable.
        """
        try:
            self.lines.parent.mkdir(parents=True, exist_ok=True)
            if not self.lines.exists():
                return
            with self.lines.open("r+b") as file:
                self._whole_bytes = sum(len(line) for line in file if line.endswith(b"\n"))
                file.truncate(self._whole_bytes)
            for point in self.read():
                self.step, self.valid_step = point.step, max(self.valid_step, point.valid_step or 0)
        except OSError as error:
            raise ConfigError(f"{error.filename or self.lines}: {error.strerror or error}") from error

    def read(self) -> list[CurvePoint]:
        """All written points, oldest first."""
        points = []
        with self.lines.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # still being written
                try:
                    points.append(from_json(line, CurvePoint))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{self.lines}, line {number} is damaged: {error}; delete that line") from error
        return points

    def append(self, point: CurvePoint) -> bool:
        """Write a line if the step is new. Returns True if a line was written. Raises OSError."""
        if point.step <= self.step:
            return False
        if point.valid_step is not None and point.valid_step <= self.valid_step:
            point = msgspec.structs.replace(point, valid_loss=None, valid_step=None)
        with self.lines.open("ab") as file:
            if file.tell() > self._whole_bytes:
                file.truncate(self._whole_bytes)
            file.write(msgspec.json.encode(point) + b"\n")
            file.flush()
            self._whole_bytes = file.tell()
        self.step, self.valid_step = point.step, max(self.valid_step, point.valid_step or 0)
        return True

    def write_table(self) -> bool:
        """Write the Parquet table of all points. Returns False if there are none.

        Raises ConfigError if pyarrow is missing, and OSError.
        """
        try:
            pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(NO_PYARROW) from error
        if not self.step:
            return False
        rows = [msgspec.to_builtins(point) for point in self.read()]
        whole, number = pyarrow.int64(), pyarrow.float64()
        kinds = {"step": whole, "valid_step": whole, "trainers": whole, "peers": pyarrow.list_(whole)}
        schema = pyarrow.schema([(name, kinds.get(name, number)) for name in CurvePoint.__struct_fields__])
        aside = self.table.with_name(self.table.name + ".new")
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), aside)
        os.replace(aside, self.table)
        return True
