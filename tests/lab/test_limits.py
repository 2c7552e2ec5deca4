"""Traffic of a peer with limits, counted on the line itself, in packets with their headers."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.lab import Host, Lab, WideHost, WideLab
from tests.worlds.processes import bulk_peer

PEER = Path(bulk_peer.__file__)
OTHERS = 3
MBIT = 8e-6  # of a byte
STARTS_S = 2.0  # connections begin slowly, and a limit allows a burst first: rates are those of the time after that

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)]


AnyHost = Host | WideHost


def start(
    host: AnyHost, limits: tuple[float, float], *targets: str, protocol: str = "/bulk/1"
) -> subprocess.Popen[Any]:
    if isinstance(host, Host):
        # Packets of the size that real lines have: else many count as one, with one header.
        host.links("link set dev eth0 gso_max_segs 1")
    seed = int(ipaddress.ip_address(host.ip)) % 251
    argv = [sys.executable, str(PEER), str(seed), *map(str, limits), place(host), protocol, *targets]
    process = host.popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def place(host: AnyHost) -> str:
    return f"/ip4/{host.ip}/tcp/4001"


def rates(host: AnyHost, seconds: float) -> tuple[float, float]:
    """Sent and received, Mb/s."""
    line = host if isinstance(host, Host) else host.line
    before, began = line.traffic(), time.monotonic()
    time.sleep(seconds)  # what is measured is a stretch of the line's own time
    passed, passed_s = line.traffic().since(before), time.monotonic() - began
    return passed.sent * MBIT / passed_s, passed.received * MBIT / passed_s


def enough(found_mbit: float, limit_mbit: float) -> None:
    """Nearly all that the limit allows, unless the processes had to wait for a processor."""
    if found_mbit <= 0.95 * limit_mbit and os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
        pytest.skip(f"this machine is busy with other things: {found_mbit:.1f} of {limit_mbit:g} Mb/s")
    assert found_mbit > 0.95 * limit_mbit


@pytest.mark.parametrize(("up_mbit", "down_mbit"), [(8.0, 24.0), (40.0, 40.0)])
def test_the_line_carries_what_the_limits_say_with_several_busy_connections(
    lab: Lab, up_mbit: float, down_mbit: float
) -> None:
    others = [lab.host(f"other{number}") for number in range(OTHERS)]
    for other in others:
        start(other, (0, 0))
    limited = lab.host("limited")
    start(limited, (up_mbit, down_mbit), *map(place, others))
    time.sleep(STARTS_S)
    found = [rates(limited, 1.0) for _ in range(5)]
    up, down = (sum(rate) / len(found) for rate in zip(*found, strict=True))
    assert down < 1.05 * down_mbit, found
    assert up < 1.05 * up_mbit, found
    enough(down, down_mbit)
    enough(up, up_mbit)
    for sent, received in found:
        assert sent < 1.1 * up_mbit, found
        assert received < 1.1 * down_mbit, found


@pytest.mark.parametrize("mbit", [2.0, 30.0, 100.0])
def test_a_line_busy_in_one_direction_is_full_and_no_fuller(lab: Lab, mbit: float) -> None:
    far, limited = lab.host("far"), lab.host("limited")
    start(far, (0, 0))
    start(limited, (mbit, mbit), place(far), protocol="/sink/1")
    time.sleep(STARTS_S)
    sent, received = rates(limited, 4.0)
    assert sent < 1.05 * mbit
    enough(sent, mbit)
    assert received < 0.05 * mbit


def test_what_comes_twice_is_paid_for_twice(wide: WideLab) -> None:
    """As when senders that hear of a packet late repeat it: it takes the line, though nobody reads it."""
    far, limited = wide.host("far", delay_ms=2), wide.host("limited", delay_ms=2, twice=0.2)
    start(limited, (0, 20))
    start(far, (0, 0), place(limited), protocol="/sink/1")
    time.sleep(STARTS_S)
    _, received = rates(limited, 4.0)
    assert received < 1.05 * 20
    enough(received, 20)
