"""Direct hand-over on slow and far lines: `peerd` processes in a network lab, beside the same swarm in virtual time.

Three stages of one peer, a trainer and a backbone, each on a host of its own whose line carries 100 Mb/s each way; two
hosts are a round trip of 100 ms apart. Each mode of hand-over makes the same run: from stage to stage (`direct`), and
through the trainer. The model is so small that lines are what is waited for, so `share` is the speed over that of a
line that is always full: in `direct`, the middle stage's, which an activation and a gradient leave for each microbatch;
through the trainer, the trainer's own. Each run file states what the line carries, a little less than it does
(`limits.upload_mbit` and `download_mbit`), as who knows their line would; `unstated` is the share where none does, and
six connections fill a line's queue until it drops some of their packets. The lab's lines let packets wait for two round
trips before that, as home routers do; `short` is the share where they wait for half a one. The simulation runs the same
roles on lines of the stated rate, less what packets' headers take of it, and of the same delay, with the device time
that a microbatch took in the lab, where all processes share this machine. It knows no loss by congestion. Needs Linux,
root, iproute2, nftables and gcc.
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
from lab import WideLab, why_not_wide

from benchmarks._far_swarm import FarSwarm
from benchmarks._report import Figure, Report
from benchmarks._swarm import BASE
from benchmarks.pipeline import LayerDevice, start_stage
from peerd.core.decoders import convert
from peerd.core.run.runfile import RunFile
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.simnet import SimLine
from peerd.sim.wire import PACKET_BYTES
from peerd.sim.world import World, WorldConfig
from roles.trainer import TrainerRole
from tests.worlds.roles.virtualroles import Roles

STAGES: Final = 3
RATE_MBIT: Final = 100.0
STATED_MBIT: Final = 97.0  # by the run files: a queue that never fills loses nothing
RTT_MS: Final = 100.0
QUEUE_MS: Final = 2 * RTT_MS
SHORT_QUEUE_MS: Final = RTT_MS / 2
SAMPLES, CONTEXT, WIDTH = 64, 32, 48  # of a microbatch, and of its activations
MICROBATCHES: Final = 48
MODES: Final = ("direct", "trainer")
CROSSINGS: Final = {"direct": 2, "trainer": 3 * (STAGES - 1) - 1}  # of the fullest line, by a microbatch
ACTIVATION_BYTES: Final = 4 * SAMPLES * CONTEXT * WIDTH
STEP_TOKENS: Final = MICROBATCHES * SAMPLES * CONTEXT
HEADER_BYTES: Final = 20 + 32  # of a packet, as limits count it: IP, TCP with time stamps
WARM_STEPS: Final = 2  # until the trainer has found how many microbatches fill the stages
PATIENCE_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    tokens_per_s: float  # in the median step
    bytes_per_token: float  # that all lines together carried away from their hosts
    device_s: float  # that the middle stage computed for a microbatch

    def share(self, mode: str) -> float:
        """Speed over that of a line that is always full."""
        full = SAMPLES * CONTEXT / (CROSSINGS[mode] * ACTIVATION_BYTES * 8 / RATE_MBIT / 1e6)
        return self.tokens_per_s / full


def run_file(mode: str, steps: int, stated: bool) -> dict[str, Any]:
    return BASE | {
        "limits": {"upload_mbit": STATED_MBIT, "download_mbit": STATED_MBIT} if stated else {},
        "run": "handover",
        "model": {"d_model": WIDTH, "heads": 1, "layers": STAGES, "context": CONTEXT},
        "pipeline": {
            "stages": STAGES,
            "microbatch": SAMPLES,
            "handover": mode,
            "boundary": {"code": "none", "lossless": "never"},
        },
        "optimizer": {"name": "adamw", "lr": 5.0e-3, "total_steps": WARM_STEPS + steps + 2},
        "batch": {"target_samples": MICROBATCHES * SAMPLES},
    }


def in_the_lab(mode: str, steps: int, queue_ms: float, stated: bool) -> Measured:
    run = run_file(mode, steps, stated)
    with (
        tempfile.TemporaryDirectory(prefix="peerd-handover-") as folder,
        WideLab(up_mbit=RATE_MBIT, down_mbit=RATE_MBIT, delay_ms=RTT_MS / 4, queue_ms=queue_ms) as lab,
    ):
        swarm = FarSwarm(Path(folder), lab, run, None)
        swarm.start()
        swarm.wait_for_step(WARM_STEPS, PATIENCE_S)
        before = swarm.moment()
        swarm.wait_for_step(WARM_STEPS + steps, PATIENCE_S)
        after = swarm.moment()
        ends = swarm.steps()[WARM_STEPS - 1 : WARM_STEPS + steps]
        device_s = SAMPLES / swarm.peer("stage-1").role()["samples_per_s"]
    sent = sum(after.traffic[name].since(before.traffic[name]).sent for name in before.traffic)
    return _measured(ends, sent, device_s)


def _median_of(mode: str, steps: int, queue_ms: float, stated: bool, runs: int) -> Measured:
    """The run of median speed: from one to the next it differs, since all processes share this machine."""
    found = [in_the_lab(mode, steps, queue_ms, stated) for _ in range(runs)]
    return sorted(found, key=lambda one: one.tokens_per_s)[len(found) // 2]


def _measured(ends: Sequence[float], sent: float, device_s: float) -> Measured:
    median_s = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
    return Measured(STEP_TOKENS / median_s, sent / (STEP_TOKENS * (len(ends) - 1)), device_s)


def simulated(mode: str, steps: int, device_s: float) -> Measured:
    with tempfile.TemporaryDirectory(prefix="peerd-handover-") as folder:
        run = convert(run_file(mode, steps, stated=True), RunFile)
        return run_virtual(_simulated, run, Path(folder), steps, device_s, seed=1)


async def _simulated(run: RunFile, folder: Path, steps: int, device_s: float) -> Measured:
    mbit_s = STATED_MBIT * PACKET_BYTES / (PACKET_BYTES + HEADER_BYTES)
    line = SimLine(latency_s=RTT_MS / 4e3, up_mbit_s=mbit_s, down_mbit_s=mbit_s)
    async with World(1, swarm(), WorldConfig(line=lambda rng: line)).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        nodes = [boot]
        for stage in range(STAGES):
            _, node = await start_stage(world, run, folder, stage, LayerDevice(device_s), line)
            nodes.append(node)
        roles = Roles(run, folder)
        nodes.append(await world.start("trainer", program=roles.program(TrainerRole)))
        ends, sent = list[float](), list[int]()
        for step in range(WARM_STEPS, WARM_STEPS + steps + 1):
            await world.until(lambda step=step: roles.live["trainer"].status()["step"] >= step, within_s=1e4)
            ends.append(trio.current_time())
            sent.append(sum(node.host.traffic().bytes_out for node in nodes))
    return _measured(ends, sent[-1] - sent[0], device_s)


def measure(full: bool) -> Report:
    reason = why_not_wide()
    if reason is not None:
        raise SystemExit(reason)
    torch.set_num_threads(1)
    steps, runs, sections, device_ms = 8, (3 if full else 1), [], []
    for mode in MODES:
        real, unstated, short, short_unstated = (
            _median_of(mode, steps, queue_ms, stated, runs)
            for queue_ms in (QUEUE_MS, SHORT_QUEUE_MS)
            for stated in (True, False)
        )
        virtual = simulated(mode, steps, real.device_s)
        device_ms.append(f"{1e3 * real.device_s:.0f}")
        apart = 100 * abs(real.share(mode) - virtual.share(mode))
        told = "from stage to stage" if mode == "direct" else "through the trainer"
        sections.append(
            [
                Figure(f"{mode}_tokens_per_s", f"{told}: tokens a second", real.tokens_per_s, "", 0),
                Figure(f"{mode}_bytes_per_token", "  bytes on all lines", real.bytes_per_token, "B/token", 1),
                Figure(f"{mode}_share", "  of what the fullest line could carry", 100 * real.share(mode), "%", 1),
                Figure(f"{mode}_simulated_share", "  the same in virtual time", 100 * virtual.share(mode), "%", 1),
                Figure(f"{mode}_apart", "  points apart", apart, "", 1, at_most=5.0),
                Figure(f"{mode}_unstated_share", "  where no line is stated", 100 * unstated.share(mode), "%", 1),
                Figure(f"{mode}_short_share", "  where packets are dropped early", 100 * short.share(mode), "%", 1),
                Figure(
                    f"{mode}_short_unstated_share", "  likewise, unstated", 100 * short_unstated.share(mode), "%", 1
                ),
            ]
        )
    note = (
        f"{RATE_MBIT:g} Mb/s lines, stated as {STATED_MBIT:g}, RTT {RTT_MS:g} ms, {STAGES} stages of one layer, "
        f"d_model {WIDTH}, {STEP_TOKENS:,} tokens a step, {steps} steps, the median run of {runs}; "
        f"a microbatch took {' and '.join(device_ms)} ms of a device"
    )
    return Report("handover", sections, note)
