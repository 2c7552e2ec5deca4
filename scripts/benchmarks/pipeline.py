"""Pipelines in virtual time: utilization of devices at growing delays, compared with SWARM's Table 1 and closed form.

Real roles, calls and steps in virtual time, with simulated devices: one trainer and three stages of one peer, each peer
with its own line. A model's layers take t ms of device time per microbatch, 1/3.5 of it for the forward pass (the
backward pass takes 2.5 times as long), and its activation and gradient together take c ms of a line, as in the paper at
500 Mb/s; tensors and rates are reduced by the same factor. `utilization` is the mean share of busy device time over all
stages, between 30 % and 90 % of a step's microbatches. The fill and drain of a synchronous step is reported separately,
as the bubble. The trainer's line is unlimited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import trio

from peerd.run.runfile import RunFile
from roles.trainer import TrainerRole
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._virtual_pipeline import LayerDevice, booted, in_virtual_time, small_run, start_stage
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.simnet import NetConfig, SimLine
from tests.worlds.simulation.world import WorldConfig

STAGES: Final = 3
CONTEXT: Final = 96
WIDTH: Final = 128
ACTIVATION_BYTES: Final = 4 * CONTEXT * WIDTH
RTT_MS: Final = (0, 10, 50, 100, 200)
LAYERS: Final = {"base": (6.7, 30.5), "xxlarge": (57.0, 120.6), "gpt3": (470.0, 102.5), "ours": (700.0, 82.0)}  # t, c
PAPER: Final = {  # Table 1, in percent
    "base": (18.0, 11.8, 4.88, 2.78, 1.53),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "gpt3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "ours": (89.5, 87.2, 79.5, 71.5, 59.2),
}
LEAST: Final = {100: 0.97, 200: 0.95}  # targets by round trip, relative to the model's utilization without delay
LEAST_WINDOW_BYTES: Final = 64 << 10  # of a connection
PATIENCE_S: Final = 3_000.0
FROM, TO = 0.3, 0.9  # shares of a step's microbatches between which the pipeline is full


@dataclass(frozen=True, slots=True)
class Cell:
    """One model at one round-trip time."""

    layers: str
    rtt_ms: int

    @property
    def microbatches(self) -> int:
        """Microbatches of a step: several times the number in flight."""
        t, c = LAYERS[self.layers]
        fills = (STAGES * (t + 2 * self.rtt_ms) + c) / max(t, c)
        return min(768, 64 + 16 * round(fills))


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one cell."""

    utilization: float
    bubble: float  # share of a whole step's device time that is lost by filling and draining the pipeline
    wire_over_payload: float


def run_of(folder: Path, microbatches: int) -> RunFile:
    return small_run(folder, "pipeline", STAGES, microbatches, WIDTH, CONTEXT)


async def _cell(cell: Cell, folder: Path) -> Measured:
    """Measure the second of two steps, when the trainer knows how many microbatches fill the stages."""
    t, c = LAYERS[cell.layers]
    run = run_of(folder, cell.microbatches)
    mbit_s = 2 * ACTIVATION_BYTES * 8 / (c / 1e3) / 1e6
    line = SimLine(latency_s=cell.rtt_ms / 4e3, up_mbit_s=mbit_s, down_mbit_s=mbit_s)
    free = SimLine(latency_s=cell.rtt_ms / 4e3)
    devices: dict[int, LayerDevice] = {}
    window = LEAST_WINDOW_BYTES + round(
        mbit_s * 1e6 / 8 * cell.rtt_ms / 1e3
    )  # large enough for one connection to fill the line
    async with booted(line=free, config=WorldConfig(net=NetConfig(window_bytes=window))) as world:
        stages = []
        for stage in range(STAGES):
            devices[stage] = device = LayerDevice(t / 1e3)
            stages.append(await start_stage(world, run, folder, stage, device, line))
        roles = Roles(run, folder)
        trainer = await world.start("trainer", line=free, program=roles.program(TrainerRole))
        members = [of.live[node.name] for of, node in stages]
        nodes = [node for _, node in stages] + [trainer]

        def now() -> tuple[float, float, int]:
            busy_s = sum(device.busy_s for device in devices.values()) / STAGES
            return trio.current_time(), busy_s, sum(node.host.traffic().bytes_out for node in nodes)

        def done() -> int:
            return min(member.post.serving.samples if member.post else 0 for member in members)

        batch = cell.microbatches
        marks = []
        for goal in (batch, batch + round(batch * FROM), batch + round(batch * TO), 2 * batch):
            assert await world.until(lambda goal=goal: done() >= goal, within_s=PATIENCE_S, step_s=t / 4e3)
            marks.append(now())
        begun, first, last, end = marks
    seconds, busy_s, _ = (b - a for a, b in zip(first, last, strict=True))
    utilization = busy_s / seconds
    step_s = end[0] - begun[0]
    payload = batch * (STAGES - 1) * 2 * ACTIVATION_BYTES
    return Measured(utilization, 1.0 - (batch * t / 1e3 / utilization) / step_s, (end[2] - begun[2]) / payload)


def measured(cell: Cell) -> Measured:
    found: Measured = in_virtual_time(_cell, cell)
    return found


def measure(full: bool) -> Report:
    torch.set_num_threads(1)
    found = {name: [measured(Cell(name, rtt)) for rtt in RTT_MS] for name in LAYERS}
    sections = [_section(name, of) for name, of in found.items()]
    extra: dict[str, Any] = {
        "utilization": _table(found, lambda one: one.utilization),
        "paper": {name: dict(zip(map(str, RTT_MS), [v / 100 for v in PAPER[name]], strict=True)) for name in LAYERS},
        "closed_form": {name: {str(rtt): blocking(name, rtt) for rtt in RTT_MS} for name in LAYERS},
        "bubble": _table(found, lambda one: one.bubble),
    }
    wire = max(one.wire_over_payload for of in found.values() for one in of)
    sections.append(
        [Figure("wire_over_payload", "bytes sent over activations and gradients, at most", wire, "", 3, at_most=1.05)]
    )
    note = f"{STAGES} stages of one peer; paper: blocking calls, t / (t + c + 2 RTT)"
    return Report("pipelines at growing delays", sections, note, extra)


def _table(found: dict[str, list[Measured]], figure: Callable[[Measured], float]) -> dict[str, dict[str, float]]:
    return {name: {str(rtt): figure(one) for rtt, one in zip(RTT_MS, of, strict=True)} for name, of in found.items()}


def blocking(name: str, rtt_ms: float) -> float:
    """Utilization with blocking calls, by the closed form that the paper's table follows."""
    t, c = LAYERS[name]
    return t / (t + c + 2 * rtt_ms)


def _section(name: str, found: Sequence[Measured]) -> list[Figure]:
    figures = []
    for rtt, one, paper in zip(RTT_MS, found, PAPER[name], strict=True):
        told = f"{name}, {rtt} ms: busy (paper {paper:g} %, closed form {blocking(name, rtt):.1%})"
        figures.append(Figure(f"direct_{name}_{rtt}", told, 100 * one.utilization, "%", 1))
        if rtt in LEAST:
            share = one.utilization / found[0].utilization
            figures.append(Figure(f"{name}_{rtt}_kept", "  over that without delay", share, "", 3, at_least=LEAST[rtt]))
    return figures
