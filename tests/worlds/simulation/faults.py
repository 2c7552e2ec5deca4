"""Fault injection at planned times: failing, stalled, slow and corrupting nodes, network partitions.

Each function returns one `FaultPlan`; `inject` runs plans in a world. Corruption happens below encryption, as on a
broken cable. A peer that violates the protocol is a program of its own, not a fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from tests.worlds.simulation.simnet import SimLine

if TYPE_CHECKING:
    from tests.worlds.simulation.world import World

Action = Callable[["World"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Steps of one fault: (seconds after the plan starts, action), in order of time."""

    name: str
    steps: tuple[tuple[float, Action], ...]


def fail(node: str, at_s: float, *, silent: bool = False, back_after_s: float | None = None) -> FaultPlan:
    """Kill a node at `at_s`, and restart it after `back_after_s` unless that is None."""

    async def die(world: World) -> None:
        await world.kill(world.nodes[node], silent=silent)

    async def rise(world: World) -> None:
        await world.restart(world.nodes[node])

    back = () if back_after_s is None else ((at_s + back_after_s, rise),)
    return FaultPlan(f"fail {node}", ((at_s, die), *back))


def stall(node: str, at_s: float, for_s: float) -> FaultPlan:
    """Block all traffic of a node for `for_s` seconds; its links stay open."""

    async def stop(world: World) -> None:
        world.net.stall(node)

    async def go_on(world: World) -> None:
        world.net.resume(node)

    return FaultPlan(f"stall {node}", ((at_s, stop), (at_s + for_s, go_on)))


def slow(node: str, at_s: float, line: SimLine, *, for_s: float | None = None) -> FaultPlan:
    """Change a node's access line at `at_s`, and restore its first one after `for_s` unless that is None."""

    async def change(world: World) -> None:
        world.net.set_line(node, line)

    async def restore(world: World) -> None:
        world.net.set_line(node, world.nodes[node].first_line)

    end = () if for_s is None else ((at_s + for_s, restore),)
    return FaultPlan(f"slow {node}", ((at_s, change), *end))


def corrupt(node: str, at_s: float, probability: float, *, for_s: float | None = None) -> FaultPlan:
    """Flip one bit of each segment from the node with this probability, from `at_s` on, for `for_s` s or forever."""

    async def damage(world: World) -> None:
        world.net.nodes[node].corrupt = probability

    async def repair(world: World) -> None:
        world.net.nodes[node].corrupt = 0.0

    end = () if for_s is None else ((at_s + for_s, repair),)
    return FaultPlan(f"corrupt {node}", ((at_s, damage), *end))


def split(islands: Sequence[Iterable[str]], at_s: float, for_s: float) -> FaultPlan:
    """Partition the network into these islands and one of all other nodes, for `for_s` seconds."""
    fixed = [list(names) for names in islands]

    async def part(world: World) -> None:
        world.net.partition(*fixed)

    async def heal(world: World) -> None:
        world.net.heal()

    return FaultPlan("split", ((at_s, part), (at_s + for_s, heal)))


async def inject(world: World, faults: Iterable[FaultPlan]) -> None:
    """Run the steps of all faults; returns after the last one. Steps at the same time run in the given order."""
    start_s = trio.current_time()
    steps = [(at_s, fault.name, action) for fault in faults for at_s, action in fault.steps]
    for at_s, name, action in sorted(steps, key=lambda step: step[0]):
        await trio.sleep_until(start_s + at_s)
        world.trace.add("-", "fault", name)
        await action(world)
