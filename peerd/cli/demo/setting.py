"""The demo's run: a small run file that ships with peerd, changed by the user's options and written to the demo's
folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Literal

import msgspec
import yaml

import peerd
from peerd.core.errors import ConfigError
from peerd.run.config import load_run
from peerd.run.grid import grid_of
from peerd.run.home import make_private_dir, write_atomically
from peerd.run.runfile import RunFile

_FILES = {"stages": "tiny.yaml", "moe": "moe.yaml"}
_IN_FLIGHT = 8  # microbatches of the trainer in flight
_HOSTS_OF_ALL = 3  # hosts of the demo's four that together have room for all experts, so that one can be lost
_KINDS = {".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The demo's command line options."""

    steps: int | None
    data: str | None
    calm: bool
    as_json: bool
    folder: Path | None
    kind: Literal["stages", "moe"] = "stages"


def config_file(name: str) -> Path:
    """Path of a file in `configs/`, of the source tree or of the installed package."""
    beside = Path(peerd.__file__).resolve().parent.parent / "configs" / name
    if beside.is_file():
        return beside
    try:
        recorded = files("peerd") or []
    except PackageNotFoundError:
        recorded = []
    for file in recorded:
        if file.parts[-2:] == ("configs", name):
            return Path(str(file.locate())).resolve()
    raise ConfigError(f"configs/{name} is missing from this installation; install peerd again")


def prepare(wish: DemoConfig) -> tuple[Path, RunFile]:
    """Write `run.yaml` to the demo's folder. Returns the folder and the run."""
    run = load_run(config_file(_FILES[wish.kind])).run
    if run.experts is not None:
        run = _shared_out(run)
    if wish.steps is not None:
        warmup = min(run.optimizer.warmup_steps, wish.steps // 4)
        optimizer = msgspec.structs.replace(run.optimizer, total_steps=wish.steps, warmup_steps=warmup)
        run = msgspec.structs.replace(run, optimizer=optimizer)
    if wish.data is not None:
        run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, **_data(wish.data)))
    folder = make_private_dir(wish.folder or Path(tempfile.mkdtemp(prefix="peerd-demo-")))
    if any(folder.glob("*/identity.key")):
        raise ConfigError(f"{folder} has an earlier demo; choose an empty folder")
    file = folder / "run.yaml"
    write_atomically(file, yaml.safe_dump(msgspec.to_builtins(run), sort_keys=False).encode())
    return folder, load_run(file).run


def _shared_out(run: RunFile) -> RunFile:
    """Set how many experts each host has, so that the others can host all if one is lost.

    Also limits the microbatches in flight: experts on this machine answer at once, so more microbatches would only wait
    for the processor, and their updates would be stale.
    """
    grid = grid_of(run)
    each = -(-grid.layers * grid.places // _HOSTS_OF_ALL)
    limits = msgspec.structs.replace(run.limits, experts=each, microbatches_in_flight=_IN_FLIGHT)
    return msgspec.structs.replace(run, limits=limits)


def _data(text: str) -> dict[str, str]:
    """`data.kind` and the absolute `data.path` for a file, a folder or a glob. Raises ConfigError if it is missing."""
    path = Path(text).expanduser()
    absolute = path if path.is_absolute() else Path.cwd() / path
    if not any(sign in text for sign in "*?[") and not absolute.exists():
        raise ConfigError(f"--data {text}: there is no such file or folder")
    return {"kind": _KINDS.get(path.suffix, "text"), "path": str(absolute)}
