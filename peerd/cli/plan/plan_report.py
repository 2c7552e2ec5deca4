"""Formats a plan as text or JSON: stages, cost and its parts, gain, routes between stages, and the link matrix."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from peerd.cli.plan.link_matrix import link_matrix
from peerd.cli.plan.size_report import batches
from peerd.log import clean
from peerd.placement.cost import CostKind, PlacementCost
from peerd.placement.problem import IDLE, Matrix, PlacementProblem, StagePlacement
from peerd.screen.columns import Columns
from peerd.screen.units import counted, number, size, took

PAIRS_SHOWN: Final = 64  # most routes shown one by one; --json and --out have all
RUNS_SHOWN: Final = 8  # most ranges of names shown for a stage
_TERA: Final = 1e12
_MEANT: Final = {
    CostKind.STEADY: "the steady state of a full pipeline; --cost latency for one wave through it",
    CostKind.LATENCY: "all microbatches as one wave, stage after stage; --cost steady for a full pipeline",
}


@dataclass(frozen=True, slots=True)
class SolvedPlan:
    """A plan, with the problem that it solves and the placements that it is compared with."""

    links: str
    problem: PlacementProblem
    placement: StagePlacement
    cost: PlacementCost
    seed: int
    took_s: float
    stopped: bool  # by Ctrl+C
    optimal: bool  # True if every placement was examined
    random: Sequence[float]  # seconds per step of random placements
    before: tuple[str, StagePlacement, PlacementCost] | None = None  # --from


def moved(before: StagePlacement, after: StagePlacement) -> int:
    """Number of devices that serve another stage than before, or were idle before."""
    pairs = zip(before.stage_of, after.stage_of, strict=True)
    return sum(one != other and other != IDLE for one, other in pairs)


def message_bytes(problem: PlacementProblem) -> float:
    """Size of the matrix' message: the largest activation or, without one, a peer's share of the largest gradient."""
    sent = max((work.activation for work in problem.stages[:-1]), default=0.0)
    return sent or max(work.gradient for work in problem.stages) / len(problem.devices)


def link_seconds(problem: PlacementProblem) -> Matrix:
    """Seconds that a message of `message_bytes` takes over each link, [N, N]."""
    return problem.network.seconds(message_bytes(problem))


def plan_view(found: SolvedPlan, width: int, *, coloured: bool) -> RenderableType:
    """The whole report, for a terminal of `width` columns."""
    problem = found.problem
    places = len({device.place for device in problem.devices if device.place})
    where = f"{counted(len(problem.devices), 'device')}" + (f" in {counted(places, 'place')}" if places else "")
    work = f"{counted(len(problem.stages), 'stage')}, {batches(problem.microbatches)} a step"
    parts: list[RenderableType] = [Text(f"{clean(found.links)}: {where}; {work}", "bold"), Text("")]
    parts += [*_cost_lines(found), Text(""), _stage_table(found).table(), Text(""), *_followers(found), Text("")]
    groups = [problem_members(found, stage) for stage in range(len(problem.stages))]
    idle = problem_members(found, IDLE)
    if idle:
        parts.insert(-1, Text(f"idle: {names_of(found, idle)}"))
    if len(problem.devices) > 1:
        parts.append(Text(f"time of {size(message_bytes(problem))} from each device (row) to each other, by stage:"))
        parts += link_matrix(link_seconds(problem), [*groups, idle], width, coloured=coloured)
    return Group(*parts)


def problem_members(found: SolvedPlan, stage: int) -> list[int]:
    """Devices of a stage, sorted by place."""
    members = [device for device, at in enumerate(found.placement.stage_of) if at == stage]
    return sorted(members, key=lambda device: (found.problem.devices[device].place, device))


def _cost_lines(found: SolvedPlan) -> Iterator[Text]:
    cost = found.cost
    yield Text(f"a step takes {took(cost.total_s)} ({_MEANT[cost.kind]})", "bold green")
    if cost.total_s:
        yield Text("  = " + " + ".join(f"{took(seconds)} {what}" for what, seconds in parts_of_cost(cost) if seconds))
    told = [seconds for seconds in found.random if math.isfinite(seconds)]
    if told:
        least, mean = min(told), float(np.mean(told))
        best = f"the mean of {len(told)} is {took(mean)}, the best of them {took(least)}"
        yield Text(f"  {_gain(mean, cost.total_s)} random placement: {best}")
    if len(told) < len(found.random):
        lost = len(found.random) - len(told)
        yield Text(f"  {lost} of {len(found.random)} random placements need links between unreachable peers")
    if found.before is not None:
        name, placement, before = found.before
        changes = counted(moved(placement, found.placement), "device")
        was = (
            took(before.total_s)
            if math.isfinite(before.total_s)
            else "impossible: its peers cannot reach each other, or lack memory"
        )
        yield Text(f"  {_gain(before.total_s, cost.total_s)} {clean(name)} ({was}); {changes} would move")
    if found.problem.sizes is not None and len(found.problem.devices) > len(found.problem.stages):
        yield Text(
            "  speeds or work are unknown: the number of devices per stage was fixed before the search", "yellow"
        )
    stopped = ", stopped by Ctrl+C" if found.stopped else ""
    better = (
        "optimal by this cost: all placements were examined"
        if found.optimal
        else "a longer search (--seconds) may find a better one"
    )
    yield Text(f"  found in {took(found.took_s)} with --seed {found.seed}{stopped}; {better}", "dim")


def _gain(before_s: float, after_s: float) -> str:
    if not math.isfinite(before_s):
        return "possible, unlike"
    return f"{before_s / after_s:.2f} times as fast as" if after_s else "as fast as"


def parts_of_cost(cost: PlacementCost) -> Iterator[tuple[str, float]]:
    """The parts of a step's cost: description and seconds of each."""
    steady = cost.kind is CostKind.STEADY
    yield "averaging", cost.data_parallel_s
    yield ("links, there and back, of the first microbatch" if steady else "links, there and back"), cost.pipeline_s
    yield ("computing it" if steady else "computing"), cost.compute_s
    yield "at the pace of the busiest device or link", cost.busiest_s
    yield "moving, spread over the steps of --horizon", cost.moving_s


