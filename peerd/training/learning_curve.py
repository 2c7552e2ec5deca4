"""A run's learning curve on disk: one JSON line for each global step that was seen, and the same as a Parquet table.

Steps only go up: a restart goes on behind the last whole line, and of a line that a crash or a full disk cut short
nothing is left; a reader in another thread sees whole lines only. When a swarm goes back to an older
checkpoint there are no lines until it is past the last one. The table is made anew from the lines now and then,
written aside and renamed; it needs pyarrow (extra `data`). All methods are synchronous and touch the disk; of
`append`, and of `write_table`, one call at a time. Imports no torch: a backbone that only watches has none.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import msgspec

from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError

NO_PYARROW = "no Parquet table without the pyarrow package: pip install 'peerd[data]'; the JSON lines are complete"


class Point(msgspec.Struct, frozen=True):
    """The swarm at one global step. Losses in nats per token; rates over the whole swarm."""

    step: int
    time: float  # Unix seconds, by the observer's clock
    loss: float | None  # None: no trainer reported one
    valid_loss: float | None  # None: not evaluated since the line before
    valid_step: int | None  # the step that `valid_loss` belongs to
    peers: list[int]  # by stage
    trainers: int
    samples_per_s: float
    tokens_per_s: float


class Curves:
    """The files of one run; one process writes them. `open` comes first."""

    def __init__(self, folder: Path, run: str) -> None:
        """`run` may hold any character: those that cannot stand in a file's name are written as their number."""
        name = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}" for c in run)
        self.lines = folder / f"{name}.jsonl"
        self.table = folder / f"{name}.parquet"
        self.step = 0  # of the last line
        self.valid_step = 0  # the newest evaluation in it
        self._whole_bytes = 0  # of the file, up to the end of its last whole line

    def open(self) -> None:
        """Find the curve's last step, and cut off an incomplete last line; ConfigError when a line cannot be read."""
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

    def read(self) -> list[Point]:
        """All written points, oldest first."""
        points = []
        with self.lines.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # still being written
                try:
                    points.append(from_json(line, Point))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{self.lines}, line {number} is damaged: {error}; delete that line") from error
        return points

    def append(self, point: Point) -> bool:
        """Write a line, if the step is a new one. Raises OSError."""
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
        """Make the Parquet table of all written points; ConfigError when pyarrow is missing. Raises OSError."""
        try:
            pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(NO_PYARROW) from error
        if not self.step:
            return False
        rows = [msgspec.to_builtins(point) for point in self.read()]
        whole, number = pyarrow.int64(), pyarrow.float64()
        kinds = {"step": whole, "valid_step": whole, "trainers": whole, "peers": pyarrow.list_(whole)}
        schema = pyarrow.schema([(name, kinds.get(name, number)) for name in Point.__struct_fields__])
        aside = self.table.with_name(self.table.name + ".new")
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), aside)
        os.replace(aside, self.table)
        return True
