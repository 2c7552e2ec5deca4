"""Rows of JSONL and Parquet files that give no text: left out and counted, or an error (`data.strict`).

`SkippedRows` is shared by all reads of a source. A row counts once, although a stream that resumes, and each epoch,
reads it again; only the first _REMEMBERED rows are told apart that way.
"""

from __future__ import annotations

from typing import Final

from peerd.core.errors import ConfigError

NOTHING_ROWS: Final = 1000  # a file that begins with so many broken rows has another format
_REMEMBERED: Final = 10_000


class SkippedRows:
    """Counts the rows that were left out, and keeps the first fault and the newest."""

    def __init__(self, strict: bool = False) -> None:
        """`strict`: the first row without text is a ConfigError."""
        self.strict = strict
        self.count = 0
        self.first = self.newest = ""
        self._seen: set[str] = set()

    def note(self, fault: str) -> None:
        """Count a row. `fault` names file and row, and says why the row gives no text."""
        if self.strict:
            raise ConfigError(f"{fault} (data.strict: false leaves such rows out)")
        if fault in self._seen:
            return
        if len(self._seen) < _REMEMBERED:
            self._seen.add(fault)
        self.count += 1
        self.first, self.newest = self.first or fault, fault


class RowFaults:
    """What is done about the rows of one read of a file that give no text."""

    def __init__(self, skipped: SkippedRows, from_begin: bool) -> None:
        """`from_begin`: the read begins with the first row of its part of the file."""
        self._skipped = skipped
        self._in_a_row = 0 if from_begin else None

    def empty(self, fault: str) -> None:
        """A row whose text is null."""
        self._skipped.note(fault)

    def broken(self, fault: str) -> None:
        """A row that cannot be read; ConfigError where no row of the file can be."""
        if self._in_a_row is not None:
            self._in_a_row += 1
            if self._in_a_row >= NOTHING_ROWS:
                raise ConfigError(f"{fault}; the {NOTHING_ROWS - 1} rows before it cannot be read either")
        self._skipped.note(fault)

    def good(self) -> None:
        """A row that gave text."""
        self._in_a_row = None


class RefusedRows(RowFaults):
    """Ends a read at the first broken row; rows without text are left out."""

    def __init__(self) -> None:
        super().__init__(SkippedRows(), False)

    def broken(self, fault: str) -> None:
        raise ConfigError(fault)