def _stage_table(found: SolvedPlan) -> Columns:
    """Table of the stages: with their speed if it is known, and with their memory if they need any."""
    problem, rows = found.problem, list[list[str]]()
    timed = all(math.isfinite(device.speed) for device in problem.devices)
    needy = any(work.memory for work in problem.stages)
    for stage, work in enumerate(problem.stages):
        members = problem_members(found, stage)
        speed = sum(problem.devices[device].speed for device in members) / _TERA
        least = min(problem.devices[device].memory for device in members)
        memory = [size(work.memory), size(least)] if needy else []
        rows.append([str(stage), str(len(members)), names_of(found, members), *([number(speed)] * timed), *memory])
    heads = ["stage", "devices", "who", *(["TFLOP/s"] * timed), *(["needs", "least memory"] * needy)]
    return Columns(heads, rows, {0, 1, *range(3, len(heads))}, whole={2})


def names_of(found: SolvedPlan, members: Sequence[int]) -> str:
    """Names of devices in short, as in `virginia-1..8, tokyo-2`; if there are many, the number in each place."""
    devices = [found.problem.devices[member] for member in members]
    told = [" ".join(run) for run in _in_runs([[device.name] for device in devices])]
    if len(told) <= RUNS_SHOWN:
        return ", ".join(told)
    places = Counter(device.place for device in devices)
    if "" in places:
        return ", ".join(told[: RUNS_SHOWN - 1]) + f" and {len(told) - RUNS_SHOWN + 1} more: --json, --out"
    return ", ".join(clean(f"{count} in {place}") for place, count in places.items())


def _in_runs(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Rows of names; consecutive rows whose numbers all grow by one are merged.

    For example, `a-1, b-3` and `a-2, b-4` become `a-1..2, b-3..4`.
    """
    first: list[tuple[str, int]] = []
    length = 0
    for row in rows:
        cut = [_numbered(name) for name in row]
        if (
            length
            and cut == [(base, number + length if number >= 0 else -1) for base, number in first]
            and cut[0][1] > 0
        ):
            length += 1
            continue
        if length:
            yield _run(first, length)
        first, length = cut, 1
    if length:
        yield _run(first, length)


def _numbered(name: str) -> tuple[str, int]:
    """Base and number of a name such as `base-7`. The number is -1 for a name without one."""
    cut = re.fullmatch(r"(.*)-([1-9]\d{0,5})", name)
    return (cut[1], int(cut[2])) if cut else (name, -1)


def _run(first: Sequence[tuple[str, int]], length: int) -> list[str]:
    ends = [(base, number, number + length - 1) for base, number in first]
    return [
        clean(base if one < 0 else f"{base}-{one}" + (f"..{last}" if last > one else "")) for base, one, last in ends
    ]


def _followers(found: SolvedPlan) -> Iterator[Text]:
    """Lines on the routes from device to device of the next stage; if there are many, their number by place."""
    devices, follows = found.problem.devices, found.placement.follows
    if not follows:
        return
    told = [list(_in_runs([(devices[a].name, devices[b].name) for a, b in pairs])) for pairs in follows]
    every = sum(map(len, told)) <= PAIRS_SHOWN
    yield Text("routes to the next stage" + ("" if every else " (by place; each device: --json, --out)"), "bold")
    for stage, pairs in enumerate(follows):
        ways = [f"{one} > {other}" for one, other in told[stage]]
        if not every:
            counts = Counter(
                (devices[a].place or devices[a].name, devices[b].place or devices[b].name) for a, b in pairs
            )
            ways = [clean(f"{one} > {other} x {count}") for (one, other), count in counts.items()]
        yield Text.assemble((f"{stage} > {stage + 1}  ", "bold"), ", ".join(ways))


def plan_object(found: SolvedPlan) -> dict[str, Any]:
    """The report as one object for programs. Infinite times are None."""
    devices, stages = found.problem.devices, range(len(found.problem.stages))
    told: dict[str, Any] = {
        "links": found.links,
        "cost": found.cost.kind.value,
        "step_s": _known(found.cost.total_s),
        "parts_s": {
            "averaging": _known(found.cost.data_parallel_s),
            "links": _known(found.cost.pipeline_s),
            "computing": _known(found.cost.compute_s),
            "busiest": _known(found.cost.busiest_s),
            "moving": _known(found.cost.moving_s),
        },
        "random_s": [_known(seconds) for seconds in found.random],
        "random_mean_s": float(np.mean(known)) if (known := list(filter(math.isfinite, found.random))) else None,
        "seed": found.seed,
        "search_s": round(found.took_s, 3),
        "stopped": found.stopped,
        "optimal": found.optimal,
        "stages": [[devices[device].name for device in found.placement.members(stage)] for stage in stages],
        "idle": [devices[device].name for device in found.placement.members(IDLE)],
        "follows": [[[devices[a].name, devices[b].name] for a, b in pairs] for pairs in found.placement.follows],
    }
    if found.before is not None:
        name, placement, cost = found.before
        told["from"] = {"file": name, "step_s": _known(cost.total_s), "moved": moved(placement, found.placement)}
    return told


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
