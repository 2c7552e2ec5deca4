"""The demo's parts: what it reads, shows and writes, and that its processes end with it."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from peerd.config import load_run
from peerd.core.errors import ConfigError
from peerd.demo import children as children_module
from peerd.demo import tether
from peerd.demo.chart import chart
from peerd.demo.children import Child, Children
from peerd.demo.scene import Scene
from peerd.demo.screen import LineScreen, picture
from peerd.demo.setting import DemoWish, prepare


def wish(folder: Path, **changes: Any) -> DemoWish:
    return DemoWish(**{"steps": None, "data": None, "calm": False, "as_json": False, "folder": folder, **changes})


class Told(Child):
    """A child that runs nowhere and tells what it is given."""

    def __init__(self, name: str, told: dict[str, Any], *, running: bool = True, bytes_out: int = 0) -> None:
        network = {"bytes_out": bytes_out, "bytes_in": 0}
        self.name, self.snapshot = name, {"roles": [told], "network": network}
        self._running = running

    @property
    def running(self) -> bool:
        return self._running


def stage(name: str, number: int | None, held: int, *, running: bool = True) -> Told:
    told = {"stage": number, "held_samples": held, "step": 3, "samples_per_s": 2.0}
    return Told(name, told, running=running, bytes_out=500)


def scene_of(*children: Told, step: int = 3) -> Scene:
    scene = Scene(total_steps=10, tokens_per_step=100)
    counts = {"counted": 12, "redone": 1, "lost": 0}
    told = {"step": step, "loss": 4.0, "evaluations": [{"step": 0, "loss": 5.5}], "microbatches": counts}
    scene.read({child.name: child for child in (*children, Told("trainer", told, bytes_out=1000))}, now_s=2.0)
    return scene


def test_the_peer_with_most_to_lose_is_killed_and_never_the_last_of_its_stage() -> None:
    peers = [stage("stage-1", 0, 9), stage("stage-2", 1, 2), stage("stage-3", 1, 5), stage("stage-4", None, 99)]
    victim = scene_of(*peers).victim()
    assert victim is not None
    assert victim.name == "stage-3"
    assert scene_of(stage("stage-1", 0, 9), stage("stage-2", 0, 1, running=False)).victim() is None


def test_the_figures_follow_from_what_the_processes_told() -> None:
    scene = scene_of(stage("stage-1", 0, 1), stage("stage-2", 1, 1))
    assert (scene.step, scene.losses, scene.valid_losses) == (3, {3: 4.0}, {0: 5.5})
    assert (scene.microbatches, scene.redone, scene.lost) == (12, 1, 0)
    assert scene.bytes_per_token() == 2000 / 300
    trainer = Told("trainer", {"step": 5, "loss": "nan", "valid_loss": None})
    scene.read({"trainer": trainer}, now_s=4.0)
    end = {"name": "trainer.finished", "step": 6, "loss": 3.75, "counted": 48, "redone": 2, "requeued": 3, "lost": 0}
    scene.read_log([{"name": "trainer.evaluated", "step": 5, "loss": 3.5}, end, {"name": "daemon.stopped"}])
    assert scene.valid_losses == {0: 5.5, 5: 3.5}
    assert (scene.step, scene.losses[6], scene.microbatches, scene.redone, scene.requeued) == (6, 3.75, 48, 2, 3)
    assert (scene.losses[3], 5 in scene.losses) == (4.0, False)
    assert scene.tokens_per_s() == 2 * 100 / 2.0


def test_a_trainer_that_has_not_answered_yet_changes_nothing() -> None:
    scene = Scene(total_steps=10, tokens_per_step=100)
    scene.read({"trainer": Told("trainer", {}), "stage-1": Told("stage-1", {})}, now_s=1.0)
    assert scene.step == 0
    assert scene.tokens_per_s() == 0.0
    assert math.isnan(scene.bytes_per_token())


def test_the_chart_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = chart([(0, 5.0), (10, 1.0)], width=27, height=5, x_end=10)
    assert [len(line) for line in lines] == [27] * 5
    assert lines[0].startswith(" 5.00 ┤")
    assert lines[-1].startswith(" 1.00 ┤")
    assert lines[0][7] != "\u2800"
    assert lines[-1][-1] != "\u2800"
    assert lines[0][-1] == lines[-1][7] == "\u2800"


@pytest.mark.parametrize("points", [[], [(0, math.nan)], [(0, 2.0)], [(0, 2.0), (1, 2.0)], [(99, 1.0), (0, 3.0)]])
def test_the_chart_stands_with_any_points(points: list[tuple[float, float]]) -> None:
    assert [len(line) for line in chart(points, width=40, height=4, x_end=10)] == [40] * 4


def test_the_picture_shows_stages_losses_and_events() -> None:
    scene = scene_of(stage("stage-1", 0, 1), stage("stage-2", 1, 1, running=False))
    scene.killed.append("stage-2")
    scene.say(1.0, "killed stage-2 [of] stage 1")
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(scene, 9.0, 100))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("step 3 of 10", "loss 4.000", "validation 5.500", "killed stage-2 [of] stage 1", "again 1, lost 0"):
        assert part in shown


def test_without_a_terminal_events_come_once_and_progress_now_and_then() -> None:
    stream = io.StringIO()
    screen = LineScreen(stream)
    scene = scene_of(stage("stage-1", 0, 1))
    scene.say(0.5, "started")
    for at in (1.0, 1.5, 2.0, 9.0):
        scene.step += 1
        screen.update(scene, at)
    lines = stream.getvalue().splitlines()
    assert [line.split(" s  ")[1].split(",")[0] for line in lines] == ["started", "step 4 of 10", "step 7 of 10"]


def test_the_run_file_of_a_demo_can_be_read_and_used_again(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    folder, run = prepare(wish(tmp_path / "d", steps=7, data=str(tmp_path / "text")))
    assert load_run(folder / "run.yaml").run == run
    assert run.optimizer.total_steps == 7
    assert (run.data.kind, run.data.path) == ("text", str(tmp_path / "text"))
    assert prepare(wish(tmp_path / "e"))[1].data.path == "stdlib"


def test_a_demo_refuses_data_that_is_not_there_and_a_used_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data nowhere: there is no such file or folder"):
        prepare(wish(tmp_path / "d", data="nowhere"))
    (tmp_path / "d" / "stage-1").mkdir(parents=True)
    (tmp_path / "d" / "stage-1" / "identity.key").write_text("")
    with pytest.raises(ConfigError, match="holds an earlier demo"):
        prepare(wish(tmp_path / "d"))


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Children that run this module's `sleep` in place of peerd, tied to their parent as peerd is."""
    code = "from peerd.demo import tether; tether.tie(); import time, sys; print('up', flush=True); time.sleep(600)"
    arguments = [sys.executable, "-c", code]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(arguments, **options))
    return arguments


