"""Starts a swarm of `peerd` processes, on this machine or on hosts of a network lab, and waits for its steps.

Processes are observed from outside: by their status, their event files, the bytes on each host's line and their
processor time. Network namespaces share the file system, so control sockets and event files work in a lab too.

    with ProcessSwarm(folder, run) as swarm:
        swarm.start_backbone()
        swarm.join("stage-0", "stage", stage=0)
        swarm.join("trainer", "trainer")
        stretch = swarm.measure(first=3, steps=20)
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import yaml

from peerd.core.keys import Keypair
from peerd.run.home import IDENTITY_FILE, write_atomically
from scripts.peerd_process import PeerdProcess
from scripts.process_usage import cpu_s, others_s
from scripts.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[1]
CORES: Final = os.cpu_count() or 1
KEY_FORM: Final = bytes([0x08, 0x01, 0x12, 0x40])  # prefix of a private key in libp2p's format: Ed25519, 64 bytes
# Common settings of measured runs: the same seed, text that is always available, and only training.
BASE: Final[dict[str, Any]] = {
    "seed": 3,
    "data": {"kind": "text", "path": "stdlib", "shuffle_buffer": 10_000},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
}


class SwarmFailed(Exception):
    """A process ended, or nothing happened for too long. The message has the processes' last output."""


