"""Draws the world-wide case before and after planning: the devices of each city in each stage, as SVG on stdout.

python -m scripts.benchmarks._placement_picture > peerd/placement/world-wide.svg
"""

from __future__ import annotations

import time
from random import Random

from peerd.placement.cost import PlacementCost
from peerd.placement.problem import PlacementProblem, StagePlacement
from peerd.placement.search import SearchOptions, plan
from peerd.placement.starts import random_placement
from scripts.benchmarks._placement_cases import CITIES, STAGES, cases
from scripts.benchmarks.placement import SEED
from tests.worlds.machines.placements import arranged

CELL, LEFT, TOP, GAP = 26, 70, 60, 60


def counts(problem: PlacementProblem, placement: StagePlacement) -> list[list[int]]:
    """Devices of each city (column) in each stage (row)."""
    found = [[0] * len(CITIES) for _ in range(STAGES)]
    for device, stage in zip(problem.devices, placement.stage_of, strict=True):
        found[stage][CITIES.index(device.place)] += 1
    return found


def panel(title: str, cost: PlacementCost, rows: list[list[int]], left: int) -> list[str]:
    parts = f"averaging {cost.data_parallel_s:.1f} s, pipeline {cost.pipeline_s:.1f} s"
    lines = [
        f'<text x="{left}" y="16" font-weight="bold">{title}: {cost.total_s:.1f} s</text>',
        f'<text x="{left}" y="32">{parts}</text>',
    ]
    for stage, row in enumerate(rows):
        y = TOP + stage * CELL
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">stage {stage}</text>')
        for city, count in enumerate(row):
            x = left + CELL // 2 + city * CELL
            if count:
                radius = 4.2 * count**0.5
                lines.append(
                    f'<circle cx="{x}" cy="{y}" r="{radius:.1f}"><title>{CITIES[city]}: {count}</title></circle>'
                )
    foot = TOP + STAGES * CELL - 4
    for city, name in enumerate(CITIES):
        x = left + CELL // 2 + city * CELL
        lines.append(f'<text transform="translate({x} {foot}) rotate(45)">{name}</text>')
    return lines


def main() -> None:
    problem = cases()[4].problem()
    before, before_cost = arranged(problem, random_placement(problem, Random(SEED)))
    after = plan(problem, SearchOptions(evaluations=6000), Random(SEED), time.process_time)
    second = LEFT + len(CITIES) * CELL + GAP + LEFT
    width, height = second + len(CITIES) * CELL + 20, TOP + STAGES * CELL + 60
    lines = panel("random", before_cost, counts(problem, before), LEFT)
    lines += panel("planned", after.cost, counts(problem, after.placement), second)
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">')
    print('<rect width="100%" height="100%" fill="white"/>')
    print('<g font-family="sans-serif" font-size="12" fill="#222">')
    print("\n".join(lines))
    print("</g></svg>")


if __name__ == "__main__":
    main()
