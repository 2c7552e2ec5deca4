"""A guest's limits: flags win over the file, each mistake is one message, and the process keeps to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peerd.cli.cli import invoke
from peerd.core.errors import ConfigError
from peerd.daemon.control.guest import GuestFlags, limits_told, settled
from peerd.run.config import load_run
from peerd.run.runfile import LimitsSection, RunFile, fingerprint
from peerd.wire.tcp.rate_limit import LimitedLine


def test_a_flag_wins_over_the_run_file_and_the_rest_of_the_file_stays() -> None:
    file = LimitsSection(upload_mbit=50, threads=4, stage=1)
    limits = GuestFlags(upload_mbit=0.0, nice=3, hours="22:00-08:00").over(file)
    assert limits == LimitsSection(upload_mbit=0, threads=4, stage=1, nice=3, hours="22:00-08:00")
    assert GuestFlags().over(file) == file
    assert fingerprint(RunFile(run="r", limits=limits)) == fingerprint(RunFile(run="r"))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--upload-mbit=-1", "--upload-mbit is -1.0; allowed: 0 (no limit) to 1000000"),
        ("--download-mbit=nan", "--download-mbit is nan; allowed: 0 (no limit) to 1000000"),
        ("--threads=-2", "--threads is -2; allowed: 0 (no limit) to 1024"),
        ("--nice=20", "--nice is 20; allowed: 0 (as other programs) to 19 (after all others)"),
        ("--memory-gb=-0.5", "--memory-gb is -0.5; allowed: 0 (no limit) to 1000000"),
        ("--hours=22-08", "--hours has '22-08', which is not a window of the day; allowed: HH:MM-HH:MM, such as"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_message_and_exit_code_2(
    flag: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: tiny\n")
    assert invoke(["join", "--role", "stage", "--model", str(file), flag]) == 2
    assert capsys.readouterr().err.startswith(f"peerd: {message}")
    assert invoke(["join", "--role", "stage", "--model", str(file), "--threads", "two"]) == 2


def test_the_run_file_has_the_same_keys_and_the_same_ranges(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: r\nlimits: {threads: 2, nice: 5, memory_gb: 1.5, hours: 22:00-08:00}\n")
    assert load_run(file).run.limits == LimitsSection(threads=2, nice=5, memory_gb=1.5, hours="22:00-08:00")
    file.write_text("run: r\nlimits: {threads: -1, nice: 20, memory_gb: -1, hours: never}\n")
    with pytest.raises(ConfigError, match="4 mistakes") as error:
        load_run(file)
    assert "line 2: limits.hours has 'never', which is not a window of the day" in str(error.value)


def test_a_guest_is_nice_by_default_and_a_backbone_is_not() -> None:
    assert settled(LimitsSection(), ["stage", "trainer"]).nice == 10
    assert settled(LimitsSection(), ["backbone"]).nice == 0
    assert settled(LimitsSection(nice=0), ["stage"]).nice == 0


def test_a_backbone_has_no_hours() -> None:
    with pytest.raises(ConfigError, match=r"hours 22:00-08:00 are set, but a backbone must always run"):
        settled(LimitsSection(hours="22:00-08:00"), ["backbone"])


def test_status_says_what_holds_and_what_is_used() -> None:
    limits = LimitsSection(upload_mbit=10, threads=1, nice=10, memory_gb=4.0, hours="22:00-08:00")
    told = limits_told(limits, "22:00")
    assert told["upload_mbit"] == 10
    assert told["memory_used_gb"] > 0
    assert told["text"].startswith("upload 10 Mb/s, 1 thread, ")
    assert told["text"].endswith(f"memory {told['memory_used_gb']:.1f} of 4 GB, hours 22:00-08:00, rests until 22:00")
    assert limits_told(LimitsSection())["hours"] is None


def test_the_flags_of_rates_lead_to_the_line_that_bounds_them() -> None:
    """The 5 % of precision are for tests/wire/tcp/test_rate_limit.py and tests/lab/test_limits.py."""
    line = LimitedLine(GuestFlags(upload_mbit=8, download_mbit=16).over(LimitsSection()))
    assert line._up is not None
    assert line._down is not None
    assert (line._up.limiter.bytes_per_s, line._down.limiter.bytes_per_s) == (1_000_000, 2_000_000)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="priorities are classes there")
def test_the_process_and_the_threads_that_it_starts_are_as_nice_as_told() -> None:
    code = (
        "import os, threading\n"
        "from peerd.run.runfile import LimitsSection\n"
        "from peerd.daemon.control.guest import niceness, obey\n"
        "obey(LimitsSection(nice=7, threads=3))\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))\n"
        "thread.start(); thread.join()\n"
        "print(niceness(), *seen, os.environ['OMP_NUM_THREADS'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert ended.stdout.split() == [str(max(7, own))] * 2 + ["3"]
