"""Part of the averaging benchmark: processes that average on order, and how long a round takes them.

A round lasts from its common beginning, which is told ahead, until the last member has the sum. Sums are checked when
all have theirs: a check takes the processor from those who are still at it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

LEAD_S = 0.05  # from an order to its common beginning


class Start(Protocol):
    """subprocess.Popen, or that of a host in a network lab."""

    def __call__(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]: ...


class Peer:
    """A peer's process. Its first answer says who and where it is."""

    def __init__(self, start: Start, *arguments: str) -> None:
        scripts = Path(__file__).parents[1]
        path = os.pathsep.join([str(scripts), str(scripts.parent)])
        self._process = start(
            [sys.executable, "-m", "benchmarks._averager", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer of the benchmark ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_s(self) -> float:
        """Processor time of the process, its own and the kernel's on its behalf."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def ask(members: Sequence[Peer], **order: Any) -> list[dict[str, Any]]:
    for peer in members:
        peer.tell(**order)
    return [peer.hear() for peer in members]


def met(members: Sequence[Peer]) -> list[str]:
    """Who they are, in their order, when all know and reach each other."""
    found = [peer.hear() for peer in members]
    ask(members, do="meet", peers={each["peer"]: each["addr"] for each in found})
    return [each["peer"] for each in found]


def round_s(members: Sequence[Peer], code: str, lead_s: float = LEAD_S, **more: Any) -> float:
    """Seconds of one round of ours; `more` as in an order to sum."""
    begin = time.monotonic() + lead_s
    found = ask(members, do="sum", code=code, attempt=secrets.token_hex(16), at=begin, **more)
    return lasted(members, found, begin)


def group_s(members: Sequence[Peer]) -> float:
    """Seconds from the first member's decision to have a round until it knows that everybody stands in it.

    Its orders go out as in training; the vector has one element for each member, so that all have exchanged parts with
    all, and next to nothing is summed.
    """
    (answer,) = ask(members[:1], do="form", attempt=secrets.token_hex(16))
    seconds: float = answer["seconds"]
    return seconds


def gloo_s(members: Sequence[Peer], count: int) -> float:
    """Seconds of one round of gloo's."""
    found = ask(members, do="gloo", count=count)
    return lasted(members, found, max(answer["begin"] for answer in found))


def lasted(members: Sequence[Peer], found: Sequence[Mapping[str, Any]], begin: float) -> float:
    """Seconds from `begin` to the last end; everybody brought ones, so that the right sum is known."""
    if not all(answer["right"] for answer in ask(members, do="check", sum=len(members))):
        raise RuntimeError("a wrong sum")
    seconds: float = max(answer["end"] for answer in found) - begin
    return seconds
