"""Rows of JSONL and Parquet files without text: skipped and counted, or an error (`data.strict`).

All reads of a source share one `SkippedRows`. A row counts once, although resumed streams and later epochs read it
again; only the first _REMEMBERED rows are recognised that way.
"""

from __future__ import annotations

from typing import Final

from peerd.core.errors import ConfigError

NOTHING_ROWS: Final = 1000  # a file that begins with that many broken rows has another format
_REMEMBERED: Final = 10_000


class SkippedRows:
    """Counts skipped rows, and keeps the first fault and the newest."""

    def __init__(self, strict: bool = False) -> None:
        """`strict`: the first row without text raises ConfigError."""
        self.strict = strict
        self.count = 0
        self.first = self.newest = ""
        self._seen: set[str] = set()

    def note(self, fault: str) -> None:
        """Count a row. `fault` names file and row, and the reason why the row has no text."""
        if self.strict:
            raise ConfigError(f"{fault} (data.strict: false leaves such rows out)")
        if fault in self._seen:
            return
        if len(self._seen) < _REMEMBERED:
            self._seen.add(fault)
        self.count += 1
        self.first, self.newest = self.first or fault, fault


class RowFaults:
    """Handles the rows without text in one read of a file."""

    def __init__(self, skipped: SkippedRows, from_begin: bool) -> None:
        """`from_begin`: the read starts at the first row of its part of the file."""
        self._skipped = skipped
        self._in_a_row = 0 if from_begin else None

    def empty(self, fault: str) -> None:
        """Report a row whose text is null."""
        self._skipped.note(fault)

    def broken(self, fault: str) -> None:
        """Report a row that cannot be read; raises ConfigError if the file's first NOTHING_ROWS rows are all broken."""
        if self._in_a_row is not None:
            self._in_a_row += 1
            if self._in_a_row >= NOTHING_ROWS:
                raise ConfigError(f"{fault}; the {NOTHING_ROWS - 1} rows before it cannot be read either")
        self._skipped.note(fault)

    def good(self) -> None:
        """Report a row with text."""
        self._in_a_row = None


class RefusedRows(RowFaults):
    """Ends a read at the first broken row; skips rows whose text is null."""

    def __init__(self) -> None:
        super().__init__(SkippedRows(), False)

    def broken(self, fault: str) -> None:
        raise ConfigError(fault)
