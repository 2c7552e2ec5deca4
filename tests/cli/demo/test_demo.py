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
from rich.cells import cell_len

from peerd.cli.demo import children as children_module
from peerd.cli.demo import tether
from peerd.cli.demo.children import Child, Children
from peerd.cli.demo.expert_scene import ExpertScene, handed_on
from peerd.cli.demo.scene import ProcessRow, Scene
from peerd.cli.demo.screen import LineScreen, picture
from peerd.cli.demo.setting import DemoConfig, prepare
from peerd.core.errors import ConfigError
from peerd.run.config import load_run
from peerd.screen.frame import compose
from peerd.status.role_status import RoleFigures
from peerd.status.snapshot import StatusSnapshot, TrafficStatus


def wish(folder: Path, **changes: Any) -> DemoConfig:
    return DemoConfig(**{"steps": None, "data": None, "calm": False, "as_json": False, "folder": folder, **changes})


class Told(Child):
    """A child that runs nowhere and tells what it is given."""

    def __init__(self, name: str, told: dict[str, Any], *, running: bool = True, bytes_out: int = 0) -> None:
        self.name, self.snapshot = name, StatusSnapshot(roles=[told], network=TrafficStatus(bytes_out=bytes_out))
        self._running = running

    @property
    def running(self) -> bool:
        return self._running


def stage(name: str, number: int, held: int, *, running: bool = True) -> Told:
    told = {"stage": number, "held_samples": held, "step": 3, "samples_per_s": 2.0}
    return Told(name, told, running=running, bytes_out=500)


def scene_of(*children: Told, step: int = 3) -> Scene:
    scene = Scene(total_steps=10, tokens_per_step=100)
    counts = {"counted": 12, "redone": 1, "lost": 0}
    told = {"step": step, "loss": 4.0, "evaluations": [{"step": 0, "loss": 5.5}], "microbatches": counts}
    scene.read({child.name: child for child in (*children, Told("trainer", told, bytes_out=1000))}, now_s=2.0)
    return scene


def test_the_peer_with_most_to_lose_is_killed_and_never_the_last_of_its_stage() -> None:
    peers = [stage("stage-1", 0, 9), stage("stage-2", 1, 2), stage("stage-3", 1, 5), stage("stage-4", -1, 99)]
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


def test_calls_that_experts_answered_show_that_a_slow_demo_is_not_stuck() -> None:
    scene = Scene(total_steps=10, tokens_per_step=100)
    seen = []
    for told in (
        {},
        {"step": 0, "experts": {"updates": 0, "calls": {"forwards": 3, "backwards": 1}}},
        {"microbatches": {"counted": 8}},
    ):
        scene.read({"trainer": Told("trainer", told)}, now_s=2.0)
        seen.append(scene.work)
    assert seen == [(0, 0), (0, 4), (8, 4)]


def test_a_trainer_that_has_not_answered_yet_changes_nothing() -> None:
    scene = Scene(total_steps=10, tokens_per_step=100)
    scene.read({"trainer": Told("trainer", {}), "stage-1": Told("stage-1", {})}, now_s=1.0)
    assert scene.step == 0
    assert scene.tokens_per_s() == 0.0
    assert math.isnan(scene.bytes_per_token())


def drawn(scene: Scene, width: int, height: int) -> list[str]:
    lines = [line.plain for line in compose(picture(scene, 150.0), width, height)]
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    return lines


def busy_scene() -> Scene:
    """A demo after the kill and the newcomer, with more events than a small screen holds."""
    peers = [stage(f"stage-{number}", number % 2, 1, running=number != 2) for number in range(1, 6)]
    scene = scene_of(*peers)
    scene.losses |= {step: 5.0 - step / 4 for step in range(10)}
    for number in range(20):
        scene.say(
            float(number), f"event {number} [of] many, with words that go on for longer than eighty columns are wide"
        )
    scene.killed.append("stage-2")
    scene.say(40.0, "killed stage-2 of stage 0 at step 3; it held 16 samples' gradients")
    scene.say(60.0, "started stage-5 at step 5")
    return scene


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (70, 20)])
def test_the_demo_fits_the_screen_and_shows_the_kill_the_counters_and_the_way_out(width: int, height: int) -> None:
    lines = drawn(busy_scene(), width, height)
    shown = "\n".join(lines)
    for part in (
        *("step 3 of 10", "loss 2.750", "validation 5.500", "killed stage-2 of stage 0 at step 3", "started stage-5"),
        *("done again 1, lost 0", "bytes per token", "Ctrl+C stops everything"),
    ):
        assert part in shown
    assert "stage-2" in shown
    assert sum(any("\u2801" <= c <= "\u28ff" for c in line) for line in lines) >= 4
    assert shown.index("killed stage-2") < shown.index("started stage-5")
    assert "event 0 " not in "\n".join(drawn(busy_scene(), 80, 24))


def test_a_host_that_was_killed_has_no_rate_any_more() -> None:
    rows = [
        ProcessRow(f"host-{n}", n != 2, RoleFigures(hosted=10, updates=700 + n, updates_per_s=14.8)) for n in (1, 2)
    ]
    scene = ExpertScene(total_steps=10, tokens_per_step=100, hosts=rows, killed=["host-2"])
    alive, dead = (next(line for line in drawn(scene, 80, 24) if f"host-{n}" in line) for n in (1, 2))
    assert "14.8/s" in alive
    assert dead.split()[1:] == ["10", "702", "-", "killed"]


def test_what_a_host_gave_away_before_it_was_killed_is_not_orphaned() -> None:
    names = {
        "0.0.1": ["expert.given"],
        "0.0.2": ["expert.yielded", "expert.taken"],
        "0.0.3": ["expert.taken", "expert.left_to"],
        "0.0.4": ["expert.taken"],
        "0.0.5": ["expert.kept_here"],
    }
    events = [{"name": name, "expert": uid} for uid, told in names.items() for name in told]
    assert handed_on([{"name": "stage.entered"}, *events]) == {"0.0.1", "0.0.3"}


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
    with pytest.raises(ConfigError, match="has an earlier demo"):
        prepare(wish(tmp_path / "d"))


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Children that run this module's `sleep` in place of peerd, tied to their parent as peerd is."""
    code = "from peerd.cli.demo import tether; tether.tie(); import time, sys; print('up', flush=True); time.sleep(600)"
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
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom peerd.cli.demo import tether\n"
        "real = subprocess.Popen\n"
        "body = 'from peerd.cli.demo import tether; tether.tie(); import time; time.sleep(600)'\n"
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
