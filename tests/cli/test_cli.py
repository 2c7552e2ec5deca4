"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peerd import __version__
from peerd.cli.cli import home_of, invoke
from peerd.run.runfile import RunFile


def test_version_and_help_go_to_stdout_with_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out == f"peerd {__version__}\n"
    assert invoke(["--help"]) == 0
    shown = capsys.readouterr().out
    groups = {"Take part": "join status demo identity doctor", "Organize a run": "plan backbone token"}
    for group, commands in groups.items():
        listed = shown.partition(f"{group}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in listed.splitlines()] == commands.split()
    assert "..." not in shown.partition("Take part")[2], "the help of a command is cut"


def test_the_help_of_join_has_arguments_options_limits_and_what_a_line_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["join", "--help"]) == 0
    shown = capsys.readouterr().out
    groups = {
        "Arguments": "[LINK]",
        "Options": "--role",
        "Limits of this machine": "--hours",
        "With a join link": "--yes",
    }
    for group, option in groups.items():
        assert f"\n  {option} " in shown.partition(f"\n{group}:")[2].partition("\n\n")[0]


def test_identity_makes_one_where_it_is_told_to_and_shows_the_same_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert invoke(["identity", "--data-dir", str(tmp_path / "a"), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["peer_id"].startswith("12D3KooW")
    assert invoke(["identity", "--data-dir", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.split() == [first["peer_id"], str(tmp_path / "a")]


def test_identity_without_a_directory_lists_those_of_this_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert invoke(["identity"]) == 0
    assert "no identity yet" in capsys.readouterr().out
    invoke(["identity", "--data-dir", str(tmp_path / "peerd" / "tiny-stage")])
    capsys.readouterr()
    assert invoke(["identity", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["identities"]
    assert found["data_dir"].endswith("tiny-stage")


def test_the_identity_of_a_run_is_the_one_that_join_uses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("run: tiny\n")
    assert invoke(["identity", "--model", str(tmp_path / "run.yaml")]) == 0
    peer, place = capsys.readouterr().out.split()
    assert place == str(home_of(RunFile(run="tiny"), ["stage"])) == str(home_of(RunFile(run="tiny"), ["trainer"]))
    assert invoke(["identity", "--run", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"peer_id": peer, "data_dir": place}


@pytest.mark.slow
def test_a_bug_leaves_one_line_and_a_file_with_the_details() -> None:
    code = "import peerd.cli.cli as cli, sys\ncli.invoke = lambda argv: 1 / 0\ncli.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("peerd: stopped by a bug (ZeroDivisionError: division by zero); please report it, details: ")
    details = Path(line.rpartition(" ")[2])
    assert "Traceback" in details.read_text()
    details.unlink()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_output_that_the_disk_does_not_take_is_told() -> None:
    code = (
        "import sys, torch, peerd.cli.cli as cli; cli.app.command('say')(lambda: sys.stdout.write('words')); cli.main()"
    )
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code, "say"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("peerd: the disk is full; make room")


@pytest.mark.slow
def test_python_m_peerd_is_the_peerd_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "peerd", "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"peerd {__version__}\n")


RUNS_A_JOB = """
import atexit, functools, sys, threading, torch, trio
import peerd.cli.cli as cli
from peerd.model import worker

atexit.register(print, "unloads torch")
ends = threading.Event()
if sys.argv[1] == "ends":
    ends.set()
else:
    worker.CLOSE_TIMEOUT_S = 0

async def leave() -> None:
    token, begun = trio.lowlevel.current_trio_token(), trio.Event()

    def job() -> None:
        x = torch.ones(3, requires_grad=True)
        x.sum().backward()
        token.run_sync_soon(begun.set)
        ends.wait()

    async with worker.DeviceWorker() as device, trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(device.run, job, name="long"))
        await begun.wait()
        nursery.cancel_scope.cancel()

def invoke(argv: list[str]) -> int:
    trio.run(leave)
    for thread in threading.enumerate():
        if thread.name.startswith("peerd ") and ends.is_set():
            thread.join()
    print("last words", flush=True)
    return 2

cli.invoke = invoke
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ends", "stays"])
def test_a_process_that_computed_ends_without_waiting_for_torch(job: str) -> None:
    ended = subprocess.run([sys.executable, "-c", RUNS_A_JOB, job], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "last words\n", "")
