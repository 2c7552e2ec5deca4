"""Entry of scripts that run a swarm for some minutes: a folder for its data, and a report as text or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


@contextlib.contextmanager
def data_folder(prefix: str, keep: Path | None = None) -> Iterator[Path]:
    """The folder `keep`, or a temporary one that is removed at the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def show(report: dict[str, Any], as_json: bool) -> int:
    """Print a report. Returns the exit code: 1 if it has `met` and that is false."""
    print(json.dumps(report) if as_json else "\n".join(f"{name:>16} {value}" for name, value in report.items()))
    return 0 if report.get("met", True) else 1
