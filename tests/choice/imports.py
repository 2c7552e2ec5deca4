"""Import graph of this repository's Python files, read from their text: nothing is imported or run."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("peerd", "roles", "scripts", "tests")
STARTED = re.compile(r'"-m",\s*"((?:peerd|scripts|tests)[\w.]*)"')  # a module that a file runs as a process


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(file.read_text("utf-8"), str(file))


def sources(*folders: str) -> list[Path]:
    """Python files below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(file: Path) -> str:
    """Path of a file, from the root of the repository."""
    return file.relative_to(ROOT).as_posix()


def entry_points() -> dict[str, str]:
    """Roles by name: module and class."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, str] = project["entry-points"]["peerd.roles"]
    return found


@functools.cache
def import_statements(file: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All import statements of a file, inside functions and for type checkers too."""
    found, left = [], list[ast.AST](parsed(file).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):  # statements are in these alone
            left += getattr(node, block, ()) if not isinstance(node, ast.expr) else ()
    return tuple(sorted(found, key=lambda node: node.lineno))


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each import of a file.

    `from package import name` gives both `package` and `package.name` for packages of this repository.
    """
    package = file.relative_to(ROOT).parent.parts
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (start, node.module or "") if part)
            yield node.lineno, module
            if module.partition(".")[0] in PACKAGES:
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of a module, or None if this repository has none of that name."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@functools.cache
def files_imported(file: Path) -> frozenset[Path]:
    """Files of this repository that a file imports. `from package import module` names the module's file only."""
    found: set[Path | None] = set()
    for node in import_statements(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            for alias in node.names:
                found.add(file_of(f"{node.module}.{alias.name}") or file_of(node.module))
        elif isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names if alias.name.partition(".")[0] in PACKAGES}
    return frozenset(other for other in found if other is not None and other != file)


@functools.cache
def files_used(file: Path) -> frozenset[Path]:
    """Files that a file imports, and those of the modules that it starts as processes or loads as roles."""
    started = {file_of(module) for module in STARTED.findall(file.read_text("utf-8"))}
    if file == ROOT / "peerd/daemon/registry.py":
        started |= {file_of(target.partition(":")[0]) for target in entry_points().values()}
    main = ROOT / "peerd/__main__.py"
    return files_imported(file) | {main if other == ROOT / "peerd/__init__.py" else other for other in started if other}


def distances(file: Path) -> dict[Path, int]:
    """Files that a file uses, with the number of steps to each: 0 for itself, 1 for what it imports, and so on."""
    found, edge = {file: 0}, [file]
    while edge:
        edge = list({other for each in edge for other in files_used(each)} - found.keys())
        found |= dict.fromkeys(edge, max(found.values()) + 1)
    return found
