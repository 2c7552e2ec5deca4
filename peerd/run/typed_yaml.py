"""Converts YAML files to typed sections. Reports all mistakes at once, each with line, key, value and what is allowed.

Reads only local files: those written by the user, and those that `to_yaml` wrote from checked values. Numbers follow
YAML 1.2, so `1e-3` is a number. Duplicate keys are an error. The size of the file is limited, also after expanding its
aliases.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from peerd.core.decoders import convert
from peerd.core.errors import ConfigError
from peerd.log import clean

DEPTH = 16

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlKind:
    """A kind of file: its name in messages, a required key, its root section, and its limits."""

    name: str
    least: str
    root: type[msgspec.Struct]
    file_bytes: int = 1 << 20  # a run file has about two thousand
    nodes: int = 10_000  # keys and values; aliases count each time they are used


@dataclass(slots=True)
class YamlFaults:
    """The mistakes found so far, the line of each key, and `broken`: keys whose values are unknown due to a mistake."""

    root: type[msgspec.Struct] | None = None  # section of the whole file, to suggest the place of a misplaced key
    lines: dict[KeyPath, int] = field(default_factory=dict)
    found: list[tuple[int | None, str]] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)

    def add(self, path: KeyPath, message: str) -> None:
        name = dotted(path)
        space = "" if message.startswith(":") or not name else " "
        self.found.append((self.line_of(path), f"{name}{space}{message}"))

    def line_of(self, path: KeyPath) -> int | None:
        """Line of a key; if it is missing, that of its section. None if that is the whole file."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)

    def error(self, file: Path) -> ConfigError:
        told = [
            f"line {line}: {text}" if line else text
            for line, text in sorted(self.found, key=lambda f: (f[0] or 0, f[1]))
        ]
        if len(told) == 1:
            return ConfigError(f"{file}, {told[0]}" if self.found[0][0] else f"{file}: {told[0]}")
        return ConfigError(f"{file} has {len(told)} mistakes:\n" + "\n".join(f"  {text}" for text in told))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the numbers of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.Inf|\.INF)$|\.nan$"
    ),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes exactly the texts that `_Loader` would not read as text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def to_yaml(tree: dict[str, Any]) -> str:
    """Plain values as YAML. `parse_yaml` reads the same values from it."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return text


def dotted(path: KeyPath) -> str:
    """A path as text, as in `optimizer.lr` and `bootstrap[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return clean(text)


def parts_of(name: str) -> KeyPath:
    """The path that `dotted` writes as `name`."""
    return tuple(int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", name))


def parse_yaml(path: Path, kind: YamlKind) -> tuple[dict[str, Any], YamlFaults]:
    text = _read(path, kind)
    faults = YamlFaults(kind.root)
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{path} is empty; at least {kind.least} is needed")
            _walk(root, (), faults, iter(range(kind.nodes)))
            tree = loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}{place}: this is not YAML: {problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: this is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: found {_kind(tree)}; allowed: keys with values, such as {kind.least}")
    return tree, faults


def _read(path: Path, kind: YamlKind) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(kind.file_bytes + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}{_neighbour(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    if len(raw) > kind.file_bytes:
        raise ConfigError(f"{path} is larger than {kind.file_bytes >> 20} MiB; this is not a {kind.name}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _neighbour(path: Path) -> str:
    try:
        names = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _walk(node: yaml.Node, path: KeyPath, faults: YamlFaults, budget: Iterator[int]) -> None:
    """Record the line of each key, and add a fault for each duplicate key."""
    if len(path) > DEPTH or next(budget, None) is None:
        raise ValueError("nested too deeply, or too large once its aliases are expanded")
    faults.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                faults.found.append((line, f"{dotted((*path, name))} is given twice, first on line {first[name]}"))
            first.setdefault(name, line)
            faults.lines[(*path, name)] = line
            _walk(value, (*path, name), faults, budget)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), faults, budget)


def typed_section(cls: type[Any], tree: object, path: KeyPath, faults: YamlFaults) -> Any:
    """Convert `tree` to a struct of type `cls`. Adds mistakes to `faults`, and uses placeholders for their values."""
    fields = {f.encode_name: f for f in msgspec.structs.fields(cls)}
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        faults.broken.add(path)
        faults.add(path, f"is {_shown(tree)}; allowed: keys and values ({', '.join(fields)})")
        tree = {}
    else:
        for name in [name for name in tree if name not in fields]:
            faults.add(
                (*path, str(name)), f"is not a known key; {_nearest(str(name), list(fields), path, faults.root)}"
            )
            near = difflib.get_close_matches(str(name), list(fields), n=1)
            faults.broken |= {(*path, meant) for meant in near}  # the key that was probably meant has no value
        for name, info in fields.items():
            if name not in tree and info.required:
                faults.broken.add((*path, name))
                faults.add((*path, name), f"is missing; allowed: {_allowed(info.type)}")
    values = {name: _value(fields[name].type, tree[name], (*path, name), faults) for name in fields if name in tree}
    kept = {name: value for name, value in values.items() if value is not None or (*path, name) not in faults.broken}
    stand_ins = {info.name: "?" for info in fields.values() if info.required}
    return cls(**stand_ins | {fields[name].name: value for name, value in kept.items()})


def _value(kind: Any, value: object, path: KeyPath, faults: YamlFaults) -> Any:
    """Convert a value to its type. Returns None after adding a fault."""
    if section := _section_that_may_miss(kind):
        return None if value is None else typed_section(section, value, path, faults)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return typed_section(kind, value, path, faults)
    if isinstance(value, list) and (section := _item_section(kind)):
        return [typed_section(section, item, (*path, index), faults) for index, item in enumerate(value)]
    try:
        typed = convert(value, kind)
    except msgspec.ValidationError:
        hint = _nearest_choice(kind, value)
        quotes = " (put it in quotes)" if kind is str and not isinstance(value, dict | list | None) else ""
        faults.add(path, f"is {_shown(value)}; allowed: {_allowed(kind)}{quotes}{hint}")
        faults.broken.add(path)
        return None
    if isinstance(typed, float) and not math.isfinite(typed):
        faults.add(path, f"is {value}; allowed: a finite number")
        faults.broken.add(path)
        return None
    return typed


def _section_that_may_miss(kind: Any) -> type[msgspec.Struct] | None:
    """The section of an optional key's type, `Section | None`. Returns None for other types."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _item_section(kind: Any) -> type[msgspec.Struct] | None:
    """The section of the items of a list of sections. Returns None for other types."""
    item = get_args(kind)[0] if get_origin(kind) is list else None
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def _nearest(name: str, known: list[str], path: KeyPath, root: type[msgspec.Struct] | None) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    places = _all_keys(root, ()) if root is not None else ()
    elsewhere = [place for place in places if place[-1] == name and place[:-1] != path]
    if elsewhere:
        return f"did you mean {dotted(elsewhere[0])}?"
    return f"allowed: {', '.join(known)}"


def _all_keys(cls: type[Any], path: KeyPath) -> Iterator[KeyPath]:
    for info in msgspec.structs.fields(cls):
        yield (*path, info.encode_name)
        section = _section_that_may_miss(info.type) or info.type
        if isinstance(section, type) and issubclass(section, msgspec.Struct):
            yield from _all_keys(section, (*path, info.encode_name))


def _nearest_choice(kind: Any, value: object) -> str:
    if get_origin(kind) is not Literal or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, [str(choice) for choice in get_args(kind)], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _allowed(kind: Any) -> str:
    """Description of a type for users."""
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return "one of " + ", ".join(choices) if len(choices) > 1 else choices[0]
    if section := _item_section(kind):
        return f"a list, each item keys and values ({', '.join(section.__struct_encode_fields__)})"
    if get_origin(kind) is list:
        return f"a list, each item {_allowed(get_args(kind)[0])}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_allowed(part) for part in get_args(kind) if part is not NoneType) + ", or nothing"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(kind, str(kind))


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    text = clean(str(value))
    return f"{text if len(text) <= 60 else text[:59] + '…'!s} ({_kind(value)})"


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "keys and values"}
    return names.get(type(value), type(value).__name__)
