"""Two hosts that dial each other at the same moment, each from the port on which it listens: one connection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lab import WideLab

ROOT = Path(__file__).parents[2]
TIMES = 4
DELAY_MS = 25.0  # 100 ms there and back: time enough for both to have dialed

pytestmark = [
    *(pytest.mark.lab, pytest.mark.socket, pytest.mark.slow),
    pytest.mark.usefixtures("_needs_a_wide_lab"),
]


def test_dials_that_cross_become_one_connection_with_one_initiator() -> None:
    with WideLab(delay_ms=DELAY_MS) as lab:
        hosts = {name: lab.host(name) for name in ("a", "b")}
        sides = []
        for own, other in (("a", "b"), ("b", "a")):
            program = [sys.executable, "-m", "tests.worlds.processes.crossing", own, other, hosts[other].ip, str(TIMES)]
            pipe = subprocess.PIPE
            sides.append(hosts[own].popen(program, stdin=pipe, stdout=pipe, text=True, cwd=ROOT))
        try:
            for _ in range(TIMES):
                found = []
                for step in ("ready", "met"):
                    heard = [json.loads(side.stdout.readline()) for side in sides]  # type: ignore[union-attr]
                    for side in sides:
                        side.stdin.write("\n")  # type: ignore[union-attr]
                        side.stdin.flush()  # type: ignore[union-attr]
                    found = heard if step == "met" else []
                assert [each["error"] for each in found] == ["", ""]
                assert [each["links"] for each in found] == [1, 1]
                assert {each["first"] for each in found} == {True, False}
        finally:
            for side in sides:
                side.kill()
                for pipe_end in (side.stdin, side.stdout):
                    pipe_end.close()  # type: ignore[union-attr]
                side.wait()
