"""Real size: replicas of 126 million parameters and a pipeline of 352 million on home lines, with kills and newcomers.

Real `peerd` processes, each on its own host in a network lab (needs root). Not for CI: it takes an hour on two idle
cores, and 16 GB of memory. Four replicas average in int8 with 20 Mb/s up and 100 down; then one is killed during a
round, one joins, and one leaves. Then a replica with 1 Mb/s joins three others. Four stages, the first with two peers,
have lines of 50 Mb/s and round trips of 60 ms. The bound of a step is the time of its bytes on the lines, plus the time
of plain torch for the batch on all cores of this machine, measured in the same run, since all peers share these cores.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from scripts.benchmarks._report import Figure, Report
from scripts.lab import WideLab, why_not_wide
from scripts.plain_torch import Alone, alone
from scripts.process_swarm import BASE, CORES, ProcessSwarm, SwarmFailed
from scripts.process_usage import resident_peak

WHY_NOT = why_not_wide
BYTES_PER_MBIT: Final = 125_000.0
PAYLOAD: Final = 0.95  # share of a line's rate without the headers of Ethernet, IP, TCP and Noise
INT8_BYTES: Final = 1 + 4 / 64  # per value, with its share of the block's scale
PATIENCE_S: Final = 1800.0
MOST_OVER_BOUND: Final = 1.3
MOST_COST: Final = 1.1
MOST_OVER_TORCH: Final = 1.5
_RESTS, _CONTRIBUTES = "stage.rests", "stage.contributes"  # events


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the measurement."""

    width: int
    heads: int
    layers: int  # of the replicas
    deep_layers: int  # of the pipeline
    samples: int  # of a step of the replicas; enough that the conductor lets none of the four rest
    deep_samples: int  # of a step of the pipeline
    up_mbit: float
    down_mbit: float
    pipe_mbit: float
    slow_mbit: float


REAL: Final = Sizes(1024, 16, 10, 28, 96, 16, 20.0, 100.0, 50.0, 1.0)
TINY: Final = Sizes(64, 2, 2, 4, 96, 8, 20.0, 100.0, 15.0, 0.1)  # to test the benchmark itself


def run_file(kind: str, sizes: Sizes, stages: int) -> dict[str, Any]:
    deep = stages > 1
    layers, samples = (sizes.deep_layers, sizes.deep_samples) if deep else (sizes.layers, sizes.samples)
    return BASE | {
        "run": f"real-{kind}",
        "model": {"d_model": sizes.width, "heads": sizes.heads, "layers": layers, "context": 64},
        "pipeline": {"stages": stages, "microbatch": 1},
        "optimizer": {"name": "adamw", "lr": 1.0e-4, "total_steps": 10_000},
        "averaging": {"code": "int8"},
        "batch": {"target_samples": samples},
    }


def plain_torch(run: dict[str, Any]) -> Alone:
    """Measure the same model, batch and optimizer in one process on all cores, without stages."""
    return alone(run | {"pipeline": run["pipeline"] | {"stages": 1}}, 0, CORES)


def line_s(parameters: int, peers: int, mbit: float) -> float:
    """Seconds that the bytes of an averaging round take if all peers have the same line."""
    return 2 * (peers - 1) / peers * parameters * INT8_BYTES / (mbit * BYTES_PER_MBIT * PAYLOAD)


def mean_step_s(swarm: RealSwarm, names: Sequence[str], first: int, steps: int) -> float:
    """Mean seconds of the `steps` steps after `first`."""
    began = swarm.wait_for_step_of(names, first, PATIENCE_S)
    return (swarm.wait_for_step_of(names, first + steps, PATIENCE_S) - began) / steps