class Host(Protocol):
    """What a swarm uses of a host of a lab."""

    ip: str

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]: ...

    def traffic(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """Resources used up to a time."""

    traffic: dict[str, Any]  # by host of a lab
    cpu_s: float  # of the swarm's processes
    others_s: float  # of everything else on this machine


@dataclass(frozen=True, slots=True)
class Stretch:
    """Measurement of consecutive steps: their ends in Unix seconds, and the resources used before and after."""

    ends: list[float]  # the first is the end of the step before
    before: Moment
    after: Moment

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.ends[0]

    @property
    def steps_s(self) -> list[float]:
        """Seconds of each step."""
        return [end - begin for begin, end in pairwise(self.ends)]

    @property
    def median_s(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.steps_s)

    @property
    def crossed(self) -> Mapping[str, Any]:
        """Bytes on each host's line."""
        return {name: self.after.traffic[name].since(past) for name, past in self.before.traffic.items()}

    @property
    def sent(self) -> int:
        """Bytes sent by all hosts together."""
        return sum(line.sent for line in self.crossed.values())

    @property
    def cpu_share(self) -> float:
        """Share of all cores used by the swarm."""
        return (self.after.cpu_s - self.before.cpu_s) / self.seconds / CORES

    @property
    def others_share(self) -> float:
        """Share of all cores used by everything else, including the kernel's network."""
        return (self.after.others_s - self.before.others_s) / self.seconds / CORES


@dataclass(slots=True)
class ProcessSwarm:
    """The processes of one run. `folder` has their data directories, run files and logs."""

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)  # the run file, without limits of single peers
    place: Callable[[str], Host] | None = None  # the host of a peer by its name, or None for this machine
    options: tuple[str, ...] = ()  # of all that join
    peers: list[PeerdProcess] = field(default_factory=list, init=False)
    hosts: dict[str, Host] = field(default_factory=dict, init=False)
    entry: str = field(default="", init=False)  # address at which others join
    left: set[str] = field(default_factory=set, init=False)  # names of peers that were ended on purpose

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.kill()

    # --- processes ----------------------------------------------------------------------------------------------------
    def start(self, name: str, *arguments: str) -> PeerdProcess:
        """Start `peerd` with these arguments, on the peer's host if it has one.

        Its identity is the same in all runs, since a trainer's order of samples depends on it.
        """
        self.left.discard(name)
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        keypair = Keypair.from_seed(hashlib.sha256(name.encode()).digest())
        write_atomically(self.folder / name / IDENTITY_FILE, KEY_FORM + keypair.seed + keypair.peer_id.public_key)
        if self.place is None:
            popen, arguments = subprocess.Popen[bytes], (*arguments, "--listen", "/ip4/127.0.0.1/tcp/0")
        else:
            self.hosts[name] = self.place(name)
            popen = partial(self.hosts[name].popen, cwd=ROOT)
        self.peers.append(PeerdProcess(name, self.folder, arguments, popen))
        return self.peers[-1]

    def start_backbone(self) -> PeerdProcess:
        """Start the backbone, and wait until it listens."""
        lab = self.place is not None
        backbone = self.start("backbone", "backbone", *(("--listen", "/ip4/0.0.0.0/tcp/4001") if lab else ()))
        self.until(lambda: bool(backbone.addr()), "the backbone does not listen")
        peer = backbone.status()["peer"]["id"]
        self.entry = f"/ip4/{self.hosts['backbone'].ip}/tcp/4001/p2p/{peer}" if lab else backbone.addr()
        return backbone

    def join(
        self, name: str, role: str, *options: str, run: dict[str, Any] | None = None, **limits: Any
    ) -> PeerdProcess:
        """Start a peer that joins the run, with these limits. `run` replaces the swarm's run file."""
        run = self.run if run is None else run
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**run, "limits": {**run.get("limits", {}), **limits}}))
        entry = ("--bootstrap", self.entry) if self.entry else ()
        steps = ("--log-level", "debug") if role == "trainer" else ()  # logs each step
        return self.start(name, "join", "--role", role, "--model", str(file), *entry, *steps, *self.options, *options)

    def start_pipeline(self, replicas: int = 1) -> None:
        """Start a backbone, `replicas` peers of each stage (`stage-0`, `stage-1`, ..., which repeat), and a trainer."""
        self.start_backbone()
        stages = self.run["pipeline"]["stages"]
        for number in range(stages * replicas):
            self.join(f"stage-{number}", "stage", stage=number % stages)
        self.join("trainer", "trainer")

    def replicas(self, count: int) -> list[dict[int, Path]]:
        """For each replica that `start_pipeline` started, the data directories of its stages' peers."""
        stages = self.run["pipeline"]["stages"]
        return [{s: self.folder / f"stage-{stages * number + s}" for s in range(stages)} for number in range(count)]

    def peer(self, name: str) -> PeerdProcess:
        return next(peer for peer in self.peers if peer.name == name)

    @property
    def trainer(self) -> PeerdProcess:
        """The peer that was started last, which is the trainer."""
        return self.peers[-1]

    def end(self, peer: PeerdProcess, how: signal.Signals = signal.SIGINT, patience_s: float = 60.0) -> int:
        """Send a signal to a peer and wait for its end. Returns its exit code."""
        self.left.add(peer.name)
        peer.popen.send_signal(how)
        return peer.popen.wait(patience_s)

    def leave(self, patience_s: float = 60.0) -> list[str]:
        """Send SIGINT to all living peers. Returns the names of those that do not end, which are killed."""
        for peer in reversed(self.peers):
            if peer.popen.poll() is None:
                peer.popen.send_signal(signal.SIGINT)
        late = []
        for peer in self.peers:
            try:
                peer.popen.wait(patience_s)
            except subprocess.TimeoutExpired:
                late.append(peer.name)
                peer.popen.kill()
        return late

    def kill(self) -> None:
        for peer in self.peers:
            if peer.popen.poll() is None:
                peer.popen.kill()
            peer.popen.wait()

    # --- what they do -------------------------------------------------------------------------------------------------
    def until(self, done: Callable[[], object], complaint: str, patience_s: float = 60.0) -> None:
        """Wait until `done()`. Raises SwarmFailed if a process ends before, or after `patience_s`."""
        eventually(lambda: self.failed() or done(), patience_s)
        if not done():
            said = "".join(f"\n--- {p.name}\n{p.said[-2000:]}" for p in self.peers)
            raise SwarmFailed(f"{complaint}; ended: {self.failed()}{said}")

    def failed(self) -> list[str]:
        """Names of processes that ended with an error."""
        return [p.name for p in self.peers if p.popen.poll() not in (None, 0) and p.name not in self.left]

    def steps(self, peer: PeerdProcess | None = None) -> list[float]:
        """Times in Unix seconds at which a trainer learned of the end of each global step."""
        return [event["time"] for event in (peer or self.trainer).events() if event["name"] == "trainer.stepped"]

    def wait_for_step(self, step: int, patience_s: float = 240.0, peer: PeerdProcess | None = None) -> None:
        """Wait until `step` global steps are done."""
        self.until(lambda: len(self.steps(peer)) >= step, f"step {step} was never done", patience_s)

    def moment(self) -> Moment:
        own = [peer.popen.pid for peer in self.peers]
        traffic = {name: host.traffic() for name, host in self.hosts.items()}
        return Moment(traffic, sum(map(cpu_s, own)), others_s(own))

    def measure(self, first: int, steps: int, patience_s: float = 240.0, *peers: PeerdProcess) -> list[Stretch]:
        """Measure the `steps` steps after the `first`, as each of these trainers sees them, or the only one does."""
        trainers = peers or (self.trainer,)
        for peer in trainers:
            self.wait_for_step(first, patience_s, peer)
        before = self.moment()
        for peer in trainers:
            self.wait_for_step(first + steps, patience_s, peer)
        after = self.moment()
        return [Stretch(self.steps(peer)[first - 1 : first + steps], before, after) for peer in trainers]
