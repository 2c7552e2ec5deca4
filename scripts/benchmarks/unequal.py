"""Peers of unequal speed in a pipeline: their common rate, relative to the sum of their possible rates.

Three stages of two peers each and one trainer, in virtual time; the middle stage limits the rate. `device`: one of its
peers has a four times slower device; `line`: one has a four times slower line, whose transfers take longer than
computing; `both`: one of each. Also reports the rate of a whole step, from its first to its last microbatch, which is
lower if the stage's peers do not finish together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import trio

from roles.trainer import TrainerRole
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._virtual_pipeline import LayerDevice, booted, in_virtual_time, start_stage
from scripts.benchmarks.pipeline import ACTIVATION_BYTES, STAGES, run_of
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.simnet import SimLine

SLOWER: Final = 4.0
DEVICE_S: Final = 0.1  # of a microbatch
LINE_S: Final = 0.08  # of a microbatch's activation and gradient
RTT_MS: Final = 50
MICROBATCHES: Final = 600
FROM, TO = 0.3, 0.9
LEAST: Final = 0.95
KINDS: Final[dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {  # of the middle stage: (device, line)
    "device": ((1.0, 1.0), (SLOWER, 1.0)),
    "line": ((1.0, 1.0), (1.0, SLOWER)),
    "both": ((1.0, SLOWER), (SLOWER, 1.0)),
}


@dataclass(frozen=True, slots=True)
class Unequal:
    """Rates in microbatches per second: of the full pipeline, of a whole step, and the possible one."""

    rate: float
    whole: float
    possible: float


def possible(kind: str) -> float:
    """Sum of the possible rates of the middle stage's peers, each limited by its device or line."""
    return sum(1.0 / max(device * DEVICE_S, line * LINE_S) for device, line in KINDS[kind])


async def _measured(kind: str, folder: Path) -> Unequal:
    run = run_of(folder, MICROBATCHES)
    mbit_s = 2 * ACTIVATION_BYTES * 8 / LINE_S / 1e6
    free = SimLine(latency_s=RTT_MS / 4e3)
    async with booted(line=free) as world:
        posts = []
        for stage in range(STAGES):
            for number, (slow, thin) in enumerate(KINDS[kind] if stage == 1 else ((1.0, 1.0), (1.0, 1.0))):
                line = SimLine(latency_s=RTT_MS / 4e3, up_mbit_s=mbit_s / thin, down_mbit_s=mbit_s / thin)
                device, name = LayerDevice(slow * DEVICE_S), f"stage{stage}{number}"
                roles, _ = await start_stage(world, run, folder, stage, device, line, name)
                posts += [roles.live[name]] if stage == 1 else []
        await world.start("trainer", line=free, program=Roles(run, folder).program(TrainerRole))

        def done() -> int:
            return sum(post.post.serving.samples if post.post else 0 for post in posts)

        marks = []
        for share in (0.0, FROM, TO, 1.0):  # of the second step: by then the trainer knows the peers
            goal = round(MICROBATCHES * (1.0 + share)) + (share == 0.0)
            assert await world.until(lambda goal=goal: done() >= goal, within_s=3_000.0, step_s=DEVICE_S / 4)
            marks.append((trio.current_time(), done()))
    return Unequal(_rate(*marks[1:3]), _rate(marks[0], marks[3]), possible(kind))


def _rate(earlier: tuple[float, int], later: tuple[float, int]) -> float:
    """Microbatches per second between two marks of time and microbatches done."""
    return (later[1] - earlier[1]) / (later[0] - earlier[0])


def measured(kind: str) -> Unequal:
    found: Unequal = in_virtual_time(_measured, kind)
    return found


def measure(full: bool) -> Report:
    torch.set_num_threads(1)
    microbatch = f"a microbatch takes {DEVICE_S:g} s of a device, {LINE_S:g} s of a line"
    note = f"{STAGES} stages of two peers, RTT {RTT_MS} ms; {microbatch}; one is {SLOWER:g} times slower"
    return Report("unequal peers", [[*_section(kind)] for kind in KINDS], note)


def _section(kind: str) -> Iterator[Figure]:
    found, told = measured(kind), {"device": "a slow device", "line": "a slow line", "both": "one of each"}[kind]
    yield Figure(f"{kind}_rate", f"{told}: microbatches a second", found.rate, "1/s", 2)
    share, whole_share = found.rate / found.possible, found.whole / found.possible
    yield Figure(f"{kind}_share", "  over the sum of what each can do", share, "", 3, at_least=LEAST)
    yield Figure(f"{kind}_whole_share", "  the same of a whole step", whole_share, "", 3)