@dataclass(slots=True)
class RealSwarm(ProcessSwarm):
    """The processes of one run, each on a host with its own line."""

    lab: WideLab = field(kw_only=True)

    @classmethod
    def started(cls, folder: str, run: dict[str, Any], lab: WideLab) -> Self:
        """A swarm whose backbone runs, on a fast line."""
        swarm = cls(Path(folder), run, lambda name: lab.hosts.get(name) or lab.host(name), ("--threads", "1"), lab=lab)
        swarm.start_backbone()
        return swarm

    def join_with_line(self, name: str, role: str, up_mbit: float, down_mbit: float, **limits: Any) -> None:
        """Start a peer with a line of these rates, which its limits state."""
        self.lab.host(name, up_mbit=up_mbit, down_mbit=down_mbit)
        logged = () if role == "trainer" else ("--log-level", "debug")  # logs each step
        self.join(name, role, *logged, upload_mbit=up_mbit, download_mbit=down_mbit, **limits)

    def interrupt(self, name: str) -> float:
        """End a peer with SIGINT. Returns the seconds that this took."""
        peer, began = self.peer(name), time.monotonic()
        if self.end(peer, patience_s=600) != 0:
            raise SwarmFailed(f"{name} ended with code {peer.popen.returncode}\n{peer.said[-2000:]}")
        return time.monotonic() - began

    def made(self, names: Iterable[str]) -> dict[int, float]:
        """For each step, the time in Unix seconds at which the last of these peers had made it."""
        found: dict[int, float] = {}
        for name in names:
            for event in self._stepped(name):
                found[event["step"]] = max(event["time"], found.get(event["step"], 0.0))
        return found

    def wait_for_step_of(self, names: Iterable[str], step: int, patience_s: float) -> float:
        """Wait until all these peers have made `step`. Returns the time at which the last of them had."""
        names = list(names)

        def done() -> bool:
            if idle := [name for name in names if self.rests(name)]:
                raise SwarmFailed(f"{idle} rest, though they should contribute")
            return all(any(event["step"] >= step for event in self._stepped(name)) for name in names)

        self.until(done, f"step {step} was never made by all of {names}", patience_s)
        return self.made(names)[step]

    def step_s(self, first: int, steps: int, patience_s: float) -> float:
        """Mean seconds of the `steps` steps after `first`, made by any peers."""
        for step in (first, first + steps):
            self.until(lambda step=step: self.newest() >= step, f"step {step} was never made", patience_s)
        made = self.made([peer.name for peer in self.peers])
        return (made[first + steps] - made[first]) / steps

    def rests(self, name: str) -> bool:
        """True if the conductor has ordered this peer to rest."""
        told = [event["name"] for event in self.peer(name).events() if event["name"] in (_RESTS, _CONTRIBUTES)]
        return bool(told) and told[-1] == _RESTS

    def newest(self) -> int:
        """The newest step that any peer has made."""
        return max((e["step"] for peer in self.peers for e in self._stepped(peer.name)), default=0)

    def unequal_sums(self) -> list[str]:
        """Steps at which peers of a stage had different sums."""
        sums: dict[tuple[int, int], set[str]] = {}
        for peer in self.peers:
            for event in self._stepped(peer.name):
                sums.setdefault((event["stage"], event["step"]), set()).add(event["digest"])
        return [f"stage {stage}, step {step}" for (stage, step), found in sorted(sums.items()) if len(found) > 1]

    def _stepped(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.peer(name).events() if event["name"] == "stage.stepped"]


@dataclass(slots=True)
class Found:
    """All results. Times are seconds of a step, if not stated otherwise."""

    replicas_s: float = 0.0
    replicas_bound_s: float = 0.0
    killed_s: float = 0.0  # the step in which a peer was killed
    joined_s: float = 0.0  # from the start of a newcomer to its first step
    left_s: float = 0.0  # from SIGINT to the end of the process
    before_slow_s: float = 0.0
    with_slow_s: float = 0.0
    pipeline_s: float = 0.0
    pipeline_bound_s: float = 0.0
    over_torch: float = 0.0  # the largest replica's peak memory over plain torch's
    peak_per_parameter: float = 0.0
    unequal: int = 0  # steps in which peers had different sums


def measure_replicas(sizes: Sizes, found: Found) -> None:
    """Parts (a) and (c). `contributors` is set to all: the peers share cores, so fewer would be nearly as fast."""
    run = run_file("replicas", sizes, 1)
    run["averaging"]["contributors"] = "all"
    plain = plain_torch(run)
    found.replicas_bound_s = plain.step_s + line_s(plain.parameters, 4, sizes.up_mbit)
    with tempfile.TemporaryDirectory(prefix="peerd-real-") as folder, WideLab(delay_ms=10) as lab:
        swarm = RealSwarm.started(folder, run, lab)
        names = [f"replica-{number}" for number in range(4)]
        for name in names:
            swarm.join_with_line(name, "trainer", sizes.up_mbit, sizes.down_mbit)
        found.replicas_s = mean_step_s(swarm, names, 1, 3)
        told(f"(a) {found.replicas_s:.1f} s a step, bound {found.replicas_bound_s:.1f} s")
        peak = max(resident_peak(swarm.peer(name).popen.pid) for name in names)
        found.over_torch, found.peak_per_parameter = peak / plain.peak, peak / plain.parameters
        change_members(swarm, sizes, plain, found)
        found.unequal += len(swarm.unequal_sums())


def change_members(swarm: RealSwarm, sizes: Sizes, plain: Alone, found: Found) -> None:
    """Part (c): kill a peer during a round, start a new one, and let one leave."""
    step, began = swarm.newest(), swarm.made(["replica-0"])[swarm.newest()]
    time.sleep(max(0.0, began + plain.step_s + (found.replicas_bound_s - plain.step_s) / 2 - time.time()))
    swarm.end(swarm.peer("replica-3"), signal.SIGKILL)
    rest = [f"replica-{number}" for number in range(3)]
    found.killed_s = swarm.wait_for_step_of(rest, step + 1, PATIENCE_S) - began
    told(f"(c) the step in which one died: {found.killed_s:.1f} s")

    began = time.time()
    swarm.join_with_line("replica-4", "trainer", sizes.up_mbit, sizes.down_mbit)
    step = swarm.newest()
    swarm.until(lambda: bool(swarm.made(["replica-4"])), "the newcomer made no step", PATIENCE_S)
    found.joined_s = min(swarm.made(["replica-4"]).values()) - began
    told(f"(c) a newcomer made its first step after {found.joined_s:.1f} s, {swarm.newest() - step} steps later")

    found.left_s = swarm.interrupt("replica-2")
    told(f"(c) one that left took {found.left_s:.1f} s")


