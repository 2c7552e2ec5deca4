"""`peerd status --watch`: shows the run on the full screen, redrawn once a second at the terminal's current size.

The loss curve starts when the daemon started. A backbone that keeps the run's learning curve shows the whole curve.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from peerd.commands.status import swarm_words
from peerd.commands.status.curve_file import CurveFile
from peerd.commands.status.role_words import parts_of
from peerd.screen import units
from peerd.screen.chart import Curve, Point
from peerd.screen.frame import Columns, FramePicture, Parts, bar
from peerd.screen.full_screen import FullScreen

PERIOD_S: Final = 1.0
BAR: Final = 16  # columns
_BOARD_LINES: Final = 10  # of the leader-board
TRAIN, VALID = "cyan", "yellow"

Snapshot = dict[str, Any]
Draw = Callable[[Snapshot], FramePicture]


def watch(ask: Callable[[], Snapshot], *, as_json: bool, draw: Draw) -> None:
    """Show the status until interrupted. With `as_json`, print one JSON object per line instead."""
    if as_json:
        for snapshot in _again_and_again(ask):
            sys.stdout.write(json.dumps(snapshot, ensure_ascii=False) + "\n")
            sys.stdout.flush()
    first = ask()  # before the full screen, so that an error message remains readable
    with FullScreen(console_of_now()) as screen:
        screen.show(draw(first))
        while True:
            screen.pause(PERIOD_S)
            screen.show(draw(ask()))


def console_of_now() -> Console:
    """A console that follows the terminal's size and ignores COLUMNS and LINES of the environment."""
    return Console(_environ={key: text for key, text in os.environ.items() if key not in ("COLUMNS", "LINES")})


def _again_and_again(ask: Callable[[], Snapshot]) -> Iterator[Snapshot]:
    while True:
        yield ask()
        time.sleep(PERIOD_S)  # no event loop runs in this process, and Ctrl+C interrupts the sleep


class Watcher:
    """Draws snapshots of one daemon. Follows the growing learning curve file of a backbone."""

    def __init__(self) -> None:
        self._file: CurveFile | None = None

    def draw(self, snapshot: Snapshot) -> FramePicture:
        """Picture of the daemon and its run."""
        swarm = snapshot.get("swarm") or {"run": snapshot.get("run")}
        names = swarm_words.names_of(swarm)
        events = [swarm_words.event_line(event, names) for event in snapshot.get("events") or []]
        facts = [_roles(snapshot, names), _traffic(snapshot)]
        return self._picture(swarm, [parts for parts in facts if parts], events, self._curves(snapshot, swarm))

    def draw_swarm(self, swarm: Snapshot) -> FramePicture:
        """Picture of the swarm only, with the leader-board in place of the daemon's events."""
        rows, counted = (swarm.get("contributions") or [])[:_BOARD_LINES], bool(swarm.get("counted"))
        board = [swarm_words.board_line(row, place, counted=counted) for place, row in enumerate(rows, 1)]
        facts = [[Text(swarm_words.board_by(swarm), "dim")]] if board else []
        return self._picture(swarm, facts, board[::-1], self._told(swarm))

    def _picture(
        self, swarm: Snapshot, facts: Sequence[Parts], events: Sequence[Text], curves: tuple[list[Point], list[Point]]
    ) -> FramePicture:
        names = swarm_words.names_of(swarm)
        train, valid = curves
        steps = [x for x, _ in (*train, *valid)]
        title = Text.assemble(("loss, nats per token: ", "bold"), ("training", TRAIN), "  ", ("validation", VALID))
        return FramePicture(
            head=_head(swarm, names),
            title=title,
            curves=[Curve(train, TRAIN), Curve(valid, VALID)],
            x_range=(min(steps, default=0), max(max(steps, default=0), min(steps, default=0) + 10)),
            table=Columns(
                swarm_words.PEER_HEADS,
                swarm_words.peer_rows(swarm, names),
                swarm_words.PEER_FIGURES,
                swarm_words.stage_rows(swarm),
            ),
            facts=facts,
            events=events,
            foot=Text("Ctrl+C ends this view; the daemon keeps running", "dim"),
            empty="no loss is known yet",
        )

    def _told(self, swarm: Snapshot) -> tuple[list[Point], list[Point]]:
        told = swarm.get("curve") or {}
        return _points(told.get("train")), _points(told.get("valid"))

    def _curves(self, snapshot: Snapshot, swarm: Snapshot) -> tuple[list[Point], list[Point]]:
        """Training and validation points: those of the backbone's file, if any, then newer ones of the snapshot."""
        train, valid = self._told(swarm)
        path = next((role["curve"] for role in snapshot.get("roles") or [] if isinstance(role.get("curve"), str)), None)
        if path is None:
            return train, valid
        if self._file is None or self._file.path != Path(path):
            self._file = CurveFile(Path(path))
        self._file.read()
        return _longer(self._file.train, train), _longer(self._file.valid, valid)


