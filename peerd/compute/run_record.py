"""A run's settings beside its checkpoints, so that these can be read without the run file: `run.json`, and a copy of
the tokenizer where the run has one.

Holds what the peers of a run share, except where this peer has its text; of its own only what its user allowed a run
that came by a line (`LineSection`), no addresses, limits or tokens. The fingerprint in it says of which checkpoints it
is. Written whole or not at all, before the first checkpoint. Reading checks it like a run file; what is wrong is a
ConfigError that names the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from peerd.core.decoders import convert, from_json
from peerd.core.errors import ConfigError
from peerd.core.run.check import check
from peerd.core.run.runfile import FINGERPRINT_SECTIONS, RunFile
from peerd.home import write_atomically

NAME: Final = "run.json"
TOKENIZER: Final = "tokenizer.json"
_FORMAT: Final = 1
_BYTES: Final = 1 << 20


class _Record(msgspec.Struct, frozen=True):
    format: int
    fingerprint: str  # of the run, hexadecimal, as in its checkpoints
    settings: dict[str, Any]


def settings_of(run: RunFile) -> dict[str, Any]:
    """Settings that the peers of a run share, without the places of its text."""
    tree = msgspec.to_builtins(run)
    more = [name for name in ("experts", "loop") if tree[name] is not None]
    return {name: tree[name] for name in (*FINGERPRINT_SECTIONS, *more) if name != "data"}


def run_of(settings: dict[str, Any], where: str) -> RunFile:
    """The run of `settings_of`; ConfigError, with `where`, when these are none."""
    try:
        run = convert({name: value for name, value in settings.items() if name != "data"}, RunFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: these are not the settings of a run: {error}") from error
    if faults := check(run):
        raise ConfigError(f"{where}: {faults[0][0]} {faults[0][1]}")
    return run


def write_record(folder: Path, run: RunFile, fingerprint: bytes) -> None:
    """Put the settings of `run` into the folder that holds its stages' checkpoints; raises OSError."""
    allowed = {} if run.line is None else {"line": msgspec.to_builtins(run.line)}
    record = _Record(_FORMAT, fingerprint.hex(), settings_of(run) | allowed)
    folder.mkdir(parents=True, exist_ok=True)
    if run.model.vocab != "bytes":
        _replace(folder / TOKENIZER, Path(run.model.vocab).read_bytes())
    _replace(folder / NAME, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read_record(folder: Path) -> tuple[str, RunFile]:
    """The fingerprint, in hexadecimal, and the settings of the run whose checkpoints lie in `folder`.

    `model.vocab` is the tokenizer's copy there. FileNotFoundError when nothing was recorded.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES)
        found = from_json(raw, _Record)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if found.format != _FORMAT:
        raise ConfigError(f"{path} has format {found.format}; this peerd reads format {_FORMAT}")
    run = run_of(found.settings, str(path))
    if run.model.vocab != "bytes":
        copy = str(folder / TOKENIZER)
        line = run.line and msgspec.structs.replace(run.line, tokenizer=copy)
        run = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, vocab=copy), line=line)
    return found.fingerprint, run


def _replace(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    write_atomically(path, content, mode=0o644)