def measure_slow(sizes: Sizes, found: Found) -> None:
    """Part (d), where the conductor chooses the contributors."""
    run = run_file("slow", sizes, 1)
    with tempfile.TemporaryDirectory(prefix="peerd-real-") as folder, WideLab(delay_ms=10) as lab:
        swarm = RealSwarm.started(folder, run, lab)
        names = [f"replica-{number}" for number in range(3)]
        for name in names:
            swarm.join_with_line(name, "trainer", sizes.up_mbit, sizes.down_mbit)
        found.before_slow_s = swarm.step_s(1, 2, PATIENCE_S)
        swarm.join_with_line("slow", "trainer", sizes.slow_mbit, sizes.slow_mbit)
        swarm.until(lambda: swarm.rests("slow"), "the slow one does not rest", PATIENCE_S)
        found.with_slow_s = swarm.step_s(swarm.newest() + 1, 2, PATIENCE_S)
        told(f"(d) {found.before_slow_s:.1f} s a step, {found.with_slow_s:.1f} s with a slow one that joined")
        found.unequal += len(swarm.unequal_sums())


def measure_pipeline(sizes: Sizes, found: Found) -> None:
    """Part (b), the pipeline."""
    run = run_file("pipeline", sizes, 4)
    plain = plain_torch(run)
    found.pipeline_bound_s = plain.step_s + line_s(plain.parameters // 4, 2, sizes.pipe_mbit)
    with tempfile.TemporaryDirectory(prefix="peerd-real-") as folder, WideLab(delay_ms=15) as lab:
        swarm = RealSwarm.started(folder, run, lab)
        names = [f"stage-{number}" for number in range(5)]
        for number, name in enumerate(names):
            swarm.join_with_line(name, "stage", sizes.pipe_mbit, sizes.pipe_mbit, stage=number % 4)
        swarm.join_with_line("trainer", "trainer", sizes.pipe_mbit, sizes.pipe_mbit)
        found.pipeline_s = mean_step_s(swarm, names, 1, 3)
        told(f"(b) {found.pipeline_s:.1f} s a step, bound {found.pipeline_bound_s:.1f} s")
        found.unequal += len(swarm.unequal_sums())


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(full: bool) -> Report:
    return measured(REAL)


def measured(sizes: Sizes) -> Report:
    """Run all parts with these sizes."""
    found = Found()
    measure_replicas(sizes, found)
    measure_slow(sizes, found)
    measure_pipeline(sizes, found)
    cost = found.with_slow_s / found.before_slow_s
    lines = [
        Figure("replicas_s", "four replicas: a step", found.replicas_s, "s", 1),
        Figure("replicas_bound_s", "bound by lines and plain torch", found.replicas_bound_s, "s", 1),
        over("replicas_over_bound", found.replicas_s, found.replicas_bound_s),
    ]
    pipe = [
        Figure("pipeline_s", "four stages, one of two peers: a step", found.pipeline_s, "s", 1),
        Figure("pipeline_bound_s", "bound by lines and plain torch", found.pipeline_bound_s, "s", 1),
        over("pipeline_over_bound", found.pipeline_s, found.pipeline_bound_s),
    ]
    change = [
        Figure("killed_s", "the step in which one was killed in mid-round", found.killed_s, "s", 1),
        Figure("joined_s", "from a newcomer's start to its first step", found.joined_s, "s", 1),
        Figure("left_s", "from Ctrl+C to the end of a replica's process", found.left_s, "s", 1),
        Figure("slow_cost", "a step beside a slow line over one without it", cost, "", 3, at_most=MOST_COST),
        Figure("unequal", "steps with different sums", found.unequal, "", 0, at_most=0),
    ]
    memory = [
        Figure("peak_per_parameter", "a replica's peak, bytes a parameter", found.peak_per_parameter, "B", 1),
        Figure("over_torch", "over plain torch's", found.over_torch, "", 2, at_most=MOST_OVER_TORCH),
    ]
    note = "all peers share this machine's cores; the bound has them all for plain torch"
    return Report("Real size", [lines, pipe, change, memory], note)


def over(key: str, seconds: float, bound_s: float) -> Figure:
    return Figure(key, "over the bound", seconds / bound_s, "", 2, at_most=MOST_OVER_BOUND)
