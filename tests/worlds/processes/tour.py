"""A user at a shell: commands as they are typed, what they print, and a transcript that one can read (`pytest -s`).

Every process has a home of its own, so that nothing of this machine's user is read or left; none outlives the tour.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.waiting import eventually

PEERD = Path(sys.executable).parent / "peerd"
Start = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True)
class Said:
    """What one command printed, stdout and stderr together, and its exit code."""

    code: int
    text: str

    def one_sentence(self, *parts: str, code: int) -> None:
        """It ended with `code` and one message for people that holds all `parts`."""
        assert self.code == code, self
        message = self.text.partition("peerd: ")[2]
        assert "peerd: " not in message, self
        assert all(part in message for part in parts), self
        assert "Traceback" not in self.text, self


class Running:
    """A command that goes on, such as `peerd join`."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen, self.log = popen, log

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_for(self, pattern: str, patience_s: float = 200.0) -> re.Match[str]:
        """Until it has printed what matches; fails at once when it ends without."""
        found: list[re.Match[str]] = []

        def there() -> bool:
            if (match := re.search(pattern, self.said)) is not None:
                found.append(match)
            return bool(found)

        eventually(lambda: there() or self.popen.poll() is not None, patience_s)
        assert there(), f"never said {pattern!r}:\n{self.said}"
        return found[0]

    def until(self, done: Callable[[], bool], complaint: str, patience_s: float = 200.0) -> None:
        """Until `done`; fails at once when the command ends before."""
        eventually(lambda: done() or self.popen.poll() is not None, patience_s)
        assert done(), f"{complaint}:\n{self.said}"

    def ctrl_c(self, patience_s: float = 20.0) -> int:
        self.popen.send_signal(signal.SIGINT)
        return self.popen.wait(patience_s)


@dataclass(slots=True)
class Shell:
    """One user's shell on one machine: `home` is theirs, commands run in `home` unless told otherwise."""

    home: Path
    start_process: Start = subprocess.Popen
    env: Mapping[str, str] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in (self.home, self.home / "run"):
            folder.mkdir(mode=0o700, exist_ok=True)

    def run(self, line: str, cwd: Path | None = None, patience_s: float = 200.0) -> Said:
        """Type one command and wait for its end."""
        said = self.ask(line, cwd, patience_s)
        print(f"$ {line}\n{said.text}[{said.code}]\n")
        return said

    def ask(self, line: str, cwd: Path | None = None, patience_s: float = 200.0) -> Said:
        """As `run`, of what the tour itself asks again and again: not in the transcript, which people read."""
        popen = self._start(line, cwd, subprocess.PIPE)
        try:
            text = popen.communicate(timeout=patience_s)[0].decode("utf-8", "replace")
        finally:
            popen.kill()
        return Said(popen.returncode, text)

    def start(self, line: str, cwd: Path | None = None) -> Running:
        """Type one command in a window of its own."""
        log = self.home / f"window-{len(self.running)}.txt"
        with log.open("wb") as output:
            running = Running(self._start(line, cwd, output), log)
        self.running.append(running)
        return running

    def _start(self, line: str, cwd: Path | None, output: Any) -> subprocess.Popen[bytes]:
        words = shlex.split(line)
        if words[0] == "peerd":
            words[0] = str(PEERD)
        home = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run"), "OMP_NUM_THREADS": "1"}
        own = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "PYTEST_"))}
        return self.start_process(
            words,
            cwd=cwd or self.home,
            env={**own, **home, "COLUMNS": "100", **self.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        """End what still runs, and print what each window showed."""
        for running in self.running:
            running.popen.kill()
            running.popen.wait()
            print(f"--- {' '.join(map(str, running.popen.args))}\n{running.said}")  # type: ignore[arg-type]


@contextlib.contextmanager
def shells(folder: Path, *names: str) -> Iterator[list[Shell]]:
    """A shell for each user."""
    made = [Shell(folder / name) for name in names]
    try:
        yield made
    finally:
        for shell in made:
            shell.close()
