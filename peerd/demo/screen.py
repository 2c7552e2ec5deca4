"""The demo for people: a live picture in a terminal, or a line now and then where there is no terminal."""

from __future__ import annotations

import sys
from typing import Final, Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peerd.commands.status_view import size
from peerd.demo.chart import chart
from peerd.demo.scene import Scene

LINE_PERIOD_S: Final = 5.0
EVENTS_SHOWN: Final = 8


class Screen(Protocol):
    def update(self, scene: Scene, now_s: float) -> None: ...

    def close(self) -> None: ...


def open_screen(*, as_json: bool) -> Screen:
    """Live where someone looks on; lines otherwise, on stderr when stdout is for a program."""
    if as_json:
        return LineScreen(sys.stderr)
    console = Console()
    return LiveScreen(console) if console.is_terminal else LineScreen(sys.stdout)


class LineScreen:
    """Every event as it comes, and how training goes at most every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told_events = 0
        self._told: tuple[float, int] = (-LINE_PERIOD_S, -1)

    def update(self, scene: Scene, now_s: float) -> None:
        for at, text in scene.events[self._told_events :]:
            self._write(f"{at:6.1f} s  {text}")
        self._told_events = len(scene.events)
        if scene.losses and scene.step != self._told[1] and now_s - self._told[0] >= LINE_PERIOD_S:
            self._told = (now_s, scene.step)
            self._write(f"{now_s:6.1f} s  {headline(scene)}")

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class LiveScreen:
    """Loss curve, speed, peers per stage, traffic and events, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(Text("starting"), console=console, auto_refresh=False)
        self._live.start()

    def update(self, scene: Scene, now_s: float) -> None:
        self._live.update(picture(scene, now_s, self._console.width), refresh=True)

    def close(self) -> None:
        self._live.stop()


def headline(scene: Scene) -> str:
    """One line: where training is and how fast it goes."""
    facts = [f"step {scene.step} of {scene.total_steps}"]
    if scene.losses:
        facts.append(f"loss {scene.losses[max(scene.losses)]:.3f}")
    if scene.valid_losses:
        facts.append(f"validation {scene.valid_losses[max(scene.valid_losses)]:.3f}")
    facts.append(f"{scene.tokens_per_s(10):,.0f} tokens/s")
    if scene.waits_for and scene.step < scene.total_steps:
        facts.append(f"waits for {scene.waits_for}")
    return ", ".join(facts)


def picture(scene: Scene, now_s: float, width: int) -> RenderableType:
    """Everything at once."""
    curve = chart(sorted(scene.losses.items()), width=max(40, width - 4), height=10, x_end=scene.total_steps)
    body = Text("\n".join(curve), no_wrap=True)
    sent = f"{size(scene.bytes_out)} sent"
    if scene.step:
        sent += f", {scene.bytes_per_token():,.0f} bytes per token"
    again = scene.redone + scene.requeued
    done = Text(f"microbatches {scene.microbatches}, done again {again}, lost {scene.lost}; {sent}", "dim")
    return Group(
        Panel(body, title="training loss, nats per byte", subtitle=headline(scene), title_align="left"),
        Columns([_stages(scene), _events(scene)], padding=(0, 4)),
        done,
        Text(f"{now_s:.0f} s; Ctrl+C stops everything", "dim"),
    )


def _stages(scene: Scene) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("peer", "stage", "step", "samples/s", ""):
        table.add_column(name, justify="left" if name in ("peer", "") else "right")
    for peer in scene.stage_peers:
        note = "killed" if peer.name in scene.killed else "gone" if not peer.running else peer.waits_for[:40]
        stage = "-" if peer.stage is None else str(peer.stage)
        style = "red" if peer.name in scene.killed else "" if peer.running else "dim"
        table.add_row(peer.name, stage, str(peer.step), f"{peer.samples_per_s:.1f}", Text(note), style=style)
    return table


def _events(scene: Scene) -> Text:
    return Text("\n".join(f"{at:5.0f} s  {text}" for at, text in scene.events[-EVENTS_SHOWN:]))
