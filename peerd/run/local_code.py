"""Imports Python code of this machine's user, which they name on the command line or in a run file.

The working directory is last in the module search path, so that a folder `roles` or a file `platform.py` there never
replaces an installed package. Any exception of the user's code during import becomes a ConfigError with file and line.
Data from the network never reaches this module.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import outcome

from peerd.core.errors import ConfigError, PeerdError, missing_package

T = TypeVar("T")


def look_here() -> None:
    """Append the working directory to the module search path."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def imported(name: str, what: str) -> ModuleType:
    """Import the module `name`. Raises ConfigError, which begins with `what`, if it is missing or fails to load."""
    look_here()
    module = guarded(lambda: importlib.import_module(name), f"{what}: module {name} can't be loaded", name)
    file = getattr(module, "__file__", None)
    here = _file(name)
    if os.path.isfile(here) and (file is None or not os.path.samefile(file, here)):
        found = f"comes with {file}" if file is not None else "is built in"
        raise ConfigError(f"{what}: the module {name} {found}, so {here} is never read; give the file another name")
    return module


def _file(name: str) -> str:
    return os.path.join(os.getcwd(), *name.removesuffix(".py").split(".")) + ".py"


def guarded(load: Callable[[], T], what: str, name: str = "") -> T:
    """Call `load`. Exceptions of the user's code become ConfigError, which begins with `what`.

    `name` is the module to import, so that the message says whether it or a module that it imports is missing.
    """
    result = outcome.capture(load)
    if isinstance(result, outcome.Value):
        return result.value
    error = result.error
    if not isinstance(error, Exception) or isinstance(error, PeerdError):
        raise error
    if isinstance(error, ModuleNotFoundError):
        sought = error.name is not None and (name == error.name or name.startswith(f"{error.name}."))
        why = f"there is no module {name}" if sought else f"it needs {missing_package(error)}"
        raise ConfigError(f"{what}: {why}") from error
    raise ConfigError(f"{what}: {told(error)}") from error


def told(error: Exception) -> str:
    """An error of the user's code in one line: type, message, file and line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = next((f for f in reversed(frames) if "importlib" not in f.filename and f.filename != __file__), None)
    place = f" ({own.filename}, line {own.lineno})" if own is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}{place}"
