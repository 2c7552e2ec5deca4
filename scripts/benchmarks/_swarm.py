"""Part of the lines benchmark: a backbone, one peer for each stage and a trainer, each on a host of its own in a lab.

They are ordinary `peerd` processes. What they do is read from outside: the trainer's events (when each global step
ended, what it evaluated), the bytes on each host's line, the processor time of each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lab import Host, Lab, Traffic

from peerd.control import fetch
from peerd.core.keys import Keypair
from peerd.home import IDENTITY_FILE, socket_path, write_atomically

ROOT = Path(__file__).resolve().parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.05
KEY_FORM = bytes([0x08, 0x01, 0x12, 0x40])  # libp2p's: Ed25519, 64 bytes


class SwarmFailed(Exception):
    """A process ended or nothing happened for too long; says what the processes said last."""


@dataclass(slots=True)
class Peer:
    """One peerd process on one host. `log` holds what it said."""

    name: str
    host: Host
    data_dir: Path
    log: Path
    process: subprocess.Popen[Any]

    def status(self) -> dict[str, Any]:
        """Its snapshot; empty while it does not answer yet."""
        with contextlib.suppress(OSError, ValueError):
            return fetch(str(socket_path(self.data_dir)))
        return {}

    def events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.data_dir / "events.jsonl").read_text("utf-8").splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def cpu_s(self) -> float:
        """Processor time of the process, its own and the kernel's on its behalf."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Moment:
    """What had been used when a global step was seen to end."""

    traffic: dict[str, Traffic]  # by host
    cpu_s: float  # of the swarm's processes
    others_s: float  # of everything else on this machine


@dataclass(slots=True)
class Swarm:
    """The processes of one run."""

    lab: Lab
    folder: Path
    run: dict[str, Any]  # the run file
    rate_mbit: float | None  # of every line, up and down; None: as fast as the machine can
    peers: list[Peer] = field(default_factory=list)

    def start(self) -> None:
        """Start a backbone, a peer for each stage and a trainer; who is early waits for the others."""
        entry = self._enter()
        for stage in range(self.run["pipeline"]["stages"]):
            self._join(f"stage-{stage}", "stage", entry, {**self.run, "limits": {"stage": stage}})
        self._join("trainer", "trainer", entry, self.run, "--log-level", "debug")  # it notes every step then

    def start_replicas(self, runs: Sequence[dict[str, Any]]) -> None:
        """Start a backbone and a trainer with a replica of its own for each of these run files."""
        entry = self._enter()
        for number, run in enumerate(runs):
            self._join(f"replica-{number}", "trainer", entry, run, "--log-level", "debug")

    def _enter(self) -> str:
        """Start the backbone; returns where others join."""
        backbone = self._start("backbone", "backbone", "--listen", "/ip4/0.0.0.0/tcp/4001")
        self._until(lambda: bool(backbone.status().get("peer", {}).get("addrs")), "the backbone does not listen")
        status = backbone.status()["peer"]
        return f"/ip4/{backbone.host.ip}/tcp/4001/p2p/{status['id']}"

    @property
    def trainer(self) -> Peer:
        return self.peers[-1]

    def moment(self) -> Moment:
        cpu_s = sum(peer.cpu_s() for peer in self.peers)
        return Moment({peer.name: peer.host.traffic() for peer in self.peers}, cpu_s, busy_s() - cpu_s)

    def steps(self, peer: Peer | None = None) -> list[float]:
        """When the trainer heard of the end of each global step, Unix seconds."""
        return [event["time"] for event in (peer or self.trainer).events() if event["name"] == "step"]

    def wait_for_step(self, step: int, patience_s: float, peer: Peer | None = None) -> None:
        """Until `step` global steps are done."""
        self._until(lambda: len(self.steps(peer)) >= step, f"step {step} was never done", patience_s)

    def last_loss(self, step: int, patience_s: float) -> float:
        """Validation loss after the run's last step."""
        found: list[float] = []

        def evaluated() -> bool:
            events = [event for peer in self.peers for event in peer.events()]
            found[:] = [e["loss"] for e in events if e["name"] == "evaluated" and e["step"] == step]
            return bool(found)

        self._until(evaluated, f"the loss after step {step} was never told", patience_s)
        return found[0]

    def _join(self, name: str, role: str, entry: str, run: dict[str, Any], *more: str) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run))
        self._start(name, "join", "--role", role, "--model", str(file), "--bootstrap", entry, *more)

    def _start(self, name: str, *arguments: str) -> Peer:
        host = self.lab.host(name, self.rate_mbit, self.rate_mbit)
        data_dir, log = self.folder / name, self.folder / f"{name}.log"
        data_dir.mkdir(mode=0o700, exist_ok=True)
        identify(data_dir, name)
        environment = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self.folder)}
        with log.open("wb") as output:
            process = host.popen(
                [sys.executable, "-m", "peerd", *arguments, "--data-dir", str(data_dir)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        peer = Peer(name, host, data_dir, log, process)
        self.peers.append(peer)
        return peer

    def _until(self, done: Callable[[], bool], complaint: str, patience_s: float = 60.0) -> None:
        deadline = time.monotonic() + patience_s
        while not done():
            ended = [peer for peer in self.peers if peer.process.poll() not in (None, 0)]
            if ended or time.monotonic() > deadline:
                said = "".join(f"\n--- {p.name}\n{p.log.read_text('utf-8', 'replace')[-2000:]}" for p in self.peers)
                raise SwarmFailed(f"{complaint}; ended: {[peer.name for peer in ended]}{said}")
            time.sleep(POLL_S)  # no loop runs here, and what is waited for is in other processes' files


def busy_s() -> float:
    """Processor time that this machine has spent on anything at all since it was started."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / TICKS_PER_S


def identify(data_dir: Path, name: str) -> None:
    """The same identity in every run: a trainer's order of samples follows from it."""
    keypair = Keypair.from_seed(hashlib.sha256(name.encode()).digest())
    write_atomically(data_dir / IDENTITY_FILE, KEY_FORM + keypair.seed + keypair.peer_id.public_key)
