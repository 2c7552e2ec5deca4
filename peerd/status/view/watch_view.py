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

from peerd.screen import units
from peerd.screen.chart import Curve, Point
from peerd.screen.columns import styled
from peerd.screen.frame import FramePicture, Parts, bar
from peerd.screen.full_screen import FullScreen
from peerd.status.snapshot import StatusSnapshot, TrafficStatus, decode_status
from peerd.status.swarm_status import CurveStatus, SwarmStatus
from peerd.status.view import swarm_words
from peerd.status.view.curve_file import CurveFile
from peerd.status.view.role_words import parts_of

PERIOD_S: Final = 1.0
BAR: Final = 16  # columns
_BOARD_LINES: Final = 10  # of the leaderboard
TRAIN, VALID = "cyan", "yellow"

Ask = Callable[[], dict[str, Any]]


def watch(ask: Ask, *, as_json: bool, draw: Callable[[dict[str, Any]], FramePicture]) -> None:
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


def _again_and_again(ask: Ask) -> Iterator[dict[str, Any]]:
    while True:
        yield ask()
        time.sleep(PERIOD_S)  # no event loop runs in this process, and Ctrl+C interrupts the sleep


class Watcher:
    """Draws snapshots of one daemon. Follows the growing learning curve file of a backbone."""

    def __init__(self) -> None:
        self._file: CurveFile | None = None

    def draw(self, told: dict[str, Any]) -> FramePicture:
        """Picture of the daemon and its run. `told` is a snapshot as received."""
        snapshot = decode_status(told, StatusSnapshot)
        swarm = snapshot.swarm
        if swarm.run is None:
            swarm = SwarmStatus(run=snapshot.run)
        names = swarm.names()
        events = [swarm_words.event_line(event, names) for event in snapshot.events]
        facts = [_roles(snapshot, names), _traffic(snapshot.network)]
        return _picture(swarm, facts, events, self._curves(snapshot, swarm.curve))

    def draw_swarm(self, told: dict[str, Any]) -> FramePicture:
        """Picture of the swarm only, with the leaderboard in place of the daemon's events."""
        swarm = decode_status(told, SwarmStatus)
        rows, counted = swarm.contributions[:_BOARD_LINES], swarm.counted is not None
        board = [swarm_words.board_line(row, place, counted=counted) for place, row in enumerate(rows, 1)]
        facts = [[Text(swarm_words.board_by(swarm), "dim")]] if board else []
        return _picture(swarm, facts, board[::-1], swarm.curve)

    def _curves(self, snapshot: StatusSnapshot, seen: CurveStatus) -> CurveStatus:
        """Training and validation points: those of the backbone's file, if any, then newer ones of the snapshot."""
        path = next((role["curve"] for role in snapshot.roles if isinstance(role.get("curve"), str)), None)
        if path is None:
            return seen
        if self._file is None or self._file.path != Path(path):
            self._file = CurveFile(Path(path))
        self._file.read()
        train, valid = self._file.train.points(), self._file.valid.points()
        return CurveStatus(train=_longer(train, seen.train), valid=_longer(valid, seen.valid))


def _picture(swarm: SwarmStatus, facts: Sequence[Parts], events: Sequence[Text], seen: CurveStatus) -> FramePicture:
    steps = [x for x, _ in (*seen.train, *seen.valid)]
    return FramePicture(
        head=_head(swarm),
        title=Text.assemble(("loss, nats per token: ", "bold"), ("training", TRAIN), "  ", ("validation", VALID)),
        curves=[Curve(seen.train, TRAIN), Curve(seen.valid, VALID)],
        x_range=(min(steps, default=0), max(max(steps, default=0), min(steps, default=0) + 10)),
        table=swarm_words.peers(swarm),
        facts=facts,
        events=events,
        foot=Text("Ctrl+C ends this view; the daemon keeps running", "dim"),
        empty="no loss is known yet",
    )


def _longer(written: Sequence[Point], seen: Sequence[Point]) -> list[Point]:
    last = written[-1][0] if written else -1.0
    return [*written, *(point for point in seen if point[0] > last)]


def _head(swarm: SwarmStatus) -> list[Parts]:
    run = Text(f"run {swarm.run or '-'}", "bold")
    if swarm.unread:
        return [[run], swarm_words.reasons(swarm)[:1]]
    first = [run, Text(swarm_words.position(swarm), "bold")]
    if swarm.total_steps and swarm.step is not None:
        done = swarm.step / swarm.total_steps
        first.append(bar(done, BAR) + Text(f" {units.share(min(done, 1.0))}"))
    first += [Text(told) for told in (swarm_words.left(swarm), swarm_words.seen(swarm)) if told]
    why = swarm_words.halt(swarm)
    figures = [Text(told) for told in swarm_words.figures(swarm)]
    return [first, *([[why]] if why is not None else []), figures, *([told] for told in swarm_words.reasons(swarm))]


def _roles(snapshot: StatusSnapshot, names: dict[str, str]) -> Parts:
    """Texts on this peer, the state of its roles, and its uptime."""
    peer = snapshot.peer.id
    parts = [Text(f"this peer {names.get(peer) or units.short(peer)}", "bold")]
    for part in parts_of(snapshot.roles):
        told = part.role
        if part.stage is not None:
            told += f" {part.stage}" if told == "stage" else f" of stage {part.stage}"
        told += f" {part.state}" + (f" ({part.failure})" if part.failure else "")
        parts.append(Text(told, "red" if part.failure else ""))
    return [*parts, Text(f"up {units.duration(snapshot.uptime_s)}")]


def _traffic(net: TrafficStatus) -> Parts:
    told = (
        f"{units.counted(len(net.peers), 'peer')} connected",
        f"in {units.size(net.bytes_in)} ({units.size(net.in_per_s)}/s)",
        f"out {units.size(net.bytes_out)} ({units.size(net.out_per_s)}/s)",
    )
    return styled(told, "dim")
