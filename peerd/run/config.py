"""Reads a run file and checks it. Reports all mistakes at once, each with line, key, value and what is allowed.

`typed_yaml` parses the YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from peerd.core.addr import parse_addr, parse_announced
from peerd.core.errors import ConfigError
from peerd.run.check import check
from peerd.run.contents import changed_code, not_compared, unknown, with_digests
from peerd.run.runfile import RunFile
from peerd.run.stage_plan import PlacementSection, placement_faults, plan_of
from peerd.run.typed_yaml import KeyPath, YamlFaults, YamlKind, dotted, parse_yaml, parts_of, typed_section

RUN_FILE: Final = YamlKind("run file", "`run: NAME`", RunFile)
PLACEMENT_FILE: Final = YamlKind("placement file", "`stages:`", PlacementSection, file_bytes=4 << 20, nodes=100_000)

# Keys whose checks depend on the values of other keys.
_LOOKS_AT = {
    "model.heads": ("model.kind", "model.d_model"),
    "model.precision": ("model.dtype",),
    "model.kind_digest": ("model.kind",),
    "model.vocab_digest": ("model.vocab",),
    "pipeline.stages": ("model.kind", "model.layers"),
    "pipeline.microbatch": ("model", "pipeline"),
    "pipeline.boundary.code": ("model.dtype",),
    "pipeline.boundary.block": ("pipeline.boundary.code",),
    "batch.target_samples": ("pipeline.microbatch",),
    "averaging.code": ("model.dtype",),
    "averaging.block": ("averaging.code",),
    "averaging.rank": ("averaging.code",),
    "optimizer.decay": ("optimizer.total_steps", "optimizer.warmup_steps"),
    "limits.stage": ("pipeline.stages",),
    "limits.offload": ("experts", "model.kind"),
    "limits.recompute": ("limits.offload",),
}


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run from its file, with the digests of the local files that it names.

    `given` holds the top-level keys that the file contains.
    """

    run: RunFile
    path: Path
    given: frozenset[str]
    unknown: tuple[str, ...] = ()  # messages on named files that are missing here, so cannot be compared with peers'
    notes: tuple[str, ...] = ()  # messages on packages that these files import, whose versions are not compared


def load_run(path: Path, *, with_plan: bool = True) -> LoadedRun:
    """Read, convert and check a run file. Raises ConfigError, which lists every mistake.

    Without `with_plan`, a placement plan in the file is ignored, and `pipeline.placement` is the default.
    """
    tree, faults = parse_yaml(path, RUN_FILE)
    run = typed_section(RunFile, tree, (), faults)
    run = _planned(run, faults) if with_plan else _unplanned(run)
    for place, reads in (("bootstrap", parse_addr), ("listen", parse_addr), ("announce", parse_announced)):
        given = tree.get(place)
        for index, text in enumerate(given if isinstance(given, list) else []):
            try:
                reads(str(text))
            except ConfigError as error:
                faults.add((place, index), f": {error}")
    for name, message in [*check(run), *changed_code(run)]:
        if not _follows(parts_of(name), faults.broken):
            faults.add(parts_of(name), message)
    if faults.found:
        raise faults.error(path)
    try:
        run = with_digests(run)
    except ConfigError as error:
        key, _, message = str(error).partition(" ")
        faults.add(parts_of(key), message)
        raise faults.error(path) from None
    return LoadedRun(run, path, frozenset(map(str, tree)), tuple(unknown(run)), tuple(not_compared(run)))


def _planned(run: RunFile, faults: YamlFaults) -> RunFile:
    """The run with the plan from its placement file, if it names one. Adds the file's mistakes to `faults`."""
    if run.pipeline.placement != "plan" or not run.pipeline.plan:
        return run
    at, path = ("pipeline", "plan"), Path(run.pipeline.plan)
    if run.plan is not None:
        faults.add(at, "is given together with the section plan; allowed: only one of them")
        return run
    try:
        tree, inner = parse_yaml(path, PLACEMENT_FILE)
        file: PlacementSection = typed_section(PlacementSection, tree, (), inner)
    except ConfigError as error:
        faults.add(at, f": {error}")
        faults.broken.add(("pipeline", "placement"))
        return run
    found = [text for _, text in inner.found] or list(placement_faults(file))
    for text in found:
        faults.add(at, f"{path}: {text}")
    if found:
        faults.broken.add(("pipeline", "placement"))
        return run
    return msgspec.structs.replace(run, plan=plan_of(file))


def _unplanned(run: RunFile) -> RunFile:
    if run.pipeline.placement != "plan":
        return run
    pipeline = msgspec.structs.replace(run.pipeline, placement="load", plan="")
    return msgspec.structs.replace(run, pipeline=pipeline, plan=None)


def section_of(cls: type[Any], values: Mapping[str, object]) -> Any:
    """A section of a run file from a program's values. Raises ConfigError, which lists every mistake."""
    faults = YamlFaults(RunFile)
    section = typed_section(cls, dict(values), (), faults)
    if faults.found:
        raise ConfigError("; ".join(text for _, text in faults.found))
    return section


def _follows(path: KeyPath, broken: set[KeyPath]) -> bool:
    """True if a fault at `path` may be caused by the placeholder of an invalid key, and not by the file."""
    seen = {path, *(parts_of(other) for other in _LOOKS_AT.get(dotted(path), ()))}
    if path[-1] in ("path", "digest", "sources", "organizer", "token", "revoked"):  # depend on their neighbours
        seen.add(path[:-1])
    return any(one[: len(bad)] == bad or bad[: len(one)] == one for one in seen for bad in broken)


def check_addresses(option: str, texts: Sequence[str]) -> None:
    """Raise ConfigError for the first invalid address of a command line option."""
    reads = parse_announced if option == "--announce" else parse_addr
    for text in texts:
        try:
            reads(text)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error
