"""The user's own functions that a run file names as `module:function`: models and data sources.

The module is a Python file below the working directory or, for the user's own run file, an installed module. The user
of this machine put that code there. A run file received through a link may name only files that the user allowed:
`run.check_line` checks that first, and `find_function` checks it again.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from peerd.core.errors import ConfigError
from peerd.run.check_line import function_file
from peerd.run.contents import code_fault, local_file
from peerd.run.local_code import guarded, imported, look_here
from peerd.run.runfile import LineSection

_DRAWING = threading.RLock()


@contextmanager
def torchs_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Context manager to use torch's global generator. `seed`, if given, seeds it; its state is restored afterwards.

    All threads of the process share that generator, so only one thread at a time is admitted; otherwise a seed would
    not determine the numbers.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def find_function(text: str, key: str, otherwise: str = "", line: LineSection | None = None) -> Callable[..., object]:
    """Return the function that `text` names. `key` (of the run file) and `otherwise` (other allowed values) are for
    ConfigErrors.

    `line`: set for a run file received through a link; the function must then be in a file that the user allowed.
    """
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{key} is {text!r}; allowed: {otherwise}module:function of a local Python file")
    if line is not None:
        _demand_allowed(text, key, line)
    function = getattr(_module(module_name, f"{key} {text}"), attribute, None)
    if not callable(function):
        raise ConfigError(f"{key} {text}: {module_name} has no function {attribute}")
    found: Callable[..., object] = function
    return found


def _module(name: str, where: str) -> ModuleType:
    file = local_file(name)
    if file.is_file():
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            loader = spec.loader
            look_here()  # so that the file can import its neighbours
            guarded(lambda: loader.exec_module(module), f"{where}: {file} can't be loaded")
            return module
    if not _is_installed(name.partition(".")[0]):
        raise ConfigError(f"{where}: there is no file {file} here and no module {name} (looked from {Path.cwd()})")
    return imported(name, where)


def _demand_allowed(text: str, key: str, line: LineSection) -> None:
    allowed = next((one for one in line.code if one.path == function_file(text)), None)
    fault = "is code that was not allowed when the run was joined" if allowed is None else code_fault(allowed)
    if fault is not None:
        raise ConfigError(f"{key} {text}: {fault}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
