"""A run's settings beside its checkpoints (`run.json`), so that these can be read without the run file, and a copy of
the run's tokenizer, if it has one.

Contains the settings that the peers of a run share, except the location of the text. Of this peer's own settings it
contains only what its user allowed for a run joined by a link (`LineSection`); no addresses, limits or tokens. Its
fingerprint identifies the checkpoints that it belongs to. It is written atomically, before the first checkpoint.
Reading validates it like a run file and raises ConfigError, which names the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from peerd.core.decoders import convert, from_json
from peerd.core.errors import ConfigError
from peerd.run.check import check
from peerd.run.home import write_atomically
from peerd.run.runfile import FINGERPRINT_SECTIONS, RunFile

NAME: Final = "run.json"
TOKENIZER: Final = "tokenizer.json"
_FORMAT: Final = 1
_BYTES: Final = 1 << 20


class _Record(msgspec.Struct, frozen=True):
    format: int
    fingerprint: str  # of the run, in hexadecimal, as in its checkpoints
    settings: dict[str, Any]


def settings_of(run: RunFile) -> dict[str, Any]:
    """Settings that the peers of a run share, without the location of its text."""
    tree = msgspec.to_builtins(run)
    more = [name for name in ("experts", "loop") if tree[name] is not None]
    return {name: tree[name] for name in (*FINGERPRINT_SECTIONS, *more) if name != "data"}


def run_of(settings: dict[str, Any], where: str) -> RunFile:
    """The run with these settings (see `settings_of`); raises ConfigError, prefixed by `where`, if they are invalid."""
    try:
        run = convert({name: value for name, value in settings.items() if name != "data"}, RunFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: not the settings of a run: {error}") from error
    if faults := check(run):
        raise ConfigError(f"{where}: {faults[0][0]} {faults[0][1]}")
    return run


def write_record(folder: Path, run: RunFile, fingerprint: bytes) -> None:
    """Write the settings of `run` into the folder with its stages' checkpoints; raises OSError."""
    allowed = {} if run.line is None else {"line": msgspec.to_builtins(run.line)}
    record = _Record(_FORMAT, fingerprint.hex(), settings_of(run) | allowed)
    folder.mkdir(parents=True, exist_ok=True)
    if run.model.vocab != "bytes":
        _replace(folder / TOKENIZER, Path(run.model.vocab).read_bytes())
    _replace(folder / NAME, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read_record(folder: Path) -> tuple[str, RunFile]:
    """Read the fingerprint, in hexadecimal, and the settings of the run whose checkpoints are in `folder`.

    `model.vocab` becomes the path of the copied tokenizer. Raises FileNotFoundError if there is no record.
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
