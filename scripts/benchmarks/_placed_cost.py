"""Part of the simulation of placements: seconds of a step as predicted by cost models, for the simulated routes.

`paths_s` follows the messages that are sent: for each microbatch an activation over each link of the chain, and its
gradient back. All microbatches of a pipeline are in flight: the first one takes the sum of its messages, and each
further one the time that it occupies the busiest direction of a link. Then the peers of each stage exchange shares of
their gradients with all others at once, there and back.

`paper_s` is equations 2 to 4 of DT-FM for the same routes: two activations over each link of the chain, and averaging
with one peer after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.worlds.roles.placed import Link, PlacedRun


@dataclass(frozen=True, slots=True)
class WorkBytes:
    """Bytes and microbatches of a step."""

    activation: float  # of one microbatch
    microbatches: int  # of one pipeline
    gradients: Sequence[float]  # by stage


def paths_s(placed: PlacedRun, work: WorkBytes) -> float:
    """Seconds of a step, by the messages sent."""
    pipelines_s = max(_flight_s(placed, chain, work) for chain in placed.chains())
    return pipelines_s + _averaging_s(placed, work.gradients, max)


def paper_s(placed: PlacedRun, work: WorkBytes) -> float:
    """Seconds of a step, by the paper's cost with equal stages."""
    wave_bytes = work.activation * work.microbatches
    chains = placed.chains()
    hops_s = sum(
        max(_seconds(placed.link(chain[stage], chain[stage + 1]), wave_bytes) for chain in chains)
        for stage in range(len(work.gradients) - 1)
    )
    alike = [sum(work.gradients) / len(work.gradients)] * len(work.gradients)
    return 2 * hops_s + _averaging_s(placed, alike, sum)


def _flight_s(placed: PlacedRun, chain: list[int], work: WorkBytes) -> float:
    """Seconds of one pipeline's microbatches, there and back. The first stage is on the trainer's site."""
    links = [placed.link(*ends) for pair in pairwise(chain) for ends in (pair, pair[::-1])]
    first_s = sum(_seconds(link, work.activation) for link in links)
    busiest_s = max((work.activation / rate for _, rate in links), default=0.0)
    return first_s + (work.microbatches - 1) * busiest_s


def _averaging_s(placed: PlacedRun, gradients: Sequence[float], over: Callable[[list[float]], float]) -> float:
    """Averaging time of the slowest stage: twice the times to each other peer, combined by `over` (sum or max)."""
    found = [0.0]
    for stage, size in enumerate(gradients):
        members = placed.placement.members(stage)
        for one in members:
            to_others = [_seconds(placed.link(one, other), size / len(members)) for other in members if other != one]
            found += [2 * over(to_others)] if to_others else []
    return max(found)


def _seconds(link: Link, size: float) -> float:
    delay_s, rate = link
    return delay_s + size / rate
