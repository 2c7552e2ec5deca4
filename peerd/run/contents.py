"""Digests of the local files that a run file names. Peers of a run compare them, since the contents must be equal.

The digest of a tokenizers file is the SHA-256 of its text. The digest of a function (`module:function`) also covers the
local files that its module imports with import statements. All kinds of line ends count as equal, since copying between
systems may change them. Installed packages are not included; `imported` lists them. This module neither runs the code
nor imports torch, so a backbone can compare digests, too. It reads files, so do not call it in the event loop.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from peerd.core.errors import ConfigError
from peerd.run.runfile import AllowedCode, RunFile, sources_of

_FILES: Final = 256  # most files of one function's source
_COMMON: Final = sys.stdlib_module_names | {"torch", "numpy", "peerd"}  # packages that are not listed as imported


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a function: its digest, its files (the function's own first), and installed packages they import."""

    digest: str
    files: tuple[Path, ...]
    imported: tuple[str, ...]


def is_function(text: str) -> bool:
    """True if `text` has the form `module:function`."""
    return re.fullmatch(r"[^\s:]+:[^\s:]+", text) is not None


def local_file(module: str) -> Path:
    """Path of a module's file relative to the working directory. The file may not exist."""
    return Path(module if module.endswith(".py") else module.replace(".", "/") + ".py")


def text_digest(file: Path) -> str:
    """SHA-256 of a text file, independent of its line ends. Raises OSError."""
    return hashlib.sha256(_text(file)).hexdigest()


def source_of(function: str) -> Source | None:
    """The source of `module:function`, or None if it cannot be read."""
    module = function.partition(":")[0]
    file = _find(module)
    if file is None:
        return None
    beside = (
        (Path.cwd(), file.parent) if local_file(module).is_file() else ()
    )  # of an installed module only its file counts
    found: dict[str, Path] = {"": file}  # by import name, which is the same on every machine
    packages: set[str] = set()
    queue = [file]
    while queue and len(found) < _FILES:
        one = queue.pop(0)
        for name, folder in _imports(one):
            local = _local(name, beside if folder is None else (folder,))
            if local is not None and local not in {known.resolve() for known in found.values()}:
                found[name if name not in found else f"{name} {len(found)}"] = local
                queue.append(local)
            elif local is None and folder is None:
                packages.add(name.partition(".")[0])
    whole = hashlib.sha256()
    for name, path in sorted(found.items()):
        text = _text(path)
        whole.update(f"{name} {len(text)}\n".encode() + text)
    return Source(
        whole.hexdigest(),
        tuple(found.values()),
        tuple(sorted(packages - _COMMON - {name.partition(".")[0] for name in found})),
    )


def with_digests(run: RunFile) -> RunFile:
    """`run` with the digests of the files that it names and that exist here.

    Raises ConfigError, whose text begins with the key, if a file differs from the digest in the run file.
    """
    vocab, kind = run.model.vocab_digest, run.model.kind_digest
    if run.model.vocab != "bytes" and (found := _digest_of(Path(run.model.vocab))):
        vocab = _same("model.vocab_digest", run.model.vocab, vocab, found)
    kind = _checked("model.kind_digest", run.model.kind, kind)
    model = msgspec.structs.replace(run.model, vocab_digest=vocab, kind_digest=kind)
    experts = run.experts
    if experts is not None:
        block = _checked("experts.block_digest", experts.block, experts.block_digest)
        experts = msgspec.structs.replace(experts, block_digest=block)
    return msgspec.structs.replace(run, model=model, experts=experts)


def allowed_code(file: str) -> AllowedCode:
    """A Python file that the user allows, with its current digest. Raises ConfigError if it does not exist."""
    source = source_of(f"{file}:") if file.endswith(".py") and Path(file).is_file() else None
    if source is None:
        raise ConfigError(f"--allow-code {file}: there is no such Python file here (looked from {Path.cwd()})")
    return AllowedCode(path=file, digest=source.digest)


def changed_code(run: RunFile) -> list[tuple[str, str]]:
    """Faults of a run file from a join link: files that the user allowed, and that have changed or are missing.

    Without this check, Python would import an installed module of the same name instead.
    """
    code = run.line.code if run.line is not None else []
    return [(f"line.code[{n}].path", fault) for n, one in enumerate(code) if (fault := code_fault(one)) is not None]


