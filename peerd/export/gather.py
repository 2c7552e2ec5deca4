"""Finds the checkpoints of a whole run below a folder: of several peers, replicas or a backbone.

Searches only where peerd writes (`.../stage-N/step-*.json`), to a limited depth, and follows no links. A set is one
position (step and lineage) of which every stage has a checkpoint. If several peers saved one, the first intact
checkpoint is read. A checkpoint that a running peer deletes during the search is treated as missing; an unfinished
write has no manifest and is not found. Nothing is unpickled, and no code that is found is run.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from peerd.core.errors import ConfigError
from peerd.export.names import parameters_in
from peerd.model.checkpoint import Checkpoints, read_manifest
from peerd.model.run_record import read_record
from peerd.run.runfile import RunFile, fingerprint

DEPTH: Final = 6  # FOLDER/peer/role/checkpoints/run/stage-N, and one level more
_STAGE: Final = re.compile(r"stage-(\d{1,4})")
_MANIFEST: Final = re.compile(r"step-\d{8,}\.json")
_LISTED: Final = 8  # steps listed in a message


class Place(NamedTuple):
    """Position of a checkpoint: step and lineage. Runs without a common past have different lineages at equal steps."""

    step: int
    lineage: str


@dataclass(slots=True)
class SavedRun:
    """All checkpoints found of one run: the manifests' paths, by stage and position."""

    fingerprint: str
    name: str
    run: RunFile | None = None  # None: its settings are not recorded beside the checkpoints
    saved: dict[int, dict[Place, list[Path]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def steps(self, stage: int) -> list[int]:
        """The saved steps of a stage, ascending."""
        return sorted({place.step for place in self.saved.get(stage, {})})


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen set of checkpoints, and notes for the user."""

    found: SavedRun
    run: RunFile
    place: Place
    sources: list[list[Path]]  # by stage: manifests of copies of the same checkpoint
    notes: list[str]


def find_runs(root: Path) -> tuple[list[SavedRun], list[str]]:
    """The runs with checkpoints below `root`, sorted by name, and a note on each unreadable checkpoint."""
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder")
    runs: dict[str, SavedRun] = {}
    notes: list[str] = []
    for folder in _stage_folders(root):
        for path in sorted(folder.iterdir()):
            if _MANIFEST.fullmatch(path.name):
                try:
                    _take_in(path, int(folder.name.removeprefix("stage-")), runs)
                except ConfigError as error:
                    notes.append(f"left out: {error}")
    return sorted(runs.values(), key=lambda run: (run.name, run.fingerprint)), notes


def _stage_folders(root: Path) -> Iterator[Path]:
    if _STAGE.fullmatch(root.name):
        yield root
    for folder, folders, _ in folders_below(root):
        yield from (Path(folder, name) for name in folders if _STAGE.fullmatch(name))


def folders_below(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk `root`, only as deep as peers write files and without following links.

    Yields each folder with its subfolders and files.
    """
    top = len(root.parts)
    for name, folders, files in os.walk(root):
        folders.sort()
        folder = Path(name)
        yield folder, folders, files
        if len(folder.parts) - top >= DEPTH - 1:
            folders.clear()


def _take_in(path: Path, stage: int, runs: dict[str, SavedRun]) -> None:
    manifest = read_manifest(path)
    if manifest.stage != stage:
        raise ConfigError(f"{path} is of stage {manifest.stage}, but is in the folder of stage {stage}")
    key, above = manifest.fingerprint, path.parent.parent
    if not re.fullmatch("[0-9a-f]{2,128}", key) or len(key) % 2:
        raise ConfigError(f"{path} is damaged: its fingerprint is not in hexadecimal")
    run = runs.setdefault(key, SavedRun(key, above.name))
    place = Place(manifest.step, str(manifest.extra.get("lineage", "")))
    run.saved[stage][place].append(path)
    if run.run is None:
        try:
            recorded, settings = read_record(above)
        except FileNotFoundError:
            return
        if recorded == key:
            run.run, run.name = settings, settings.run


def choose_run(runs: Sequence[SavedRun], root: Path, name: str | None, settings: RunFile | None) -> SavedRun:
    """Choose a run by `name` or by its run file; ConfigError lists the runs that exist."""
    if not runs:
        raise ConfigError(f"{root} contains no checkpoint; give a peer's data directory, or a folder with several")
    if settings is not None:
        mine = fingerprint(settings).hex()
        fitting = [run for run in runs if run.fingerprint == mine]
        if not fitting:
            raise ConfigError(f"{root} contains no checkpoint with the run file's settings, only of {_names(runs)}")
        fitting[0].run, fitting[0].name = settings, settings.run
        return fitting[0]
    fitting = [run for run in runs if name is None or run.name == name]
    if not fitting:
        raise ConfigError(f"{root} contains no checkpoint of run {name!r}, only of {_names(runs)}")
    if len({run.name for run in fitting}) > 1:
        raise ConfigError(f"{root} contains checkpoints of {len(fitting)} runs: {_names(fitting)}; add --run NAME")
    if len(fitting) > 1:
        raise ConfigError(
            f"{root} contains checkpoints of run {fitting[0].name} with {len(fitting)} different settings; add "
            "--model FILE with the run file of the one to export"
        )
    return fitting[0]


def _names(runs: Sequence[SavedRun]) -> str:
    return ", ".join(sorted({run.name for run in runs}))


def choose_set(found: SavedRun, root: Path, step: int | None = None) -> Choice:
    """Choose the newest position that every stage has, or that of `step`; ConfigError lists what each stage has."""
    run = found.run
    if run is None:
        raise ConfigError(
            f"run {found.name} in {root} was saved without its settings (by an older peerd); add --model FILE with its "
            "run file"
        )
    stages = range(run.pipeline.stages)
    lacking = [stage for stage in stages if not found.saved.get(stage)]
    if lacking:
        raise ConfigError(
            f"{root} contains no checkpoint of stage {lacking[0]} of run {found.name} ({_found(found, run)}); "
            "give a folder that also contains the data directory of a peer of that stage, or a backbone's, which "
            "keeps all stages: --backbone DIR"
        )
    whole = set.intersection(*(set(found.saved[stage]) for stage in stages))
    fitting = [place for place in whole if step is None or place.step == step]
    if not fitting:
        what = "no step is saved by every stage" if step is None else f"step {step} is not saved by every stage"
        able = sorted({place.step for place in whole})
        advice = f"steps that all have: {_listed(able)}" if able else "wait for the next checkpoint"
        raise ConfigError(f"run {found.name} in {root}: {what} ({_found(found, run)}); {advice}")
    place = max(fitting, key=lambda one: (one.step, _written(found, one), one.lineage))
    notes = [
        f"stage {stage} also has step {found.steps(stage)[-1]}, but not every stage has it"
        for stage in stages
        if step is None and found.steps(stage)[-1] > place.step
    ]
    if sum(other.step == place.step for other in fitting) > 1:
        notes.append(f"step {place.step} was made more than once; the version saved last was exported")
    return Choice(found, run, place, [found.saved[stage][place] for stage in stages], notes)


def _written(found: SavedRun, place: Place) -> float:
    """Time at which a position was last saved, according to the file system."""
    paths = [path for stage in found.saved.values() for path in stage.get(place, [])]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _found(found: SavedRun, run: RunFile) -> str:
    return "; ".join(f"stage {n}: {_listed(found.steps(n))}" for n in range(run.pipeline.stages))


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[-_LISTED:])) or "none"
    return f"..., {shown}" if len(steps) > _LISTED else shown


def load_set(choice: Choice) -> tuple[dict[str, Tensor], list[Path], list[str]]:
    """The model's tensors by the run's names, the manifest used for each stage, and notes on damaged checkpoints."""
    tensors: dict[str, Tensor] = {}
    used: list[Path] = []
    notes: list[str] = []
    for stage, manifests in enumerate(choice.sources):
        for path in manifests:
            checkpoints = Checkpoints(path.parent, 1, bytes.fromhex(choice.found.fingerprint), stage)
            try:
                state, _ = checkpoints.load(choice.place.step)
            except ConfigError as error:
                if path == manifests[-1]:
                    raise
                notes.append(f"left out: {error}")
                continue
            tensors |= parameters_in(state)
            used.append(path)
            break
    return tensors, used, notes
