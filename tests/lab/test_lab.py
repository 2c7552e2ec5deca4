"""The network lab: lines have their rates, nothing leads out, nothing is left, even of an owner that was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import lab as module
from scripts.lab import Host, Lab, LabError, labels, why_not
from scripts.waiting import eventually

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.socket]

RECEIVER = """\
import socket, sys, time
listener = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = listener.accept()
total = len(connection.recv(1 << 18))
began = time.perf_counter()
while data := connection.recv(1 << 18):
    total += len(data)
print(total, time.perf_counter() - began)
"""
SENDER = """\
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=20)
for _ in range(int(sys.argv[2])):
    connection.sendall(bytes(100_000))
"""
FORSAKEN = """\
import signal, sys
sys.path.insert(0, sys.argv[1])
from scripts.lab import Lab
with Lab() as lab:
    sleeper = lab.host("a").popen(["sleep", "1000"])
    print(sleeper.pid, *lab.labels(), flush=True)
    signal.pause()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"


def rate_mbit(sender: Host, receiver: Host, megabits: float) -> float:
    """The rate of one TCP connection, in 10^6 bits of payload per second."""
    with receiver.popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout.readline() == "ready\n"
        sender.run([sys.executable, "-c", SENDER, receiver.ip, str(round(megabits / 0.8))])
        total, seconds = sink.stdout.read().split()
    return int(total) * 8e-6 / float(seconds)


def gone(condition: Callable[[], bool]) -> bool:
    """True when the condition holds soon: the kernel ends processes in its own time."""
    return eventually(condition, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("up", "down"), [(100, None), (None, 100), (100, 100), (20, 100)])
def test_a_transfer_takes_nearly_all_of_the_narrower_line(lab: Lab, up: float | None, down: float | None) -> None:
    sender, receiver = lab.host("sender", up_mbit=up), lab.host("receiver", down_mbit=down)
    narrower = min(rate for rate in (up, down) if rate is not None)
    assert 0.85 <= rate_mbit(sender, receiver, narrower / 2) / narrower <= 1.02


@pytest.mark.slow
def test_the_two_directions_of_a_line_have_their_own_rates_and_can_be_changed(lab: Lab) -> None:
    near, far = lab.host("near", up_mbit=100, down_mbit=20), lab.host("far")
    assert rate_mbit(near, far, 40) > 2.5 * rate_mbit(far, near, 10)
    near.limit(20, 100)
    assert rate_mbit(far, near, 40) > 2.5 * rate_mbit(near, far, 10)


def test_traffic_counts_what_crossed_the_line(lab: Lab) -> None:
    sender, receiver = lab.host("sender"), lab.host("receiver")
    before = receiver.traffic()
    rate_mbit(sender, receiver, 80)
    crossed = receiver.traffic().since(before)
    assert 10_000_000 <= crossed.received <= 11_000_000
    assert 0 < crossed.sent < 1_000_000


def test_a_host_cannot_reach_the_network_of_the_machine(lab: Lab) -> None:
    host = lab.host("a")
    own = {line.split()[3].partition("/")[0] for line in module.ip("-4", "-oneline", "addr", "show").splitlines()}
    assert host.ip not in own
    with socket.create_server(("", 0)) as listener:
        for address in own:
            tried = host.run(
                [sys.executable, "-c", CONNECT, address, str(listener.getsockname()[1])],
                check=False,
                capture_output=True,
                text=True,
            )
            assert tried.returncode != 0, address
            assert "refused" in tried.stderr or "unreachable" in tried.stderr, tried.stderr


def test_nothing_is_left_after_a_lab_whatever_its_processes_do() -> None:
    with Lab() as lab:
        names = lab.labels()
        stubborn = lab.host("a").popen(["sh", "-c", "trap '' TERM INT HUP; sleep 1000 & sleep 1000"])
        host = lab.hosts["a"]
        assert gone(lambda: len(host.pids()) == 3)
        left = host.pids()
        names = lab.labels()
    assert len(names) == 2
    assert not set(names) & set(labels())
    assert stubborn.returncode == -signal.SIGKILL
    assert gone(lambda: not any(module.born(pid) for pid in left))


def test_the_next_lab_removes_what_an_owner_that_was_killed_left() -> None:
    argv = [sys.executable, "-c", FORSAKEN, str(Path(module.__file__).parents[2])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        sleeper, *left = owner.stdout.readline().split()
        with Lab() as lab:  # a neighbour's lab is left alone
            assert set(left) <= set(labels())
            assert not set(left) & set(lab.labels())
        owner.kill()
    assert set(left) <= set(labels())
    assert module.born(int(sleeper))
    with Lab():
        assert not set(left) & set(labels())
        assert gone(lambda: module.born(int(sleeper)) is None)


def test_a_lab_that_cannot_be_built_leaves_nothing_and_says_why() -> None:
    with pytest.raises(LabError, match="tbf"), Lab() as lab:
        lab.host("a", up_mbit=0)
    assert not [label for label in labels() if f".{os.getpid()}." in label]


def test_why_there_can_be_no_lab_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        assert why_not() == "a network lab needs root"
        monkeypatch.setenv("PATH", "/nowhere")
        why_not.cache_clear()
        assert why_not() == "a network lab needs ip and tc of iproute2"
    finally:
        why_not.cache_clear()


def test_a_host_says_by_which_rule_its_tcp_sends(lab: Lab) -> None:
    host = lab.host("sender")
    with host.socket() as sender:
        rule = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert host.congestion_control == rule.split(b"\0")[0].decode()
