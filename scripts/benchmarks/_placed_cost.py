"""Part of the simulation of placements: seconds of a step that costs predict, for the routes that are simulated.

`paths_s` follows the messages that are sent. The trainer calls each stage but the last forward with an activation and
gets one back; each backward with an activation and a gradient and gets one back; the last stage's own backward does its
forward too, with no gradient going in. A pipeline's microbatches are all in flight: the first one takes as long as its
messages one after another, and each further one as long as it keeps the busiest direction of a link. Then the peers of
each stage exchange shares of their gradients with all others at once, there and back.

`paper_s` is equations 2 to 4 of DT-FM for the same routes: two activations over each link of the chain, and averaging
with one peer after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.worlds.roles.placed import Link, PlacedRun


@dataclass(frozen=True, slots=True)
class WorkBytes:
    """What is sent in a step."""

    activation: float  # of one microbatch
    microbatches: int  # of one pipeline
    gradients: Sequence[float]  # by stage


def paths_s(placed: PlacedRun, work: WorkBytes) -> float:
    """Seconds of a step by the messages sent."""
    pipelines_s = max(_flight_s(placed, chain, work) for chain in placed.chains())
    return pipelines_s + _averaging_s(placed, work.gradients, max)


def paper_s(placed: PlacedRun, work: WorkBytes) -> float:
    """Seconds of a step by the paper's cost, all stages alike."""
    wave_bytes = work.activation * work.microbatches
    chains = placed.chains()
    hops_s = sum(
        max(_seconds(placed.link(chain[stage], chain[stage + 1]), wave_bytes) for chain in chains)
        for stage in range(len(work.gradients) - 1)
    )
    alike = [sum(work.gradients) / len(work.gradients)] * len(work.gradients)
    return 2 * hops_s + _averaging_s(placed, alike, sum)


def _flight_s(placed: PlacedRun, chain: list[int], work: WorkBytes) -> float:
    """One pipeline's microbatches, there and back; the first stage is on the trainer's site."""
    first_s = busiest_s = 0.0
    for device in chain[1:]:
        calls = 1 if device == chain[-1] else 2
        sent = work.activation * (1 if device == chain[-1] else 3)  # forward one, backward two; of the last stage one
        for (delay_s, rate), size in (
            (placed.outward(chain, device), sent),
            (placed.back(chain, device), calls * work.activation),
        ):
            first_s += calls * delay_s + size / rate
            busiest_s = max(busiest_s, size / rate)
    return first_s + (work.microbatches - 1) * busiest_s


def _averaging_s(placed: PlacedRun, gradients: Sequence[float], over: Callable[[list[float]], float]) -> float:
    """Of the slowest stage: there and back with each other peer, `over` all of them."""
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
