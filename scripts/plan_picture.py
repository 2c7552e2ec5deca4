"""Draws a network before and after `peerd plan`: a random and the planned placement side by side, in colours.

python -m scripts.plan_picture [LINKS.yaml] [SECONDS]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from rich.console import Console
from rich.text import Text

from peerd.cli.plan import plan_search
from peerd.cli.plan.link_matrix import link_matrix
from peerd.cli.plan.plan_report import link_seconds
from peerd.placement.cost import CostKind
from peerd.placement.problem import PlacementProblem, StagePlacement
from peerd.placement.search import cost_of
from peerd.placement.starts import random_placement
from peerd.screen.units import took

WIDTH = 42  # columns of each picture


def picture(problem: PlacementProblem, placement: StagePlacement, name: str) -> list[Text]:
    """Lines with the time of a step and the link matrix of a placement."""
    stages = range(len(problem.stages))
    members = [sorted(placement.members(s), key=lambda device: problem.devices[device].place) for s in stages]
    step_s = cost_of(problem, placement, CostKind.STEADY).total_s
    return [
        Text(f"{name}: {took(step_s)} a step", "bold"),
        *link_matrix(link_seconds(problem), members, WIDTH, coloured=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("links", nargs="?", type=Path, default=Path("configs/links.yaml"), help="links file")
    parser.add_argument("seconds", nargs="?", type=float, default=10.0, help="of search")
    given = parser.parse_args()
    found = plan_search.find(plan_search.PlanRequest(given.links, None, None, CostKind.STEADY, given.seconds, 0, 1))
    before = picture(found.problem, random_placement(found.problem, Random(0)), "random")
    after = picture(found.problem, found.placement, "peerd plan")
    console = Console(width=2 * WIDTH + 2, force_terminal=True, color_system="truecolor")
    for left, right in zip(before, after, strict=True):
        left.pad_right(WIDTH + 2 - left.cell_len)
        console.print(left + right, crop=False, highlight=False)


if __name__ == "__main__":
    main()
