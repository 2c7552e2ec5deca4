"""A run's plan: which peer serves which stage, and to which peers of the next stage it sends.

`peerd plan --out` writes a placement file with the devices of a links file. In a run the devices are peers: each name
is a peer id, or a key of the file's table `peers`. The plan is published with the run file, so its size is bounded.
Peers that are not in the plan, and the places of absent peers, are handled as in a run without a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from peerd.core.ids import is_peer_text
from peerd.core.limits import PLAN_BYTES
from peerd.run.runfile import PlanSection, RunFile, Section

_SHOWN = 80


class PlacementSection(Section, frozen=True):
    """A placement file. `follows`: for each stage but the last, pairs (peer, peer of the next stage) of names."""

    stages: list[list[str]]
    follows: list[list[list[str]]] = msgspec.field(default_factory=list)
    peers: dict[str, str] = msgspec.field(default_factory=dict)  # name -> peer id


def plan_of(file: PlacementSection) -> PlanSection:
    """Convert a placement file that has no `placement_faults` into a plan."""
    stages = [[file.peers.get(name, name) for name in names] for names in file.stages]
    follows = [
        [[file.stages[stage].index(one), file.stages[stage + 1].index(other)] for one, other in pairs]
        for stage, pairs in enumerate(file.follows)
    ]
    return PlanSection(stages=stages, follows=follows)


def placement_faults(file: PlacementSection) -> Iterator[str]:
    """Yield what is wrong with a placement file that is used as a plan."""
    unknown = [name for names in file.stages for name in names if not is_peer_text(file.peers.get(name, name))]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        allowed = "a peer id, or a name with its peer id in the table `peers` (peerd identity prints it)"
        yield f"stages: {unknown[0][:_SHOWN]!r}{more} is not a peer; allowed: {allowed}"
    if file.follows and len(file.follows) != len(file.stages) - 1:
        yield f"follows: has {len(file.follows)} lists; allowed: one for each stage but the last"
        return
    for stage, pairs in enumerate(file.follows):
        for pair in pairs:
            if len(pair) != 2 or pair[0] not in file.stages[stage] or pair[1] not in file.stages[stage + 1]:
                shown = ", ".join(pair)[:_SHOWN]
                yield f"follows: [{shown}] is not a pair of a peer of stage {stage} and one of stage {stage + 1}"


def plan_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of a run's plan, as (key, message)."""
    plan, placement = run.plan, run.pipeline.placement
    if placement != "plan":
        given = "plan" if plan is not None else "pipeline.plan" if run.pipeline.plan else ""
        return [(given, f"is given, but pipeline.placement is {placement}; allowed: plan")] if given else []
    if plan is None:
        return [
            ("pipeline.placement", "is plan; allowed with pipeline.plan: FILE, which `peerd plan --out FILE` writes")
        ]
    size = len(msgspec.json.encode(plan))
    if size > PLAN_BYTES:
        return [
            ("pipeline.plan", f"takes {size} bytes; allowed: up to {PLAN_BYTES}, since it travels with the run file")
        ]
    return [("pipeline.plan", fault) for fault in _faults(plan, run.pipeline.stages)]


def _faults(plan: PlanSection, stages: int) -> Iterator[str]:
    if len(plan.stages) != stages:
        yield f"has {len(plan.stages)} stages; allowed: {stages}, as pipeline.stages says"
        return
    seen: set[str] = set()
    for stage, peers in enumerate(plan.stages):
        for peer in peers:
            if not is_peer_text(peer):
                yield f"stage {stage} has {peer[:_SHOWN]!r}; allowed: peer ids"
            elif peer in seen:
                yield f"has {peer} twice; allowed: each peer in one stage"
            seen.add(peer)
    if plan.follows and len(plan.follows) != stages - 1:
        yield f"follows: has {len(plan.follows)} lists; allowed: {stages - 1}"
        return
    for stage, pairs in enumerate(plan.follows):
        sizes = len(plan.stages[stage]), len(plan.stages[stage + 1])
        if not all(len(pair) == 2 and 0 <= pair[0] < sizes[0] and 0 <= pair[1] < sizes[1] for pair in pairs):
            yield f"follows: a pair of stage {stage} is not an index into that stage and one into the next"


def planned_stage(run: RunFile, peer: str) -> int | None:
    """The stage of a peer in the run's plan, or None if the plan does not include the peer."""
    stages = run.plan.stages if run.plan is not None else []
    return next((stage for stage, peers in enumerate(stages) if peer in peers), None)


def followers(plan: PlanSection) -> dict[str, Sequence[str]]:
    """Peer -> the peers of the next stage that it sends to; only peers for which the plan names some."""
    found: dict[str, list[str]] = {}
    for stage, pairs in enumerate(plan.follows):
        for one, other in pairs:
            found.setdefault(plan.stages[stage][one], []).append(plan.stages[stage + 1][other])
    return dict(found)
