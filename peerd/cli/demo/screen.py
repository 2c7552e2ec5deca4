"""Display of the demo: a live picture on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from peerd.cli.demo.expert_scene import ExpertScene
from peerd.cli.demo.scene import ProcessRow, Scene
from peerd.screen import units
from peerd.screen.chart import Curve
from peerd.screen.columns import Columns, Row, styled
from peerd.screen.frame import FramePicture, bar, compose
from peerd.screen.full_screen import FullScreen
from peerd.status.view.watch_view import TRAIN, VALID, console_of_now

LINE_PERIOD_S: Final = 5.0
LEFT_LINES: Final = 24  # lines of the last picture that remain on the normal screen
BAR: Final = 16  # columns


class Screen(Protocol):
    def update(self, scene: Scene, now_s: float) -> None: ...

    def close(self) -> None: ...


def open_screen(*, as_json: bool) -> Screen:
    """A live display if stdout is a terminal, else lines; with `as_json`, lines on stderr."""
    if as_json:
        return LineScreen(sys.stderr)
    console = console_of_now()
    return LiveScreen(console) if console.is_terminal else LineScreen(sys.stdout)


class LineScreen:
    """Prints each event, and the progress of training every few seconds, as lines."""

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
            self._write(f"{now_s:6.1f} s  {', '.join(headline(scene))}")

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class LiveScreen:
    """Shows loss curves, speed, peers, traffic and events on the full screen. Prints the last picture at the end."""

    def __init__(self, console: Console) -> None:
        self._screen = FullScreen(console)
        self._screen.__enter__()
        self._last: FramePicture | None = None

    def update(self, scene: Scene, now_s: float) -> None:
        self._last = picture(scene, now_s)
        self._screen.show(self._last)

    def close(self) -> None:
        self._screen.__exit__(None, None, None)
        if self._last is not None:
            console = self._screen.console
            for line in compose(self._last, console.width, min(console.height, LEFT_LINES))[:-1]:
                console.print(line, crop=True)


def headline(scene: Scene) -> list[str]:
    """Texts on the progress of training: step, losses, rate, and the reason to wait."""
    facts = [f"step {units.count(scene.step)} of {units.count(scene.total_steps)}"]
    if scene.losses:
        facts.append(f"loss {units.loss(scene.losses[max(scene.losses)])}")
    if scene.valid_losses:
        facts.append(f"validation {units.loss(scene.valid_losses[max(scene.valid_losses)])}")
    if (tokens_per_s := scene.tokens_per_s(10)) > 0:  # known from the second step on
        facts.append(units.rate(tokens_per_s, "tokens"))
    if scene.waits_for and scene.step < scene.total_steps:
        facts.append(f"waits: {scene.waits_for}")
    return facts


def picture(scene: Scene, now_s: float) -> FramePicture:
    """Picture of the whole demo."""
    again = scene.redone + scene.requeued
    done = [f"microbatches {units.count(scene.microbatches)}, done again {units.count(again)}, lost {scene.lost}"]
    done.append(f"{units.size(scene.bytes_out)} sent")
    if scene.step:
        done.append(f"{units.count(scene.bytes_per_token())} bytes per token")
    step, *figures = headline(scene)
    progress = bar(scene.step / max(scene.total_steps, 1), BAR)
    first = [Text("peerd demo", "bold"), Text(step, "bold"), progress, Text(f"after {units.duration(now_s)}")]
    return FramePicture(
        head=[first, [Text(told) for told in figures]],
        title=Text.assemble(("loss, nats per byte: ", "bold"), ("training", TRAIN), "  ", ("validation", VALID)),
        curves=[Curve(sorted(scene.losses.items()), TRAIN), Curve(sorted(scene.valid_losses.items()), VALID)],
        x_range=(0, scene.total_steps),
        table=_table(scene),
        facts=[[Text(told) for told in done]],
        events=[_event(at, text) for at, text in scene.events],
        foot=Text("Ctrl+C stops everything", "dim"),
    )


def _event(at: float, text: str) -> Text:
    return Text.assemble((f"{at:5.0f} s  ", "dim"), (text, "bold red" if text.startswith("killed ") else ""))


def _table(scene: Scene) -> Columns:
    if isinstance(scene, ExpertScene):
        heads = ("host", "experts", "updates", "a second", "waits")
        return Columns(heads, [_host_row(host, scene.killed) for host in scene.hosts], {1, 2, 3})
    heads = ("peer", "stage", "step", "can do", "waits")
    return Columns(heads, [_stage_row(peer, scene.killed) for peer in scene.stage_peers], {1, 2, 3})


def _host_row(host: ProcessRow, killed: Container[str]) -> Row:
    told = host.told
    taken = f"{units.counted(told.adopted, 'expert')} taken over" if told.adopted else ""
    return _row(host, killed, (units.count(told.hosted), units.count(told.updates)), told.updates_per_s, taken)


def _stage_row(peer: ProcessRow, killed: Container[str]) -> Row:
    stage = str(peer.told.stage) if peer.told.stage >= 0 else "-"
    return _row(peer, killed, (stage, units.count(peer.told.step)), peer.told.samples_per_s)


def _row(peer: ProcessRow, killed: Container[str], figures: Sequence[str], per_s: float, note: str = "") -> Row:
    """Row of a process. `note` stands before what a running process waits for."""
    waits = "; ".join(filter(None, (note, peer.told.waits_for))) or "-"
    rate = f"{units.number(round(per_s, 1))}/s" if per_s and peer.running else "-"
    state = "killed" if peer.name in killed else waits if peer.running else "gone"
    style = "red" if peer.name in killed else "" if peer.running else "dim"
    return styled((peer.name, *figures, rate, state), style)
