"""The placement file: names of each stage's devices. `peerd plan` writes it with `--out` and reads it with `--from`.

```yaml
stages:
  - [virginia-1, virginia-2]
  - [tokyo-1]
follows: # pairs of sender and receiver in the next stage; a run obeys them
  - [[virginia-1, tokyo-1], [virginia-2, tokyo-1]]
peers: # added by hand if this file is the `pipeline.plan` of a run, and the names are not peer ids
  virginia-1: 12D3Koo...
```
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from peerd.core.errors import ConfigError
from peerd.log import clean
from peerd.placement.problem import IDLE, PlacementProblem, PlanDevice, StagePlacement
from peerd.run.config import PLACEMENT_FILE
from peerd.run.stage_plan import PlacementSection
from peerd.run.typed_yaml import parse_yaml, typed_section


def load_placement(path: Path, problem: PlacementProblem) -> StagePlacement:
    """Read a placement of the problem's devices. Raises ConfigError, which lists every mistake."""
    tree, faults = parse_yaml(path, PLACEMENT_FILE)
    file: PlacementSection = typed_section(PlacementSection, tree, (), faults)
    if faults.found:
        raise faults.error(path)
    if len(file.stages) != len(problem.stages):
        faults.add(
            ("stages",), f"has {len(file.stages)} stages; allowed: {len(problem.stages)}, the number to be placed"
        )
    known = {device.name: number for number, device in enumerate(problem.devices)}
    stage_of, lines = [IDLE] * len(problem.devices), dict[str, int | None]()
    for stage, names in enumerate(file.stages):
        if not names:
            faults.add(("stages", stage), "is empty; allowed: one device at least")
        for index, name in enumerate(names):
            at = ("stages", stage, index)
            if name not in known:
                faults.add(at, f"is {clean(name)}, which the links file does not have; allowed: its devices")
            elif name in lines:
                faults.add(at, f"is {clean(name)} a second time, first on line {lines[name]}")
            else:
                lines[name] = faults.line_of(at)
                stage_of[known[name]] = stage
    if faults.found:
        raise faults.error(path)
    return StagePlacement(tuple(stage_of))


def save_placement(path: Path, problem: PlacementProblem, placement: StagePlacement, head: str) -> None:
    """Write a placement, with `head` as a comment on top. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text("\n".join(_lines(problem.devices, placement, len(problem.stages), head)) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} can't be written: {error.strerror or error}") from error


def _lines(devices: Sequence[PlanDevice], placement: StagePlacement, stages: int, head: str) -> Iterator[str]:
    """Lines of a placement file. Names are JSON strings, which are valid YAML with any characters."""

    def quoted(number: int) -> str:
        return json.dumps(devices[number].name)

    yield f"# {clean(head)}"
    yield "stages:"
    for stage in range(stages):
        yield f"  - [{', '.join(map(quoted, placement.members(stage)))}]"
    if any(placement.follows):
        yield "follows: # pairs of sender and receiver in the next stage"
        for pairs in placement.follows:
            yield "  - [" + ", ".join(f"[{quoted(one)}, {quoted(other)}]" for one, other in pairs) + "]"
