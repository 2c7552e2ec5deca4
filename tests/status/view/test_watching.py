"""`status --watch` on a real terminal: whole at each size, and no torn frame after the size changes."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from peerd.run.home import socket_path
from peerd.screen.frame import compose
from peerd.status.view.curve_file import CurveFile
from peerd.status.view.watch_view import Watcher
from tests.status.view.test_view import snapshot
from tests.worlds.processes.terminal import Grid, terminal

WHY = "stage 1 has no peers"


def running(**changes: Any) -> dict[str, Any]:
    """A snapshot of a peer in a run that stands still, with a loss curve and many events."""
    told = snapshot()
    curve = {"train": [[step, 5.0 - step / 20] for step in range(60)], "valid": [[0, 5.5], [50, 3.0]]}
    told["swarm"] |= {"standstill": {"why": WHY, "for_s": 40.0}, "curve": curve, "total_steps": 10_000}
    told["swarm"] |= {"step": 1204, "age_s": 12.0, "shares": {"samples": 0.18}, "samples_per_s": 0.0}
    told["swarm"]["stages"][0]["peers"][0] |= {"name": "Ann", "gone": True}
    told["events"] = [
        {"time": float(n), "level": "info", "name": f"event.number{n}", "why": "x" * 90} for n in range(50)
    ]
    return told | changes


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_the_watch_is_whole_and_readable_at_each_size(width: int, height: int) -> None:
    lines = [line.plain for line in compose(Watcher().draw(running()), width, height)]
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    shown = "\n".join(lines)
    for part in (
        *(f"stands still for 40 s: {WHY}", "step 1,204 of 10,000", "seen 12 s ago", "loss 3.250", "mine 18 %", "Ann"),
        *("gone", "no peer", "event.number49", "0 samples/s", "in 1.5 kB", "stage 1 running", "Ctrl+C ends this view"),
    ):
        assert part in shown
    assert shown.index(WHY) < shown.index("loss 3.250")
    assert sum(any("\u2801" <= c <= "\u28ff" for c in line) for line in lines) >= 4


def test_of_a_backbone_the_whole_curve_is_drawn_as_its_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text(
        '{"step": 1, "loss": 5.0}\nnonsense\n{"step": 2, "loss": 4.0, "valid_loss": 4.5, "valid_step": 2}\n{"st'
    )
    file = CurveFile(path)
    file.read()
    assert (file.train.points(), file.valid.points()) == ([(1, 5.0), (2, 4.0)], [(2, 4.5)])
    with path.open("a") as more:
        more.write('ep": 3, "loss": 3.0}\n')
    told = running(roles=[{"role": "backbone", "state": "running", "curve": str(path)}])
    train, _ = Watcher().draw(told).curves
    assert list(train.points[:3]) == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert train.points[-1][0] == 59


@contextmanager
def answering(data_dir: Path, told: dict[str, Any]) -> Iterator[None]:
    """Answers on a daemon's control socket."""
    path = socket_path(data_dir)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.bind(os.fspath(path))
        opened.listen(8)

        def serve() -> None:
            while True:
                try:
                    caller, _ = opened.accept()
                except OSError:
                    return
                with caller:
                    caller.sendall(json.dumps(told).encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            opened.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="unix sockets and terminals")
def test_the_watch_follows_the_terminals_size_without_a_torn_frame(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "peerd", "status", "--watch", "--data-dir", str(tmp_path)]

    def whole(grid: Grid) -> bool:
        """The last line is the picture's last, and each of the important ones is there once."""
        text = grid.text()
        once = all(text.count(part) == 1 for part in ("Ctrl+C ends this view", WHY, "run tiny", "event.number49"))
        return once and grid.rows()[-1].startswith("Ctrl+C ends this view") and grid.rows()[0].startswith("run tiny")

    with answering(tmp_path, running()), terminal(command, 80, 24, {"PYTHONPATH": os.getcwd()}) as shown:
        shown.until(whole)
        for columns, lines in ((120, 40), (60, 20), (200, 60), (80, 24)):
            shown.resize(columns, lines)
            shown.until(whole, 10.0)
            assert max(len(row) for row in shown.grid.rows()) <= columns
        assert shown.grid.alternate
        assert shown.interrupt() == 0
        assert not shown.grid.alternate
