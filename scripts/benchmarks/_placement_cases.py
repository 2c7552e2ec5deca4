"""The five networks of the DT-FM paper's evaluation, with 64 devices each, and similar larger ones.

Devices of a region have consecutive numbers. The link between two regions holds for all pairs of their devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peerd.placement.problem import Network, PlacementProblem, PlanDevice, StageWork

Table = NDArray[np.float64]
STAGES = 8
PIPELINES = 8
GRADIENT_BYTES = 0.65e9
ACTIVATION_BYTES = 0.47124922275543213e9
BYTES_PER_GBIT = 1e9 / 8
CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
WORLD_DELAY_MS = """
    5 67 49 96 124 136 143 124
    67 5 11 143 172 76 90 67
    49 11 5 130 159 86 99 77
    96 143 130 5 34 210 223 199
    124 172 159 34 5 238 235 228
    136 76 86 210 238 5 14 12
    143 90 99 223 235 14 5 24
    124 67 77 199 228 12 24 5"""
WORLD_GBIT_S = """
    2 .79 1.1 .523 .46 .42 .404 .482
    .79 2 1.12 .524 .5 1.16 1.02 1.05
    1.1 1.12 2 .694 .529 1.05 .799 1.14
    .523 .524 .694 2 1.1 .366 .36 .465
    .46 .5 .529 1.1 2 .342 .358 .335
    .42 1.16 1.05 .366 .342 2 1.14 1.09
    .404 1.02 .799 .36 .358 1.14 2 1.08
    .482 1.05 1.14 .465 .335 1.09 1.08 2"""
REGIONAL_DELAY_MS = "5 67 59 11  67 5 12 49  59 12 5 52  11 49 52 5"
REGIONAL_GBIT_S = "2 1.15 1.05 1.12  1.15 2 1.25 1.1  1.05 1.25 2 1.02  1.12 1.1 1.02 2"


@dataclass(frozen=True, slots=True)
class Case:
    """A network of R regions: their numbers of devices, and delays and rates between them, [R, R]."""

    name: str
    counts: tuple[int, ...]
    delay_ms: Table
    gbit_s: Table
    places: tuple[str, ...]

    def matrices(self) -> tuple[Table, Table]:
        """Delays in ms and rates in Gbit/s between all devices, [N, N]."""
        region = np.repeat(np.arange(len(self.counts)), self.counts)
        block = np.ix_(region, region)
        return self.delay_ms[block], self.gbit_s[block]

    def problem(self) -> PlacementProblem:
        delay_ms, gbit_s = self.matrices()
        places = [place for place, count in zip(self.places, self.counts, strict=True) for _ in range(count)]
        return problem_of(delay_ms, gbit_s, STAGES, places)


def problem_of(delay_ms: Table, gbit_s: Table, stages: int, places: list[str]) -> PlacementProblem:
    """The paper's workload on a network: equal stages, and one microbatch per pipeline."""
    count = len(delay_ms)
    delay_s, rate = delay_ms / 1e3, gbit_s * BYTES_PER_GBIT
    np.fill_diagonal(delay_s, 0.0)
    np.fill_diagonal(rate, np.inf)
    devices = tuple(PlanDevice(f"d{at}", place=place) for at, place in enumerate(places))
    work = (StageWork(GRADIENT_BYTES, ACTIVATION_BYTES),) * stages
    return PlacementProblem(devices, Network(delay_s, rate), work, count // stages, (count // stages,) * stages)


def _two_kinds(counts: tuple[int, ...], inside: float, between: float) -> Table:
    found = np.full((len(counts), len(counts)), between)
    np.fill_diagonal(found, [inside if count > 1 else between for count in counts])
    return found


def _square(text: str) -> Table:
    values = np.array(text.split(), dtype=np.float64)
    side = round(len(values) ** 0.5)
    return values.reshape(side, side)


def cases() -> list[Case]:
    """The five networks, in the order of the paper's figures."""
    nodes, spot, two = (8,) * 8, (4,) * 8 + (1,) * 32, (32, 32)
    at = [f"node {number}" for number in range(40)]
    return [
        Case("1-datacenter-on-demand", nodes, np.zeros((8, 8)), _two_kinds(nodes, 100.0, 3.125), tuple(at[:8])),
        Case("2-datacenter-spot", spot, np.zeros((40, 40)), _two_kinds(spot, 100.0, 1.25), tuple(at)),
        Case("3-two-datacenters", two, _two_kinds(two, 1.0, 11.0), _two_kinds(two, 5.0, 1.12), ("east", "west")),
        Case("4-regional", (16,) * 4, _square(REGIONAL_DELAY_MS), _square(REGIONAL_GBIT_S), ("A", "B", "C", "D")),
        Case("5-world-wide", (8,) * 8, _square(WORLD_DELAY_MS), _square(WORLD_GBIT_S), CITIES),
    ]


def large(devices: int, stages: int, seed: int) -> PlacementProblem:
    """A network of regions with 16 devices, scattered over a square. All links differ; distant ones are slower."""
    rng = np.random.default_rng(seed)
    regions = devices // 16
    region = np.repeat(np.arange(regions), 16)
    at = rng.random((regions, 2))[region]
    far = np.linalg.norm(at[:, None] - at[None], axis=2)
    delay_ms = 2 + 150 * far * (1 + 0.1 * rng.random(far.shape))
    gbit_s = np.where(region[:, None] == region[None], 2.0, 1.2 - 0.8 * np.minimum(far, 1.0))
    gbit_s *= 0.9 + 0.2 * rng.random(far.shape)
    places = [f"region {number}" for number in region.tolist()]
    return problem_of((delay_ms + delay_ms.T) / 2, (gbit_s + gbit_s.T) / 2, stages, places)
