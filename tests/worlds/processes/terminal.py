"""A terminal for tests: a program in a pseudo-terminal of some size, and the screen that its output makes.

Understands what rich writes: cursor movements, clearing, colours, the alternate screen. Text that runs
over the last column goes on in the next line, and over the last line it scrolls, as on a real one: so a picture that is
too large shows.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

_CONTROL = re.compile(r"\x1b\[([?]?)([0-9;]*)([A-Za-z])|\x1b[=>]")


class Grid:
    """The characters on the screen."""

    def __init__(self, columns: int, lines: int) -> None:
        self.alternate = False
        self._style = ""  # the numbers of the renditions since the last reset
        self._rest = ""
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        """Take another size; what is there stays, cut at the right and below."""
        old = getattr(self, "cells", [])
        self.styles = [[""] * columns for _ in range(lines)]
        self.columns, self.lines = columns, lines
        self.cells = [[" "] * columns for _ in range(lines)]
        for row, line in enumerate(old[:lines]):
            self.cells[row][: min(len(line), columns)] = line[:columns]
        self._row, self._column = min(getattr(self, "_row", 0), lines - 1), 0

    def rows(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.cells]

    def text(self) -> str:
        return "\n".join(self.rows())

    def feed(self, text: str) -> None:
        """Take output; a control sequence that is not whole yet waits for its rest."""
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _CONTROL.match(text, at)
                if found is None:
                    self._rest = text[at:]
                    return
                self._control(found)
                at = found.end()
                continue
            self._write(text[at])
            at += 1

    def _write(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._down()
        elif char.isprintable():
            if self._column >= self.columns:
                self._column = 0
                self._down()
            self.cells[self._row][self._column] = char
            self.styles[self._row][self._column] = self._style
            self._column += 1

    def _down(self) -> None:
        if self._row == self.lines - 1:
            self.cells = [*self.cells[1:], [" "] * self.columns]
            self.styles = [*self.styles[1:], [""] * self.columns]
        else:
            self._row += 1

    def _control(self, found: re.Match[str]) -> None:
        private, numbers, kind = found[1], [int(n) for n in (found[2] or "").split(";") if n], found[3]
        first = numbers[0] if numbers else 0
        if private and kind in "hl" and 1049 in numbers:
            self.alternate = kind == "h"
            self.cells = [[" "] * self.columns for _ in range(self.lines)]
        elif kind == "m":
            self._style = "" if not first else ";".join(filter(None, (self._style, found[2])))
        elif kind == "H":
            row, column = [*numbers, 1, 1][:2] if numbers else (1, 1)
            self._row, self._column = min(row, self.lines) - 1, min(column, self.columns) - 1
        elif kind == "A":
            self._row = max(0, self._row - max(1, first))
        elif kind == "J" and first == 2:
            self.cells = [[" "] * self.columns for _ in range(self.lines)]
        elif kind == "K":
            start, end = (0, self.columns) if first == 2 else (self._column, self.columns)
            self.cells[self._row][start:end] = [" "] * (end - start)


class Terminal:
    """A running program and its screen."""

    def __init__(self, master: int, process: subprocess.Popen[bytes], grid: Grid) -> None:
        self._master, self.process, self.grid = master, process, grid
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, as a user that drags its corner does; nothing is drawn by that."""
        self.read(0.0)
        self.grid.resize(columns, lines)
        _set_size(self._master, columns, lines)

    def read(self, seconds: float) -> None:
        """Take the program's output for so long, and what has come by then."""
        end = time.monotonic() + seconds
        while select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the program has ended
                return
            if not data:
                return
            self.grid.feed(self._decoder.decode(data))

    def until(self, done: Callable[[Grid], bool], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not done(self.grid):
            assert time.monotonic() < end, f"it never came:\n{self.grid.text()}"
            self.read(0.1)

    def interrupt(self) -> int:
        """Ctrl+C; the exit code."""
        os.write(self._master, b"\x03")
        while self.process.poll() is None:
            self.read(0.05)
        self.read(0.0)
        return self.process.returncode


def _set_size(master: int, columns: int, lines: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal(command: Sequence[str], columns: int, lines: int, env: Mapping[str, str]) -> Iterator[Terminal]:
    """The command in a terminal of its own; killed at the end, if it still runs."""
    master, slave = os.openpty()
    _set_size(master, columns, lines)

    def own_terminal() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TERM": "xterm-256color", **env}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(master, process, Grid(columns, lines))
    finally:
        process.kill()
        process.wait()
        os.close(master)
