"""A trainer that loses the way to some of its stage peers goes on with the others: real processes on cut lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.lab import WideLab
from scripts.process_swarm import BASE, ProcessSwarm
from scripts.waiting import eventually

FOUND_OUT_S = 10.0
WATCHED_S = 8.0
CUT_S = 20.0
BREAK_S = 3.0  # a longer time between two steps is no pace

pytestmark = [
    *(pytest.mark.lab, pytest.mark.alone, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("_needs_a_wide_lab"),
]


def run_file() -> dict[str, Any]:
    return BASE | {
        "run": "cut-off",
        "model": {"d_model": 32, "heads": 1, "layers": 2, "context": 32},
        "pipeline": {"stages": 2, "microbatch": 4},
        "optimizer": {"name": "adamw", "lr": 1.0e-3, "total_steps": 100_000},
        "batch": {"target_samples": 128},
    }


def passed(seconds: float) -> tuple[float, float]:
    """Let so many seconds pass; returns their begin and end."""
    began = time.time()
    eventually(lambda: time.time() - began >= seconds, seconds + 5)
    return began, began + seconds


class FarSwarm(ProcessSwarm):
    """A swarm in a lab, where pairs of hosts can be cut off."""

    lab: WideLab

    def cut(self, one: str, other: str) -> None:
        """Drop all packets between two hosts, until `mend`."""
        rules = [
            "add table ip cut",
            "add chain ip cut in { type filter hook input priority 0; }",
            "add chain ip cut out { type filter hook output priority 0; }",
            f"add rule ip cut in ip saddr {self.hosts[other].ip} drop",
            f"add rule ip cut out ip daddr {self.hosts[other].ip} drop",
        ]
        self.lab.hosts[one].run(["nft", "-f", "-"], input="\n".join(rules), text=True)

    def mend(self, one: str) -> None:
        """Stop dropping packets from and to this host."""
        self.lab.hosts[one].run(["nft", "delete", "table", "ip", "cut"])

    def restart_trainer(self) -> None:
        """End the trainer and start another one, which measures the current lines."""
        self.end(self.peers.pop())
        self.join("trainer", "trainer")

    def rate(self, since: float, until: float) -> float:
        """Steps per second between two times in Unix seconds."""
        return sum(since <= at < until for at in self.steps()) / (until - since)


@contextmanager
def far_swarm(folder: Path) -> Iterator[FarSwarm]:
    """Two peers of each of two stages, and a trainer, that have made some steps."""
    with WideLab(delay_ms=5) as lab:
        swarm = FarSwarm(folder, run_file(), lambda name: lab.hosts.get(name) or lab.host(name))
        swarm.lab = lab
        swarm.start_pipeline(replicas=2)
        swarm.wait_for_step(3, 120)
        yield swarm


def goes_on(swarm: FarSwarm, since: float) -> float:
    """Waits until steps follow each other again; returns when the first of them was made."""

    def at_a_pace() -> list[float]:
        steps = [at for at in swarm.steps() if at >= since]
        return [at for before, at in pairwise(steps) if at - before < BREAK_S]

    eventually(lambda: len(at_a_pace()) >= 3, 90)
    return at_a_pace()[0]


def test_a_trainer_goes_on_without_the_peers_that_it_does_not_reach(tmp_path: Path) -> None:
    with far_swarm(tmp_path) as swarm:
        usual = swarm.rate(*passed(WATCHED_S))
        follower = next(n for n in ("stage-0", "stage-2") if not swarm.peer(n).role()["conducts"])
        swarm.cut("trainer", follower)  # whoever conducts is needed by everybody
        passed(FOUND_OUT_S)
        without_one = swarm.rate(*passed(WATCHED_S))
        for name in ("stage-1", "stage-3"):
            swarm.cut("trainer", name)
        passed(CUT_S)
        swarm.mend("trainer")
        passed(FOUND_OUT_S)
        mended = swarm.rate(*passed(WATCHED_S))
        counts = swarm.peer("trainer").role()["microbatches"]
        said = swarm.peer("trainer").said
    print(f"steps a second: {usual:.2f}, {without_one:.2f} without one, {mended:.2f} after a stage was gone; {counts}")
    silent = [line for line in said.splitlines() if "has fallen silent" in line]
    told = [line for line in said.splitlines() if "cannot be reached: it is left out" in line]
    assert counts["lost"] == 0
    assert without_one > 0.5 * usual
    assert mended > 0.5 * usual
    assert 1 <= len(silent) <= 4, silent
    assert len(told) <= 4, told


def test_a_trainer_that_reaches_no_stage_peer_directly_goes_on_over_a_relay(tmp_path: Path) -> None:
    """The backbone relays; the conductor is among those that are cut off.

    What the relay allows is what a trainer reaches that finds no other way from its start.
    """
    with far_swarm(tmp_path) as swarm:
        usual = swarm.rate(*passed(WATCHED_S))
        for number in range(4):
            swarm.cut("trainer", f"stage-{number}")
        cut = time.time()
        on_s = goes_on(swarm, since=cut) - cut
        over_a_relay = swarm.rate(*passed(WATCHED_S))
        counts = swarm.peer("trainer").role()["microbatches"]
        swarm.restart_trainer()
        goes_on(swarm, since=time.time())
        allowed = swarm.rate(*passed(WATCHED_S))
    print(f"steps a second: {usual:.2f}, {over_a_relay:.2f} over a relay, on {on_s:.1f} s after the cut; {allowed:.2f}")
    print(counts)
    assert counts["lost"] == 0
    assert over_a_relay > 0.5 * allowed
