"""Trains a swarm of real processes under attack, and compares it with a run without attacks and with plain torch.

    python scripts/soak.py --minutes 30             2 stages x 3 peers and 2 trainers, 5 hostile processes at a time
    python scripts/soak.py --minutes 2 --calm 1 --only c1_syn_and_reset,h4_declared_sizes
    python scripts/soak.py --json                   the report as one JSON object on the last line

All samples are identical (`alike.py`), so samples that are counted twice, left out or wrong change the parameters. The
honest peers' lines are limited, so that processor time is left for the attackers. These have the lowest priority, since
real attackers compute on other machines. Linux only: memory is read from /proc, and all of 127/8 must be local.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peerd.core.decoders import convert
from peerd.run.runfile import RunFile
from scripts.alike import CONTEXT, alike_run, difference, write_text
from scripts.check_report import add_json, data_folder, show
from scripts.peerd_process import PeerdProcess
from scripts.process_swarm import ROOT, ProcessSwarm
from scripts.process_usage import resident_bytes

STAGES: Final = 2
PER_STAGE: Final = 3
TRAINERS: Final = 2
GROWTH_MB: Final = 300
SHARE: Final = 0.8
TOLERANCE: Final = 1e-10
SAMPLE_S: Final = 2.0  # between two checks of the processes
STEP_EVERY: Final = 5  # checks per status request, which disturbs the peer: it reads the directory to answer


def run_file(text: Path, line_mbit: float) -> dict[str, Any]:
    return alike_run(text) | {
        "run": "soak",
        "model": {"d_model": 64, "heads": 2, "layers": 2, "context": CONTEXT, "dtype": "float64"},
        "pipeline": {"stages": STAGES, "microbatch": 4},
        "averaging": {"sender_timeout_s": 5},
        "checkpoint": {"every_steps": 50, "keep": 4},
        "limits": {"upload_mbit": line_mbit, "download_mbit": line_mbit},
    }


@dataclass(slots=True)
class Soak(ProcessSwarm):
    """The processes of one soak test, and what was observed."""

    addresses: list[str] = field(default_factory=list)  # of the honest peers
    memory_mb: dict[str, list[float]] = field(default_factory=dict)  # of each honest process: first and most
    hostile: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def start_all(self) -> None:
        """Start the backbone, all stage peers and the trainers, and wait for 20 steps."""
        self.start_pipeline(PER_STAGE)
        for number in range(1, TRAINERS):
            self.join(f"trainer-{number}", "trainer")
        self.until(lambda: self.step() >= 20, "training did not begin", 180)
        self.addresses = [addr for peer in self.peers if (addr := peer.addr())]
        self.memory_mb = {peer.name: [memory_mb(peer)] * 2 for peer in self.peers}

    def step(self) -> int:
        """The newest step of any stage peer or trainer."""
        return max(step_of(each) for each in self.peers[1:])

    def attack(self, number: int, seed: int, only: str) -> None:
        """Start one more hostile process, at its own address."""
        of = {"run": self.folder / "trainer.yaml", "targets": ",".join(self.addresses)}
        of |= {"address": f"127.0.{number + 1}.1", "seed": seed} | ({"only": only} if only else {})
        with (self.folder / f"hostile{number}.log").open("ab") as output:
            self.hostile.append(
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.hostile.process", *(f"--{k}={v}" for k, v in of.items())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )

    def watch(self, seconds: float) -> float:
        """Watch the swarm, and record ended processes and peak memory. Returns the steps per second."""
        began, first, looks = time.monotonic(), self.step(), 0
        while time.monotonic() - began < seconds:
            time.sleep(SAMPLE_S)  # measures over a fixed time; there is no event to wait for
            for each in self.peers:
                first_mb, most_mb = self.memory_mb[each.name]
                self.memory_mb[each.name] = [first_mb, max(most_mb, memory_mb(each))]
                if each.popen.poll() is not None and each.name not in self.ended:
                    self.ended.append(each.name)
            looks += 1
            if looks % STEP_EVERY == 0:
                told = f"step {step_of(self.peers[1])}  ended {self.ended}"
                print(f"{time.monotonic() - began:6.0f} s  {told}", file=sys.stderr)
        return (self.step() - first) / (time.monotonic() - began)

    def calm_down(self) -> dict[str, int]:
        """End the hostile processes. Returns how often each attack was made."""
        for each in self.hostile:
            each.terminate()
        for each in self.hostile:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(20)
            each.kill()
        counts: dict[str, int] = {}
        for log in self.folder.glob("hostile*.log"):
            for line in log.read_text("utf-8", "replace").splitlines():
                with contextlib.suppress(ValueError):
                    did = json.loads(line).get("did")
                    if did:
                        counts[did] = counts.get(did, 0) + 1
        return dict(sorted(counts.items()))

    def faults(self) -> dict[str, Any]:
        """Internal errors in the status of the honest processes."""
        found = {each.name: each.status().get("faults") for each in self.peers}
        return {name: told for name, told in found.items() if told and told.get("count", 1)}

    def kill(self) -> None:
        for each in self.hostile:
            each.kill()
            each.wait()
        ProcessSwarm.kill(self)


def step_of(peer: PeerdProcess) -> int:
    """Step of a peer's first role, or -1 if its status is unknown."""
    return int(peer.role().get("step", -1))


def memory_mb(peer: PeerdProcess) -> float:
    return resident_bytes(peer.popen.pid) / (1 << 20)


def measure(soak: Soak, options: argparse.Namespace) -> dict[str, Any]:
    """Measure without, with, and again without attacks; then stop the swarm and compare its parameters."""
    rng = random.Random(options.seed)
    soak.start_all()
    before = soak.watch(options.calm * 60 / 2)
    for number in range(options.attackers):
        soak.attack(number, rng.getrandbits(32), options.only)
    hostile = soak.watch(options.minutes * 60)
    attacks = soak.calm_down()
    after = soak.watch(options.calm * 60 / 2)
    calm, faults = (before + after) / 2, soak.faults()
    soak.ended += [f"{name} did not leave" for name in soak.leave(20)]
    apart, steps = difference(convert(soak.run, RunFile), soak.replicas(PER_STAGE))
    growth = {name: round(most_mb - first_mb) for name, (first_mb, most_mb) in soak.memory_mb.items()}
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "steps": steps,
        "calm_steps_per_s": calm,
        "hostile_steps_per_s": hostile,
        "share": hostile / calm if calm else 0.0,
        "ended": soak.ended,
        "memory_growth_mb": growth,
        "largest_difference": apart,
        "faults": faults,
        "attacks": attacks,
        "met": not soak.ended and hostile >= SHARE * calm and max(growth.values()) <= GROWTH_MB and apart <= TOLERANCE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train among hostile peers.")
    parser.add_argument("--minutes", type=float, default=30.0, help="of attacks")
    parser.add_argument("--calm", type=float, default=4.0, help="minutes without, half before and half after")
    parser.add_argument("--attackers", type=int, default=5)
    parser.add_argument("--line-mbit", type=float, default=10.0, help="of each honest peer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names of attacks, with commas between")
    parser.add_argument("--keep", type=Path, help="folder for logs and data, which stays")
    add_json(parser)
    options = parser.parse_args()
    with (
        data_folder("peerd-soak-", options.keep) as folder,
        Soak(folder, run_file(write_text(folder), options.line_mbit)) as soak,
    ):
        return show(measure(soak, options), options.json)


if __name__ == "__main__":
    sys.exit(main())
