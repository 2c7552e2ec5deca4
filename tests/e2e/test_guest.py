"""A guest's limits on a real process: what the system says that it takes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.waiting import eventually
from tests.worlds.processes.processes import LISTEN, Process, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]
HEAVY = """\
run: heavy
model: {d_model: 256, heads: 8, layers: 4, context: 128}
pipeline: {microbatch: 8}
batch: {target_samples: 32}
evaluate: {every_steps: 0}
"""


def processor_share(process: Process, seconds: float) -> float:
    """Processors that the process keeps busy, all its threads together."""
    counted = psutil.Process(process.popen.pid)

    def used_s() -> float:
        times = counted.cpu_times()
        return times.user + times.system

    before_s, began = used_s(), time.monotonic()
    time.sleep(seconds)  # what is measured is a stretch of the machine's own time
    return (used_s() - before_s) / (time.monotonic() - began)


@pytest.mark.alone
@pytest.mark.thorough
def test_a_replica_with_one_thread_keeps_one_processor_busy_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "heavy.yaml"
    file.write_text(HEAVY)
    options = ["--model", str(file), "--listen", LISTEN, "--threads", "1"]
    with processes(tmp_path) as started:
        replica = started.start("replica", "join", "--role", "trainer", *options)
        replica.reaches(1)
        assert processor_share(replica, 12.0) < 1.05
        assert replica.status()["limits"]["text"].startswith("1 thread")
        if sys.platform != "win32":
            assert psutil.Process(replica.popen.pid).nice() == max(10, os.getpriority(os.PRIO_PROCESS, 0))
        assert replica.end()[0] == 0


HELD = """\
run: held
model: {d_model: 384, heads: 8, layers: 6, context: 128}
pipeline: {microbatch: 8}
batch: {target_samples: 16}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 2}
"""


def most_held(process: Process, until_step: int) -> float:
    """GB that the process held at most, until it has made that step or has ended."""
    counted, most = psutil.Process(process.popen.pid), 0

    def looked() -> bool:
        nonlocal most
        with contextlib.suppress(psutil.NoSuchProcess):
            most = max(most, counted.memory_info().rss)
        return process.popen.poll() is not None

    while not eventually(looked, 1.0):
        if process.step() >= until_step:
            break
    return most / 1e9


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="where the system says what a process holds")
@pytest.mark.thorough
def test_a_replica_keeps_to_its_memory(tmp_path: Path) -> None:
    (tmp_path / "held.yaml").write_text(HELD)
    options = ["--model", str(tmp_path / "held.yaml"), "--listen", LISTEN, "--alone", "--memory-gb", "0.85"]
    with processes(tmp_path) as started:
        replica = started.start("replica", "join", "--role", "trainer", *options)
        most_gb = most_held(replica, until_step=7)
        print(f"{most_gb:.3f} GB of 0.85")
        assert replica.popen.poll() is None, replica.said
        assert most_gb < 1.05 * 0.85
        assert replica.end()[0] == 0


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="where the system says what a process holds")
@pytest.mark.thorough
def test_a_replica_whose_samples_need_more_memory_than_it_may_take_ends_with_one_sentence(tmp_path: Path) -> None:
    wide = HELD.replace("d_model: 384", "d_model: 128").replace("microbatch: 8", "microbatch: 256")
    (tmp_path / "wide.yaml").write_text(wide.replace("target_samples: 16", "target_samples: 256"))
    options = ["--model", str(tmp_path / "wide.yaml"), "--listen", LISTEN, "--alone", "--memory-gb", "0.5"]
    with processes(tmp_path) as started:
        replica = started.start("replica", "join", "--role", "trainer", *options)
        assert replica.popen.wait(200) == 2
        last = replica.said.splitlines()[-1]
        assert last.startswith("peerd: stage 0 (1,271,424 parameters) takes ")
        assert "that this process holds, and limits.memory_gb allows 0.5 GB; " in last


def test_a_guest_outside_its_hours_rests_and_ends_at_once(tmp_path: Path) -> None:
    now = time.localtime()
    begin = (now.tm_hour + 6) % 24
    hours = f"{begin:02}:00-{(begin + 1) % 24:02}:00"
    with processes(tmp_path) as started:
        options = ["--model", str(run_file(tmp_path)), "--listen", LISTEN, "--hours", hours]
        guest = started.start("guest", "join", "--role", "stage", *options)
        guest.wait_for(f"rests until {begin:02}:00 (limits.hours {hours}); Ctrl+C ends it")
        guest.wait_until(lambda: bool(guest.status()), "it answers no status")
        (role,) = guest.status()["roles"]
        assert (role["state"], role["waits_for"]) == ("resting", f"{begin:02}:00, when its hours begin (limits.hours)")
        code, took_s = guest.end(signal.SIGINT)
        assert code == 0
        assert took_s < 3
