"""Churn at the door with real processes: newcomers join while stage peers are killed, all of them at one address.

Every newcomer serves or says why it does not, steps go on, nobody starts over, and no honest peer is put aside.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.processes.processes import Process, Processes, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.alone, pytest.mark.thorough, pytest.mark.timeout(900)]

JOINERS, JOIN_EACH_S, KILL_EACH_S, AFTER_S = 12, 5.0, 20.0, 30.0
GAP_S, SAYS_S, BEGINS_S = 15.0, 30.0, 60.0  # on a machine that has nothing else to do
LOOK_S, BUSY_S = 0.5, 0.02


def slowdown() -> float:
    """How many times as long as its processor time a moment of work takes: other programs keep the machine busy."""
    began, spent = time.monotonic(), time.process_time()
    while time.process_time() - spent < BUSY_S:
        pass
    return (time.monotonic() - began) / BUSY_S


class Churn:
    """Stage peers and trainers that come and go; `look` notes what each of them says now."""

    def __init__(self, started: Processes, file: Path, addr: str, rng: random.Random) -> None:
        self.started, self.file, self.addr, self.rng = started, file, addr, rng
        self.peers: list[Process] = []
        self.killed: list[Process] = []
        self.dead: list[str] = []  # their peer ids
        self.heard: dict[str, float] = {}  # newcomer -> when it last served, or gave a reason
        self.silent_s: dict[str, float] = {}  # its longest time without either
        self.served: set[str] = set()
        self.step, self.since = 0, time.monotonic()
        self.gaps: list[tuple[float, int]] = []
        self.fell_back: list[tuple[int, int]] = []
        self.slow = 1.0

    def join(self, role: str) -> Process:
        process = self.started.join(f"{role}-{len(self.peers)}", role, self.file, self.addr)
        self.peers.append(process)
        self.heard[process.name] = time.monotonic()
        return process

    def living(self) -> list[Process]:
        return [peer for peer in self.peers if peer not in self.killed]

    def kill(self) -> bool:
        """End one of the stage peers that serve, with others of their stage; more often than not one that came first.

        False while there is none: on a busy machine newcomers take longer to serve.
        """
        stages = {peer: peer.role().get("stage") for peer in self.living() if peer.name.startswith("stage")}
        served = [peer for peer in stages if peer.name in self.served]
        serving = [
            peer for peer in served if any(stages[peer] == stages[other] for other in served if other is not peer)
        ]
        if not serving:
            return False
        victim = self.rng.choice([*serving[:2], self.rng.choice(serving)])
        print(f"kill {victim.name} at step {self.step}")
        self.dead.append(victim.status()["peer"]["id"])
        victim.popen.kill()
        self.killed.append(victim)
        return True

    def look(self) -> None:
        """Ask every process for its status."""
        self.slow = max(self.slow, slowdown())
        roles = {peer.name: peer.role() for peer in self.living()}
        now = time.monotonic()
        for name, role in roles.items():
            if serves(role):
                self.served.add(name)
            if role.get("waits_for") or name in self.served:
                self.heard[name] = now
            self.silent_s[name] = max(self.silent_s.get(name, 0.0), now - self.heard[name])
        step = max(
            (int(role.get("step") or 0) for name, role in roles.items() if name.startswith("trainer")), default=0
        )
        if step != self.step:
            if step < self.step:
                self.fell_back.append((self.step, step))
            self.gaps.append((now - self.since, self.step))
            self.step, self.since = step, now

    def watch(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            self.look()
            time.sleep(LOOK_S)

    def story(self) -> str:
        notes = [event for peer in self.peers for event in peer.events() if event["name"] == "conductor.noted"]
        lines = [f"{event['time']:.1f} {event['note']}" for event in sorted(notes, key=lambda event: event["time"])]
        longest = sorted(self.gaps, reverse=True)[:5]
        return "\n".join([f"gaps {longest}, slowdown {self.slow:.1f}, fell back {self.fell_back}", *lines])


def serves(role: dict[str, Any]) -> bool:
    """True for a trainer whose work has counted, and for a stage peer that has taken part in a step."""
    if "microbatches" in role:
        return int(role["microbatches"]["counted"]) > 0
    return int(role.get("step") or 0) > 0 and not role.get("waits_for")


def test_newcomers_serve_and_steps_go_on_while_stage_peers_are_killed(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        file = run_file(tmp_path)
        backbone = started.backbone("--config", str(file))
        churn = Churn(started, file, backbone.address(), random.Random(1))
        for role in ("stage", "stage", "stage", "stage", "trainer", "trainer"):
            churn.join(role)
        began = time.monotonic()
        while churn.step < 3 and time.monotonic() - began < BEGINS_S * churn.slow:
            churn.watch(LOOK_S)
        assert churn.step >= 3, churn.story()
        churn.gaps.clear()
        kill_at = time.monotonic() + KILL_EACH_S
        for number in range(JOINERS):
            churn.join("trainer" if number % 4 == 3 else "stage")
            churn.watch(JOIN_EACH_S)
            if time.monotonic() >= kill_at and churn.kill():
                kill_at = time.monotonic() + KILL_EACH_S
        churn.watch(AFTER_S)
        story = churn.story()
        print(story)
        assert churn.fell_back == [], story
        assert max(seconds for seconds, _ in churn.gaps) <= GAP_S * churn.slow, story
        assert max(churn.silent_s.values()) <= SAYS_S * churn.slow, churn.silent_s
        assert {peer.name for peer in churn.living()} <= churn.served, story
        put_aside = [line for line in story.splitlines() if "put aside" in line]
        assert not [line for line in put_aside if not any(peer[-8:] in line for peer in churn.dead)], story
