"""Index of the files under an http(s) address: `index.json` beside them, with each file's name, size and SHA-256.

`python -m peerd.data.files.file_index FOLDER` writes it for a folder that a web server will serve, and prints its own
SHA-256. With that as `digest` in the run file, all peers read the same text or none. Digests of a file's pieces let a
trainer use the first pieces while it fetches the rest. An index comes from the network: sizes, counts and names are
bounded, and a name cannot point outside the folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError
from peerd.core.limits import DATA_FILE_BYTES, INDEX_FILES, INDEX_NAME_CHARS

INDEX_NAME: Final = "index.json"
PIECE_BYTES: Final = 1 << 20  # a file's first sample needs one piece
_MOST_PIECES: Final = 200_000  # of all files together; pieces get larger to stay below it


class IndexedFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file: its name below the folder with `/` between parts, its size, its SHA-256 in hex.

    `pieces`: SHA-256 of each `piece_bytes` of the file, the last piece being the rest; empty in an index of an older
    version.
    """

    name: str
    bytes: int
    sha256: str
    piece_bytes: int = 0
    pieces: list[str] = msgspec.field(default_factory=list)


class FileIndex(msgspec.Struct, frozen=True):
    """All files below a folder."""

    files: list[IndexedFile]


def parse_index(raw: bytes, where: str) -> list[IndexedFile]:
    """The files of an index; ConfigError explains what is wrong with it, prefixed by `where`."""
    try:
        files = from_json(raw, FileIndex).files
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not an index of files: {error}") from None
    if len(files) > INDEX_FILES:
        raise ConfigError(f"{where}: has {len(files)} files; allowed: up to {INDEX_FILES}")
    seen: set[str] = set()
    for file in files:
        if fault := _fault(file):
            raise ConfigError(f"{where}: file {file.name[:100]!r}: {fault}")
        if file.name in seen:
            raise ConfigError(f"{where}: file {file.name[:100]!r} is listed twice")
        seen.add(file.name)
    return files


def _fault(file: IndexedFile) -> str | None:
    parts = file.name.split("/")
    if len(file.name) > INDEX_NAME_CHARS or not file.name.isprintable() or "\\" in file.name:
        return f"not a name; allowed: up to {INDEX_NAME_CHARS} printable characters"
    if any(part in ("", ".", "..") for part in parts):
        return "points outside the folder; allowed: names below it"
    if not 0 <= file.bytes <= DATA_FILE_BYTES:
        return f"has {file.bytes} bytes; allowed: 0 to {DATA_FILE_BYTES}"
    if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in (file.sha256, *file.pieces)):
        return "sha256 must be 64 of 0-9 and a-f"
    if file.pieces and not (file.piece_bytes > 0 and len(file.pieces) == -(-file.bytes // file.piece_bytes)):
        return f"has {len(file.pieces)} pieces; allowed: one for each piece_bytes ({file.piece_bytes}), or none"
    return None


def encode_index(files: list[IndexedFile]) -> bytes:
    """Encode an index as JSON text."""
    return msgspec.json.format(msgspec.json.encode(FileIndex(files)), indent=1) + b"\n"


def with_pieces(paths: Mapping[str, Path], go_on: Callable[[], bool] = lambda: True) -> list[IndexedFile]:
    """Make the index entries, with pieces, of the given files (name to path); raises OSError. `go_on` is called
    regularly; if it returns False, reading ends early.
    """
    piece = PIECE_BYTES
    sizes = [path.stat().st_size for path in paths.values()]
    while sum(-(-size // piece) for size in sizes) > _MOST_PIECES + len(sizes):
        piece *= 2
    files: list[IndexedFile] = []
    for name, path in paths.items():
        whole, pieces = hashlib.sha256(), []
        with path.open("rb") as stream:
            while go_on() and (part := stream.read(piece)):
                whole.update(part)
                pieces.append(hashlib.sha256(part).hexdigest())
            several = len(pieces) > 1
            size, kept = os.fstat(stream.fileno()).st_size, pieces if several else []
            files.append(IndexedFile(name, size, whole.hexdigest(), piece if several else 0, kept))
    return files


def make_index(folder: Path) -> bytes:
    """Make the index of all files below `folder`, except hidden ones and an existing index."""
    paths: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != INDEX_NAME and not any(part.startswith(".") for part in name.split("/")):
            paths[name] = path
    raw = encode_index(with_pieces(paths))
    parse_index(raw, str(folder))
    return raw


def main(arguments: list[str]) -> int:
    """Write the index of the folder that is the only argument; returns the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(f"usage: python -m peerd.data.files.file_index FOLDER (writes FOLDER/{INDEX_NAME})", file=sys.stderr)
        return 2
    try:
        raw = make_index(Path(arguments[0]))
        (Path(arguments[0]) / INDEX_NAME).write_bytes(raw)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"digest: {hashlib.sha256(raw).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
