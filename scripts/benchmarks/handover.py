"""Handover on slow lines with long delays: `peerd` processes in a network lab, and the same swarm in virtual time.

Three stages of one peer, a trainer and a backbone, each on its own host with a line of 100 Mb/s each way; the round
trip between two hosts is 100 ms. The model is so small that the lines limit the speed, so `share` is the speed relative
to that of a line that is always full: the middle stage's, which sends an activation and a gradient for each microbatch.
Each run file states slightly less than the line's rate (`limits.upload_mbit` and `download_mbit`), as recommended.
`unstated` is the share without that, when connections fill a line's queue until it drops packets. The queues of the
lab's lines hold two round trips, like home routers; `short` is the share with queues of half a round trip. The
simulation runs the same roles on lines with the stated rate less the packets' headers, and the same delay, with the
device time of a microbatch measured in the lab, where all processes share this machine. It has no loss by congestion.
Needs Linux, root, iproute2, nftables and gcc.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import trio

from peerd.core.decoders import convert
from peerd.run.runfile import RunFile
from roles.trainer import TrainerRole
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._virtual_pipeline import LayerDevice, booted, in_virtual_time, start_stage
from scripts.lab import WideLab, why_not_wide
from scripts.process_swarm import BASE, ProcessSwarm
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.sim_pipe import PACKET_BYTES
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import WorldConfig

WHY_NOT = why_not_wide
STAGES: Final = 3
RATE_MBIT: Final = 100.0
STATED_MBIT: Final = 97.0  # in the run files; below the rate, so that queues do not fill and drop packets
RTT_MS: Final = 100.0
QUEUE_MS: Final = 2 * RTT_MS
SHORT_QUEUE_MS: Final = RTT_MS / 2
SAMPLES, CONTEXT, WIDTH = 64, 32, 48  # of a microbatch, and of its activations
MICROBATCHES: Final = 48
CROSSINGS: Final = 2  # tensors per microbatch on the busiest line
ACTIVATION_BYTES: Final = 4 * SAMPLES * CONTEXT * WIDTH
STEP_TOKENS: Final = MICROBATCHES * SAMPLES * CONTEXT
HEADER_BYTES: Final = 20 + 32  # of a packet, as counted by limits: IP, and TCP with timestamps
WARM_STEPS: Final = 2  # until the trainer knows how many microbatches fill the stages


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one run."""

    tokens_per_s: float  # in the median step
    bytes_per_token: float  # sent by all hosts together
    device_s: float  # computing time of the middle stage per microbatch

    @property
    def percent(self) -> float:
        """Speed relative to that of a line that is always full."""
        full = SAMPLES * CONTEXT / (CROSSINGS * ACTIVATION_BYTES * 8 / RATE_MBIT / 1e6)
        return 100 * self.tokens_per_s / full


def run_file(steps: int, stated: bool) -> dict[str, Any]:
    return BASE | {
        "limits": {"upload_mbit": STATED_MBIT, "download_mbit": STATED_MBIT} if stated else {},
        "run": "handover",
        "model": {"d_model": WIDTH, "heads": 1, "layers": STAGES, "context": CONTEXT},
        "pipeline": {"stages": STAGES, "microbatch": SAMPLES, "boundary": {"code": "none", "lossless": "never"}},
        "optimizer": {"name": "adamw", "lr": 5.0e-3, "total_steps": WARM_STEPS + steps + 2},
        "batch": {"target_samples": MICROBATCHES * SAMPLES},
    }


def in_the_lab(steps: int, queue_ms: float, stated: bool) -> Measured:
    run = run_file(steps, stated)
    with (
        tempfile.TemporaryDirectory(prefix="peerd-handover-") as folder,
        WideLab(up_mbit=RATE_MBIT, down_mbit=RATE_MBIT, delay_ms=RTT_MS / 4, queue_ms=queue_ms) as lab,
    ):
        swarm = ProcessSwarm(Path(folder), run, lab.host)
        swarm.start_pipeline()
        (found,) = swarm.measure(WARM_STEPS, steps)
        device_s = SAMPLES / swarm.peer("stage-1").role()["samples_per_s"]
    return _measured(found.ends, found.sent, device_s)


def _median_of(steps: int, queue_ms: float, stated: bool, runs: int) -> Measured:
    """The run with the median speed. Runs differ, since all processes share this machine."""
    found = [in_the_lab(steps, queue_ms, stated) for _ in range(runs)]
    return sorted(found, key=lambda one: one.tokens_per_s)[len(found) // 2]


def _measured(ends: Sequence[float], sent: float, device_s: float) -> Measured:
    median_s = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
    return Measured(STEP_TOKENS / median_s, sent / (STEP_TOKENS * (len(ends) - 1)), device_s)


def simulated(steps: int, device_s: float) -> Measured:
    run = convert(run_file(steps, stated=True), RunFile)
    found: Measured = in_virtual_time(_simulated, run, steps, device_s)
    return found


async def _simulated(run: RunFile, steps: int, device_s: float, folder: Path) -> Measured:
    mbit_s = STATED_MBIT * PACKET_BYTES / (PACKET_BYTES + HEADER_BYTES)
    line = SimLine(latency_s=RTT_MS / 4e3, up_mbit_s=mbit_s, down_mbit_s=mbit_s)
    async with booted(config=WorldConfig(line=lambda rng: line)) as world:
        for stage in range(STAGES):
            await start_stage(world, run, folder, stage, LayerDevice(device_s), line)
        roles = Roles(run, folder)
        await world.start("trainer", program=roles.program(TrainerRole))
        ends, sent = list[float](), list[int]()
        for step in range(WARM_STEPS, WARM_STEPS + steps + 1):
            await world.until(lambda step=step: roles.live["trainer"].status()["step"] >= step, within_s=1e4)
            ends.append(trio.current_time())
            sent.append(sum(node.host.traffic().bytes_out for node in world.living()))
    return _measured(ends, sent[-1] - sent[0], device_s)


def measure(full: bool) -> Report:
    torch.set_num_threads(1)
    steps, runs = 8, (3 if full else 1)
    real, unstated, short, short_unstated = (
        _median_of(steps, queue_ms, stated, runs) for queue_ms in (QUEUE_MS, SHORT_QUEUE_MS) for stated in (True, False)
    )
    virtual = simulated(steps, real.device_s)
    apart = abs(real.percent - virtual.percent)
    figures = [
        Figure("direct_tokens_per_s", "tokens a second", real.tokens_per_s, "", 0),
        Figure("direct_bytes_per_token", "  bytes on all lines", real.bytes_per_token, "B/token", 1),
        Figure("direct_share", "  of what the fullest line could carry", real.percent, "%", 1),
        Figure("direct_simulated_share", "  the same in virtual time", virtual.percent, "%", 1),
        Figure("direct_apart", "  points apart", apart, "", 1, at_most=5.0),
        Figure("direct_unstated_share", "  where no line is stated", unstated.percent, "%", 1),
        Figure("direct_short_share", "  where packets are dropped early", short.percent, "%", 1),
        Figure("direct_short_unstated_share", "  likewise, unstated", short_unstated.percent, "%", 1),
    ]
    note = (
        f"{RATE_MBIT:g} Mb/s lines, stated as {STATED_MBIT:g}, RTT {RTT_MS:g} ms, {STAGES} stages of one layer, "
        f"d_model {WIDTH}, {STEP_TOKENS:,} tokens a step, {steps} steps, the median run of {runs}; "
        f"a microbatch took {1e3 * real.device_s:.0f} ms of a device"
    )
    return Report("handover", [figures], note)
