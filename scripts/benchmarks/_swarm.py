"""Part of the lines benchmark: a backbone, one peer per stage and a trainer, each on its own host in a lab.

They are ordinary `peerd` processes, which are observed from outside: by the trainer's events (ends of global steps,
evaluations), the bytes on each host's line, and the processor time of each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lab import Lab, Space, Traffic

from benchmarks._peers import TICKS_PER_S, Peer, Peers

# Common settings of measured runs: the same seed, text that is always available, and only training.
BASE: dict[str, Any] = {
    "seed": 3,
    "data": {"kind": "text", "path": "stdlib", "shuffle_buffer": 10_000},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
}


@dataclass(frozen=True, slots=True)
class Moment:
    """Resources used up to a time."""

    traffic: dict[str, Traffic]  # by host
    cpu_s: float  # of the swarm's processes
    others_s: float  # of everything else on this machine


@dataclass(slots=True)
class Swarm(Peers):
    """The processes of one run."""

    lab: Lab
    run: dict[str, Any]  # the run file
    rate_mbit: float | None  # of each line, up and down; None: unlimited

    def start(self) -> None:
        """Start a backbone, a peer for each stage and a trainer, without waiting for training to begin."""
        entry = self._enter()
        for stage in range(self.run["pipeline"]["stages"]):
            self._join(f"stage-{stage}", "stage", entry, self._run_at(stage))
        self._join("trainer", "trainer", entry, self.run, "--log-level", "debug")  # debug: logs each step

    def start_replicas(self, runs: Sequence[dict[str, Any]]) -> None:
        """Start a backbone, and for each of these run files a trainer with its own replica."""
        entry = self._enter()
        for number, run in enumerate(runs):
            self._join(f"replica-{number}", "trainer", entry, run, "--log-level", "debug")

    def _enter(self) -> str:
        """Start the backbone. Returns the address for others to join at."""
        backbone = self._start("backbone", "backbone", "--listen", "/ip4/0.0.0.0/tcp/4001")
        self.until(lambda: bool(backbone.status().get("peer", {}).get("addrs")), "the backbone does not listen")
        status = backbone.status()["peer"]
        return f"/ip4/{self.lab.hosts[backbone.name].ip}/tcp/4001/p2p/{status['id']}"

    @property
    def trainer(self) -> Peer:
        return self.peers[-1]

    def moment(self) -> Moment:
        cpu_s = sum(peer.cpu_s() for peer in self.peers)
        return Moment(self._traffic(), cpu_s, busy_s() - cpu_s)

    def steps(self, peer: Peer | None = None) -> list[float]:
        """Times in Unix seconds at which a trainer learned of the end of each global step."""
        return [event["time"] for event in (peer or self.trainer).events() if event["name"] == "trainer.stepped"]

    def wait_for_step(self, step: int, patience_s: float, peer: Peer | None = None) -> None:
        """Wait until `step` global steps are done."""
        self.until(lambda: len(self.steps(peer)) >= step, f"step {step} was never done", patience_s)

    def last_loss(self, step: int, patience_s: float) -> float:
        """Validation loss after the run's last step."""
        found: list[float] = []

        def evaluated() -> bool:
            events = [event for peer in self.peers for event in peer.events()]
            found[:] = [e["loss"] for e in events if e["name"] == "trainer.evaluated" and e["step"] == step]
            return bool(found)

        self.until(evaluated, f"the loss after step {step} was never told", patience_s)
        return found[0]

    def _run_at(self, stage: int) -> dict[str, Any]:
        """The run file of a peer of `stage`."""
        return {**self.run, "limits": {**self.run.get("limits", {}), "stage": stage}}

    def _join(self, name: str, role: str, entry: str, run: dict[str, Any], *more: str) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run))
        self._start(name, "join", "--role", role, "--model", str(file), "--bootstrap", entry, *more)

    def _start(self, name: str, *arguments: str) -> Peer:
        return self.start_peer(self._place(name), name, *arguments)

    def _place(self, name: str) -> Space:
        return self.lab.host(name, self.rate_mbit, self.rate_mbit)

    def _traffic(self) -> dict[str, Traffic]:
        return {name: host.traffic() for name, host in self.lab.hosts.items()}


def busy_s() -> float:
    """Processor time that this machine has spent on anything since its start, including time stolen by its host."""
    user, nice, system, _idle, _wait, irq, softirq, stolen, *_ = (
        Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return sum(map(int, (user, nice, system, irq, softirq, stolen))) / TICKS_PER_S
