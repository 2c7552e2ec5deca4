"""Finds a role's class by its name in the entry point group `peerd.roles`, or as `module:Class`.

A module is imported only if its role is requested, so that `peerd backbone` never loads torch. An entry point is
rejected if its module belongs to another distribution than the one that declared it, since otherwise another package
of the same name would run in its place.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from peerd.core.errors import ConfigError
from peerd.log import clean
from peerd.role.role import Role
from peerd.run import local_code

GROUP = "peerd.roles"


def names() -> list[str]:
    """The names of all installed roles, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load(text: str) -> type[Role]:
    """The class of a role, given by name or as `module:Class`. Raises ConfigError if it cannot be loaded."""
    if ":" in text:
        module, _, attribute = text.partition(":")
        if not module or not attribute:
            raise ConfigError(f"role {clean(text)!r} names no module and class; allowed: a name, or module:Class")
        return _class(text, local_code.imported(module, f"role {clean(text)!r}"), attribute)
    point = next((p for p in entry_points(group=GROUP) if p.name == text), None)
    if point is None:
        raise ConfigError(_unknown(text))
    refuse_foreign(point)
    what = f"role {clean(text)!r}"
    return _class(text, local_code.guarded(lambda: importlib.import_module(point.module), what), point.attr)


def _unknown(text: str) -> str:
    known = names()
    if not known:
        return (
            f"role {clean(text)!r} is unknown: no roles are installed; install peerd with `pip install .`, "
            "or name a role as module:Class"
        )
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}, or module:Class"
    return f"role {clean(text)!r} is unknown; {hint}"


def refuse_foreign(point: EntryPoint) -> None:
    """Raise ConfigError unless the entry point's module belongs to the distribution that declared it."""
    dist = point.dist
    if dist is None:
        raise ConfigError(f"role {point.name!r} was declared by no installed package")
    package = point.module.partition(".")[0]
    for module in (package, point.module):  # the package first, since searching a submodule executes the package
        origin = _origin(module)
        if origin is None:
            raise ConfigError(f"role {point.name!r}: its module {module} is missing; install {dist.name} again")
        if not _owns(dist, origin):
            advice = f"install {dist.name} in an environment of its own"
            if origin.is_relative_to(Path.cwd()):
                advice = f"start peerd in another folder, or rename {origin}"
            raise ConfigError(
                f"role {point.name!r} of {dist.name} can't be loaded: another package provides the module {module} "
                f"({origin}); {advice}"
            )


def _origin(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).resolve()
    places = list(spec.submodule_search_locations or [])  # a package without __init__.py
    return Path(places[0]).resolve() if places else None


def _owns(dist: Distribution, origin: Path) -> bool:
    root = _source_root(dist)
    if root is not None:
        return origin.is_relative_to(root)
    recorded = dist.files or []
    return any(Path(str(dist.locate_file(file))).resolve() == origin for file in recorded if file.suffix == ".py")


def _source_root(dist: Distribution) -> Path | None:
    """The source tree of an editable or in-place install, or None for an ordinary install."""
    if dist.read_text("RECORD") is None:
        return Path(str(dist.locate_file(""))).resolve()  # the metadata is next to the sources
    told = json.loads(dist.read_text("direct_url.json") or "{}")
    if not told.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(unquote(urlsplit(told["url"]).path))).resolve()


def _class(text: str, module: ModuleType, attribute: str) -> type[Role]:
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        raise ConfigError(f"role {clean(text)!r}: module {module.__name__} has no class {attribute!r}")
    missing = [name for name in ("name", "needs_run", "run", "leave", "status") if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"role {clean(text)!r}: {attribute} is not a role; it lacks {', '.join(missing)}")
    return found
