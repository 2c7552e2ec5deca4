"""Final report of the demo, as text or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from peerd.demo.scene import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The demo's figures. Losses are validation losses in nats per token."""

    loss_start: float | None
    loss_end: float | None
    loss_at_kill: float | None  # training loss of the last step before the kill
    loss_after_kill: float | None  # training loss of the last step
    steps: int
    seconds: float
    tokens_per_s: float
    wire_bytes_per_token: float | None
    killed: int
    started_later: int
    microbatches: int
    microbatches_redone: int  # repeated only on the stage whose peer was lost
    microbatches_requeued: int  # restarted at the first stage
    microbatches_lost: int
    checkpoint: str
    data_dir: str
    sample: str
    processes_left: int
    commands: list[str]  # command lines to type next

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    def text(self) -> str:
        lines = [
            f"validation loss   {loss_text(self.loss_start)} at the start, {loss_text(self.loss_end)} at the end",
            f"steps             {self.steps} in {self.seconds:.0f} s, {self.tokens_per_s:,.0f} tokens/s",
            f"on the wire       {self.wire_bytes_per_token or 0:,.0f} bytes per token, all processes together",
            f"peers             {self.killed} killed, {self.started_later} started later",
            f"microbatches      {self.microbatches} counted, {self.microbatches_redone} repeated on one stage, "
            f"{self.microbatches_requeued} restarted, {self.microbatches_lost} lost",
            f"checkpoint        {self.checkpoint}",
            "what the model writes:",
            *(f"  {line}" for line in self.sample.splitlines()),
            "to export the model, generate text and evaluate it:",
            *(f"  {line}" for line in self.commands),
        ]
        return "\n".join(lines)


def loss_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def losses_around(scene: Scene, kill_step: int | None) -> tuple[float | None, float | None]:
    """Training losses of the last step before the kill, and of the last step. None if unknown."""
    if kill_step is None or not scene.losses:
        return None, None
    before = [step for step in scene.losses if step <= kill_step]
    return (scene.losses[max(before)] if before else None), scene.losses[max(scene.losses)]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def newest(folder: Path, pattern: str) -> Path | None:
    """The most recently changed file or folder below `folder` that matches `pattern`, or None."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)