def code_fault(allowed: AllowedCode) -> str | None:
    """Why a file is not the one that the user allowed, or None if it is."""
    source = source_of(f"{allowed.path}:") if Path(allowed.path).is_file() else None
    if source is not None and source.digest == allowed.digest:
        return None
    what = "is not in this folder" if source is None else "has changed since it was allowed"
    return f"is {allowed.path!r:.200}, which {what}; use the join link again, with --allow-code"


def _checked(key: str, text: str, told: str) -> str:
    """Digest of a function's source if it exists here, else `told`. Raises ConfigError if both exist and differ."""
    source = source_of(text) if is_function(text) else None
    return told if source is None else _same(key, str(source.files[0]), told, source.digest)


def _functions(run: RunFile) -> dict[str, tuple[str, str]]:
    """Functions whose source must be equal on all peers, by key of the run file, each with its digest or ""."""
    named = {"model.kind": (run.model.kind, run.model.kind_digest)}
    if run.experts is not None:
        named["experts.block"] = (run.experts.block, run.experts.block_digest)
    return {key: (text, digest) for key, (text, digest) in named.items() if is_function(text)}


def unknown(run: RunFile) -> list[str]:
    """Messages on the files that `run` names whose digests are unknown, so that they cannot be compared."""
    told, m = [], run.model
    advice = "put it there, or copy the digest that a peer with the file prints to"
    if m.vocab != "bytes" and not m.vocab_digest:
        told.append(f"model.vocab: there is no file {m.vocab} here; {advice} model.vocab_digest")
    for key, (text, digest) in _functions(run).items():
        if not digest:
            file = local_file(text.partition(":")[0])
            told.append(f"{key}: there is no file {file} here; {advice} {key}_digest")
    return told


def not_compared(run: RunFile) -> list[str]:
    """Messages on the functions of `run` that import installed packages, whose versions are not compared."""
    functions = [(key, text) for key, (text, _) in _functions(run).items()]
    functions += [(f"{key}.path", source.path) for key, source in sources_of(run.data) if source.kind == "dataset"]
    sources = [(key, text, source_of(text)) for key, text in functions if is_function(text)]
    return [
        f"{key} {text} imports {', '.join(source.imported)}: their versions are not compared between peers"
        for key, text, source in sources
        if source is not None and source.imported
    ]


def named_files(run: RunFile) -> dict[str, str]:
    """The local files whose digests the run file has, by the key of the digest."""
    files = {"model.vocab_digest": run.model.vocab} if run.model.vocab != "bytes" else {}
    for key, (text, _) in _functions(run).items():
        files[f"{key}_digest"] = str(local_file(text.partition(":")[0]))
    return files


def digest_at(run: RunFile, key: str) -> str:
    """The digest under a key of `named_files`, or "" if it is unknown."""
    if key == "model.vocab_digest":
        return run.model.vocab_digest
    return _functions(run)[key.removesuffix("_digest")][1]


def _same(key: str, file: str, told: str, found: str) -> str:
    if told and told != found:
        raise ConfigError(f"{key} is {told}, but {file} here has the digest {found}")
    return found


def _digest_of(file: Path) -> str:
    try:
        return text_digest(file)
    except OSError:
        return ""


def _text(file: Path) -> bytes:
    return file.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")


def _find(module: str) -> Path | None:
    """A module's file: a local one, else an installed one, else None. Imports nothing."""
    file = local_file(module)
    if file.is_file():
        return file
    first, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    return _local(rest, tuple(Path(place) for place in spec.submodule_search_locations or []))


def _local(name: str, folders: tuple[Path, ...]) -> Path | None:
    inner = name.replace(".", "/")
    for folder in folders:
        for file in (folder / f"{inner}.py", folder / inner / "__init__.py"):
            if file.is_file():
                return file.resolve()
    return None


def _imports(file: Path) -> Iterator[tuple[str, Path | None]]:
    """Names of the modules that a file imports, each with the folder to search if the import is relative, else None.

    Yields nothing if the file is not valid Python.
    """
    try:
        tree = ast.parse(_text(file))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.resolve().parents[node.level - 1] if node.level else None
            if node.module:
                yield node.module, folder
            inside = f"{node.module}." if node.module else ""
            yield from ((inside + alias.name, folder) for alias in node.names)  # each may be a module
