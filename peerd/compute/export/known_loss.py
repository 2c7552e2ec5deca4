"""Validation losses recorded beside a run's checkpoints: by a backbone in its learning curve, by a trainer in its
events.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from peerd.compute.export.gather import DEPTH
from peerd.core.decoders import from_json


class KnownLoss(NamedTuple):
    """Nats per token of the model after `step`."""

    step: int
    loss: float


def known_loss(root: Path, run: str, step: int, *, alone: bool) -> KnownLoss | None:
    """The last validation loss recorded below `root` up to `step`, or None if there is none.

    `alone`: `root` contains no other run, so the event files, which do not name their run, may be read as well.
    """
    found = [*_of_curves(root, run), *(_of_events(root) if alone else ())]
    return max((loss for loss in found if loss.step <= step), default=None)


def _of_curves(root: Path, run: str) -> Iterator[KnownLoss]:
    name = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}" for c in run)  # as the backbone writes it
    for line in _lines(root, f"{name}.jsonl", b'"valid_loss"'):
        yield from _read(line, "valid_step", "valid_loss")


def _of_events(root: Path) -> Iterator[KnownLoss]:
    for line in _lines(root, "events.jsonl", b'"trainer.evaluated"'):
        yield from _read(line, "step", "loss")


def _lines(root: Path, name: str, word: bytes) -> Iterator[dict[str, Any]]:
    """The readable JSON lines with `word`, from all files with this name."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        if len(Path(folder).parts) - len(root.parts) >= DEPTH - 1:
            folders.clear()
        if name not in names:
            continue
        try:
            with Path(folder, name).open("rb") as file:
                for line in file:
                    if word in line:
                        yield from_json(line, dict[str, Any])
        except (OSError, msgspec.DecodeError):
            continue  # the line is still being written


def _read(line: dict[str, Any], step_key: str, loss_key: str) -> Iterator[KnownLoss]:
    step, loss = line.get(step_key), line.get(loss_key)
    if isinstance(step, int) and isinstance(loss, float):
        yield KnownLoss(step, loss)
