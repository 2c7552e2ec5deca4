"""A user who pastes a stranger's line: a home with files that nobody may touch, and all that Python does meanwhile.

`watch` hears the interpreter's audit events (files, modules, connections, processes). Python has no way to take a hook
away, so one hook serves all tests of a process and is deaf between them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parents[2]
INSTALLED: Final = "decoy_installed"  # a module on the path that is not in the working directory
SECRETS: Final = (".env", ".ssh/id", "notes.txt", "texts/a.txt", "tok.json", "mine.py")
_HEARD: Final = frozenset(
    {
        *("open", "import", "exec", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"),
        *("os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime", "os.system", "os.exec", "os.posix_spawn"),
        *("os.fork", "os.kill", "subprocess.Popen", "socket.connect", "socket.bind", "socket.sendto", "urllib.Request"),
    }
)
_CHANGES: Final = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_PROCESSES: Final = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "subprocess.Popen"}
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_listening: list[list[tuple[str, tuple[Any, ...]]]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _listening and event in _HEARD:
        _listening[-1].append((event, args))


sys.addaudithook(_hook)


class Home:
    """The working directory of a user, with a data directory beside it."""

    def __init__(self, folder: Path) -> None:
        self.work, self.data, self.modules = folder / "work", folder / "data", folder / "modules"
        for name in SECRETS:
            file = self.work / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}\n" if name == "tok.json" else "secret = 'a secret of some length'\n" * 40)
        (self.work / "mine.py").write_text(_MODULE)
        self.modules.mkdir()
        (self.modules / f"{INSTALLED}.py").write_text(_MODULE)

    def allowed(self, read: list[str]) -> Allowed:
        """The allow-list of a run to which the user gave the files `read`."""
        return Allowed(self, [(self.work / name).resolve() for name in read])


class Allowed:
    """What a line run may do; see `faults`."""

    def __init__(self, home: Home, given: list[Path]) -> None:
        self._home = home
        places = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.prefix, sys.base_prefix, ROOT)
        self._code = [Path(place).resolve() for place in places]
        self._system = [Path(place) for place in ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/bin", "/sbin")]
        self._own = [home.data.resolve()]
        self._given = given

    def faults(self, events: list[tuple[str, tuple[Any, ...]]]) -> list[str]:
        """Events that are outside the allow-list:

        reads: Python's and peerd's own files, the system's, the data directory, and what the user gave; writes: the
        data directory; modules: none of the decoys; no connections (the tests play what resolves and dials names), no
        other processes.
        """
        found = []
        for event, args in events:
            if event == "open" and isinstance(args[0], str | bytes):
                path = _real(args[0])
                writes = bool((args[2] or 0) & _WRITES) or any(mode in str(args[1]) for mode in "wax+")
                bytecode = path.suffix == ".pyc" or "__pycache__" in path.parts or "/__pycache__/" in str(path)
                of_given = bytecode and any(path.name.startswith(f"{one.stem}.") for one in self._given)
                looked_for = not writes and path in map(_real, sys.path)  # by the search for modules
                if not (looked_for or of_given or self._readable(path)) or (
                    writes and not bytecode and not self._writable(path)
                ):
                    found.append(f"{'writes' if writes else 'opens'} {path}")
            elif event in ("os.listdir", "os.scandir") and args and isinstance(args[0], str | bytes):
                path = _real(args[0])
                if not self._readable(path) and path not in map(_real, sys.path):  # where modules are looked for
                    found.append(f"lists {path}")
            elif event in _CHANGES and isinstance(args[0], str | bytes):
                path = _real(args[0])
                if "__pycache__" not in str(path) and not self._writable(path):
                    found.append(f"{event} {path}")
            elif event == "import" and args[0] in (INSTALLED, "mine"):
                found.append(f"imports {args[0]}")
            elif event in _PROCESSES:
                found.append(f"{event} {args}")
            elif event in ("socket.connect", "socket.sendto") and args[0].family != socket.AF_UNIX:
                found.append(f"connects to {args[1]}")
        return found

    def _readable(self, path: Path) -> bool:
        places = [*self._code, *self._system, *self._own, *self._given, Path(tempfile.gettempdir(), "peerd-0")]
        return any(path.is_relative_to(place) for place in places)

    def _writable(self, path: Path) -> bool:
        return any(path.is_relative_to(place) for place in (*self._own, Path("/dev/null"), Path("/proc/self")))


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """All events until the end of the block."""
    events: list[tuple[str, tuple[Any, ...]]] = []
    _listening.append(events)
    try:
        yield events
    finally:
        _listening.pop()


def _real(path: str | bytes) -> Path:
    return Path(os.path.realpath(os.fsdecode(path)))


_MODULE: Final = """\
called = []

def docs(split, seed):
    called.append((split, seed))
    return [b"text " * 200]

def build(run):
    called.append(run)
    raise SystemExit("ran")
"""
_ = torch  # loaded before anything is watched
