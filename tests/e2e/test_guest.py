"""A guest's limits on a real process: what the system says that it takes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.kit.processes import LISTEN, Process, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(180)]
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
def test_a_replica_with_one_thread_keeps_one_processor_busy_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "heavy.yaml"
    file.write_text(HEAVY)
    options = ["--model", str(file), "--listen", LISTEN, "--threads", "1"]
    with processes(tmp_path) as started:
        replica = started.start("replica", "join", "--role", "trainer", *options)
        replica.wait_until(lambda: int(replica.role().get("step") or 0) >= 1, "it never made a step")
        assert processor_share(replica, 12.0) < 1.05
        assert replica.status()["limits"]["text"].startswith("1 thread")
        if sys.platform != "win32":
            assert psutil.Process(replica.popen.pid).nice() == max(10, os.getpriority(os.PRIO_PROCESS, 0))
        assert replica.end()[0] == 0


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
        assert (role["state"], role["waits_for"]) == ("resting", f"{begin:02}:00: it rests until then (limits.hours)")
        code, took_s = guest.end(signal.SIGINT)
        assert code == 0
        assert took_s < 3