def _points(told: object) -> list[Point]:
    return [(float(x), float(y)) for x, y in told] if isinstance(told, list) else []


def _longer(written: Sequence[Point], seen: list[Point]) -> list[Point]:
    last = written[-1][0] if written else -1.0
    return [*written, *(point for point in seen if point[0] > last)]


def _head(swarm: Snapshot, names: dict[str, str]) -> list[Parts]:
    run = Text(f"run {swarm.get('run') or '-'}", "bold")
    if swarm.get("why") and "stages" not in swarm:
        return [[run], [Text(str(swarm["why"]), "yellow")]]
    first = [run, Text(swarm_words.position(swarm), "bold")]
    if swarm.get("total_steps") and swarm.get("step") is not None:
        done = swarm["step"] / swarm["total_steps"]
        first.append(bar(done, BAR) + Text(f" {units.share(min(done, 1.0))}"))
    first += [Text(told) for told in (swarm_words.left(swarm), swarm_words.seen(swarm)) if told]
    head: list[Parts] = [first]
    if (why := swarm_words.halt(swarm, names)) is not None:
        head.append([why])
    head.append([Text(told) for told in swarm_words.figures(swarm)])
    if swarm.get("why"):
        head.append([Text(str(swarm["why"]), "yellow")])
    if swarm.get("own_wait") and not swarm.get("standstill"):
        head.append([Text(f"this peer waits: {units.named(str(swarm['own_wait']), names)}", "yellow")])
    return head


def _roles(snapshot: Snapshot, names: dict[str, str]) -> Parts:
    """Texts on this peer, the state of its roles, and its uptime."""
    peer = str((snapshot.get("peer") or {}).get("id", "?"))
    parts = [Text(f"this peer {names.get(peer) or units.short(peer)}", "bold")]
    for role in (part for each in snapshot.get("roles") or [] for part in parts_of(each)):
        stage, failure = role.get("stage"), role.get("failure")
        told = str(role.get("role", "?"))
        if isinstance(stage, int) and stage >= 0:
            told += f" {stage}" if told == "stage" else f" of stage {stage}"
        told += f" {role.get('state', '?')}" + (f" ({failure})" if failure else "")
        parts.append(Text(told, "red" if failure else ""))
    parts.append(Text(f"up {units.duration(snapshot.get('uptime_s', 0.0))}"))
    return parts


def _traffic(snapshot: Snapshot) -> Parts:
    net = snapshot.get("network") or {}
    told = [f"{units.counted(len(net.get('peers') or []), 'peer')} connected"]
    for name, way in (("in", "in"), ("out", "out")):
        told.append(f"{way} {units.size(net.get(f'bytes_{name}', 0))} ({units.size(net.get(f'{name}_per_s', 0))}/s)")
    return [Text(part, "dim") for part in told]
