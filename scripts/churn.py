"""Trains a pipeline of real processes; every 30 s one is killed and one joins, and moves keep the stages balanced.

    python scripts/churn.py --minutes 10            3 stages of 2 or 3 peers, one of them throttled, and a trainer
    python scripts/churn.py --minutes 2 --json      the report as one JSON object on the last line

Reports the first and last loss, the longest time without a step, and all moves with their reasons. By its priority, the
throttled peer gets a quarter of the others' share of a busy machine. The script never kills the last peer of a stage.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from scripts.check_report import add_json, add_keep, data_folder, show
from scripts.process_swarm import ProcessSwarm
from scripts.waiting import eventually

STAGES: Final = 3
FIRST: Final = 7  # stage peers at the start
LOOK_S: Final = 0.5
STALL_S: Final = 10.0
THROTTLED: Final = "17"  # niceness; the others' is 10
RUN: Final = """\
run: churn
seed: 3
model: {d_model: 96, heads: 4, layers: 6, context: 64}
pipeline: {stages: 3, microbatch: 4}
optimizer: {name: adamw, lr: 2.0e-3}
batch: {target_samples: 96}
averaging: {sender_timeout_s: 5}
data: {path: stdlib}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 10, keep: 2}
"""


@dataclass(slots=True)
class Churn(ProcessSwarm):
    """The processes of the test, and what was observed."""

    rng: random.Random = field(kw_only=True)
    losses: list[tuple[int, float]] = field(default_factory=list)
    longest_stall_s: float = 0.0

    def start_all(self) -> None:
        """Start the backbone, the stage peers and the trainer, and wait for the first three steps."""
        self.start_backbone()
        self.join("trainer", "trainer")
        for number in range(FIRST):
            self.join_stage("--nice", THROTTLED) if not number else self.join_stage()
        self.until(lambda: self.step() >= 3, "training did not begin", 180)

    def join_stage(self, *options: str) -> None:
        """Start one more stage peer."""
        self.join(f"stage{len(self.peers)}", "stage", *options)

    def step(self) -> int:
        """The trainer's step, or -1 if its status is unknown. Records the loss of a new step."""
        role = self.peer("trainer").role()
        step = int(role.get("step", -1))
        if step > 0 and (not self.losses or self.losses[-1][0] != step):
            self.losses.append((step, float(role.get("loss", "nan"))))
        return step

    def step_after(self, step: int) -> int:
        """The trainer's step if it is later than `step`, else 0."""
        return now if (now := self.step()) > step else 0

    def kill_one(self) -> str:
        """Kill a peer of a stage that has others. Returns its name and stage, or "" if there is none."""
        living = [peer for peer in self.peers[2:] if peer.name not in self.left]
        stages = {peer.name: peer.role().get("stage", -1) for peer in living}
        count = Counter(stages.values())
        spare = [peer for peer in living if count[stages[peer.name]] > 1]
        if not spare:
            return ""
        lost = self.rng.choice(spare)
        self.end(lost, signal.SIGKILL)
        return f"{lost.name} of stage {stages[lost.name]}"

    def watch(self, minutes: float, every_s: float) -> None:
        """Watch the training for `minutes`; every `every_s` seconds kill a peer and start another one."""
        began = stepped_at = time.monotonic()
        step, due = self.step(), every_s
        while (passed := time.monotonic() - began) < 60 * minutes:
            if now := eventually(partial(self.step_after, step), LOOK_S):
                step, stepped_at = now, time.monotonic()
            self.longest_stall_s = max(self.longest_stall_s, time.monotonic() - stepped_at)
            if passed >= due:
                due += every_s
                lost = self.kill_one()
                self.join_stage()
                print(f"{passed:6.0f} s  step {step}  killed {lost}, one joins", file=sys.stderr)

    def moves(self) -> list[str]:
        """Messages on all completed and failed moves in the peers' event logs."""
        return [
            f"{each.name} {event['name']} from stage {event['before']} to {event['stage']}: "
            f"{event.get('why') or event.get('reason')}"
            for each in self.peers
            for event in each.events()
            if event["name"] in ("stage.moved", "stage.move_failed")
        ]


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def measure(churn: Churn, options: argparse.Namespace) -> dict[str, Any]:
    churn.start_all()
    churn.watch(options.minutes, options.every)
    ended = [p.name for p in churn.peers if p.popen.poll() is not None and p.name not in churn.left]
    losses = [loss for _, loss in churn.losses]
    first, last = mean(losses[:10]), mean(losses[-10:])
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "steps": churn.losses[-1][0],
        "kills": len(churn.left),
        "first_loss": first,
        "last_loss": last,
        "longest_stall_s": churn.longest_stall_s,
        "ended_by_themselves": ended,
        "moves": churn.moves(),
        "met": last < first and churn.longest_stall_s <= STALL_S and not ended,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train while peers come and go.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two deaths, each with an arrival")
    parser.add_argument("--seed", type=int, default=1)
    add_keep(parser)
    add_json(parser)
    options = parser.parse_args()
    with (
        data_folder("peerd-churn-", options.keep) as folder,
        Churn(folder, yaml.safe_load(RUN), rng=random.Random(options.seed)) as churn,
    ):
        return show(measure(churn, options), options.json)


if __name__ == "__main__":
    sys.exit(main())