def wait_for(done: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.mark.slow
def test_leaving_the_block_stops_every_process_and_its_group(tmp_path: Path, sleeper: list[str]) -> None:
    with Children(tmp_path) as children:
        started = [children.start(name, []) for name in ("backbone", "stage-1")]
        wait_for(lambda: all(child.tail() for child in started))
        children.kill(started[1])
        assert children.failed() is None
    assert [child.running for child in started] == [False, False]
    assert all(child.process.returncode < 0 for child in started)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_a_short_program_of_a_killed_process_is_waited_for_and_a_long_one_is_named() -> None:
    script = "exec 3<&0; cat <&3 & echo $!; wait"  # it ends with our end of its input
    reader, writer = os.pipe()
    with subprocess.Popen(["sh", "-c", script], stdin=reader, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        os.close(reader)
        process.kill()
        process.wait()
        os.kill(program, 0)
        assert not tether.group_is_gone(process.pid)
        assert not tether.group_is_gone(process.pid, 0.1)
        os.close(writer)
        assert tether.group_is_gone(process.pid, 60.0)


@pytest.mark.slow
def test_a_process_that_does_not_obey_is_killed(
    tmp_path: Path, sleeper: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper[2] = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + sleeper[2]
    monkeypatch.setattr(children_module, "STOP_S", 0.3)
    with Children(tmp_path) as children:
        child = children.start("stage-1", [])
        wait_for(child.tail)
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The parent is a process of its own here; its child is found by the number that it prints."""
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom peerd.demo import tether\n"
        "real = subprocess.Popen\n"
        "body = 'from peerd.demo import tether; tether.tie(); import time; time.sleep(600)'\n"
        "subprocess.Popen = lambda command, **options: real([sys.executable, '-c', body], **options)\n"
        f"child = tether.start([], Path({str(tmp_path / 'log')!r}), {{}})\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{child}").exists() if Path("/proc").exists() else _gone(child))


def _gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False
