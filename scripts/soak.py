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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peerd.config import load_run
from scripts.alike import difference, write_text
from scripts.peerd_process import PeerdProcess
from scripts.waiting import eventually

STAGES: Final = 2
PER_STAGE: Final = 3
TRAINERS: Final = 2
GROWTH_MB: Final = 300
SHARE: Final = 0.8
TOLERANCE: Final = 1e-10
SAMPLE_S: Final = 2.0  # between two checks of the processes
STEP_EVERY: Final = 5  # checks per status request, which disturbs the peer: it reads the directory to answer
RUN = """\
run: soak
seed: 11
model: {{d_model: 64, heads: 2, layers: 2, context: 32, dtype: float64}}
pipeline: {{stages: 2, microbatch: 4}}
optimizer: {{name: sgd, lr: 0.02}}
batch: {{target_samples: 32}}
averaging: {{sender_timeout_s: 5}}
data: {{path: "{text}", holdout: 0, shuffle_buffer: 100}}
evaluate: {{every_steps: 0}}
checkpoint: {{every_steps: 50, keep: 4}}
limits: {{upload_mbit: {mbit}, download_mbit: {mbit}{stage}}}
"""


class Honest(PeerdProcess):
    """One honest process."""

    start_mb = most_mb = 0.0
    address = ""

    def step(self) -> int:
        """Step of its first role, or -1 if its status is unknown."""
        return int(self.role().get("step", -1))

    def memory_mb(self) -> float:
        """Resident memory; 0 after the process has ended."""
        try:
            pages = int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass
class Soak:
    """The processes of one soak test, and what was observed."""

    folder: Path
    line_mbit: float = 10.0  # of each honest peer, both ways
    honest: list[Honest] = field(default_factory=list)
    hostile: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def run_file(self, stage: int | None = None) -> Path:
        """Write the run file for a peer of a stage, or for a trainer if `stage` is None. Returns its path."""
        text = write_text(self.folder)
        file = self.folder / ("run.yaml" if stage is None else f"run-{stage}.yaml")
        file.write_text(RUN.format(text=text, mbit=self.line_mbit, stage="" if stage is None else f", stage: {stage}"))
        return file

    def start(self, name: str, *arguments: str) -> Honest:
        found = Honest(name, self.folder, arguments)
        self.honest.append(found)
        return found

    def start_all(self) -> None:
        """Start the backbone, all stage peers and the trainers, and wait for 20 steps."""
        listen = ("--listen", "/ip4/127.0.0.1/tcp/0")
        backbone = self.start("backbone", "backbone", *listen)
        bootstrap = eventually(backbone.addr, 60)
        if not bootstrap:
            raise SystemExit(f"the backbone never listened: see {self.folder}/backbone.log")
        join = ("--bootstrap", bootstrap, *listen)
        for number in range(STAGES * PER_STAGE):
            file = str(self.run_file(number % STAGES))
            self.start(f"stage{number}", "join", "--role", "stage", "--model", file, *join)
        for number in range(TRAINERS):
            self.start(f"trainer{number}", "join", "--role", "trainer", "--model", str(self.run_file()), *join)
        if not eventually(lambda: self.step() >= 20, 180):
            raise SystemExit(f"training did not begin: see the logs in {self.folder}")
        for each in self.honest:
            each.address = each.addr()
            each.start_mb = each.most_mb = each.memory_mb()

    def step(self) -> int:
        """The newest step of any stage peer or trainer."""
        return max(each.step() for each in self.honest[1:])

    def attack(self, number: int, seed: int, only: str) -> None:
        """Start one more hostile process, at its own address."""
        targets = ",".join(each.address for each in self.honest if each.address)
        with (self.folder / f"hostile{number}.log").open("ab") as output:
            arguments = ["--run", str(self.run_file()), "--targets", targets, "--address", f"127.0.{number + 1}.1"]
            self.hostile.append(
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.hostile.process", *arguments]
                    + ["--seed", str(seed)]
                    + (["--only", only] if only else []),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).resolve().parents[1],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )

    def watch(self, seconds: float) -> float:
        """Watch the swarm, and record ended processes and peak memory. Returns the steps per second."""
        began, first, looks = time.monotonic(), self.step(), 0
        while time.monotonic() - began < seconds:
            time.sleep(SAMPLE_S)  # measures over a fixed time; there is no event to wait for
            for each in self.honest:
                each.most_mb = max(each.most_mb, each.memory_mb())
                if each.popen.poll() is not None and each.name not in self.ended:
                    self.ended.append(each.name)
            looks += 1
            if looks % STEP_EVERY == 0:
                told = f"step {self.honest[1].step()}  ended {self.ended}"
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
        found = {each.name: each.status().get("faults") for each in self.honest}
        return {name: told for name, told in found.items() if told and told.get("count", 1)}

    def replicas(self) -> list[dict[int, Path]]:
        """For each replica, the folders of its stages' peers."""
        folders = {each.name: each.data_dir for each in self.honest}
        stages = range(STAGES)
        return [{s: folders[f"stage{STAGES * number + s}"] for s in stages} for number in range(PER_STAGE)]

    def stop(self) -> None:
        """Stop all honest processes with SIGINT, and kill those that do not end."""
        for each in reversed(self.honest):
            if each.popen.poll() is None:
                each.popen.send_signal(signal.SIGINT)
        for each in self.honest:
            try:
                each.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.ended.append(f"{each.name} did not leave")
                each.popen.kill()


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
    soak.stop()
    apart, steps = difference(load_run(soak.run_file()).run, soak.replicas())
    growth = {each.name: round(each.most_mb - each.start_mb) for each in soak.honest}
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
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="peerd-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, options.line_mbit)
    try:
        report = measure(soak, options)
    finally:
        for each in [*soak.hostile, *(one.popen for one in soak.honest)]:
            if each.poll() is None:
                each.kill()
            each.wait()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report) if options.json else "\n".join(f"{name}: {value}" for name, value in report.items()))
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
