"""Structured event log: writes one line per event to the terminal and to a file, and keeps the newest for status.

Each event has a time, a level, a name such as `stage.averaged`, and facts. The newest events stay in memory for
`peerd status`; all are written to a JSON-lines file of bounded size. Text from other peers may contain anything, so
control characters are escaped, and long values are cut. A full disk ends the file, never the daemon.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Final, TextIO

from peerd.core.clock import Clock
from peerd.core.errors import ConfigError
from peerd.core.ids import Key, PeerId
from peerd.screen.units import number

LEVELS: Final = ("debug", "info", "warn", "error")
RECENT_EVENTS: Final = 200  # kept in memory for status: about the last few minutes
VALUE_CHARS: Final = 400  # most characters of a fact
FILE_BYTES: Final = 4 << 20  # a larger file becomes events.jsonl.1 and a new one starts: at most 8 MiB in all

Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]


def check_level(level: str) -> None:
    """Raise ConfigError unless `level` is the name of a level."""
    if level not in LEVELS:
        raise ConfigError(f"--log-level {clean(level)!r} is unknown; allowed: {', '.join(LEVELS)}")


def plain(value: object) -> Plain:
    """Convert `value` for JSON: ids become text, bytes hex, and unknown types their text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no NaN and no infinity
    if isinstance(value, PeerId):
        return value.text
    if isinstance(value, Key):
        return value.raw.hex()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[: VALUE_CHARS // 2]).hex()
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value)}
    return clean(str(value))


def clean(text: str) -> str:
    """Make text from any source safe for a terminal: printable, one line, at most VALUE_CHARS."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: VALUE_CHARS + 1])
    return shown if len(shown) <= VALUE_CHARS else shown[: VALUE_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the log. `wall` is its time in Unix seconds."""

    wall: float
    level: str
    name: str
    facts: dict[str, Plain]

    def line(self) -> str:
        """Line for the terminal: local time, name, facts. Peer ids are shortened to their last eight characters."""
        shown = " ".join(f"{key}={_brief(value)}" for key, value in self.facts.items())
        mark = {"warn": "warning: ", "error": "error: "}.get(self.level, "")
        return f"{time.strftime('%H:%M:%S', time.localtime(self.wall))} {mark}{self.name} {shown}".rstrip()

    def as_dict(self) -> dict[str, Plain]:
        return {"time": round(self.wall, 3), "level": self.level, "name": self.name, **self.facts}


def _brief(value: Plain) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        if value == "nan":
            return "-"
        if value.startswith("12D3KooW") and len(value) == 52:
            return "…" + value[-8:]
        return f'"{value}"' if " " in value or not value else value
    return json.dumps(value, ensure_ascii=False)


@dataclass
class _Sink:
    """Destination of one daemon's events, shared by all its EventLog objects."""

    clock: Clock
    least: int
    stream: TextIO | None
    path: Path | None
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    file: TextIO | None = None

    def open(self) -> None:
        if self.path is not None:
            self.file = self.path.open("a", encoding="utf-8")

    def put(self, event: Event) -> None:
        if event.level != "debug" or self.least == 0:
            self.recent.append(event)
        if self.stream is not None and LEVELS.index(event.level) >= self.least:
            try:
                print(event.line(), file=self.stream, flush=True)
            except (OSError, ValueError):  # the terminal was closed
                self.stream = None
        if self.file is not None and (event.level != "debug" or self.least == 0):
            self._write(event)

    def _write(self, event: Event) -> None:
        assert self.file is not None
        assert self.path is not None
        try:
            self.file.write(json.dumps(event.as_dict(), ensure_ascii=False) + "\n")
            self.file.flush()
            if self.file.tell() > FILE_BYTES:
                self.file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self.open()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None
            self.put(Event(self.clock.wall(), "warn", "log.file_stopped", {"path": str(self.path), "why": str(error)}))


class EventLog:
    """Writes events. `bind` returns a log that adds fixed facts, such as the role's name, to its events."""

    def __init__(
        self, clock: Clock, *, level: str = "info", stream: TextIO | None = None, path: Path | None = None
    ) -> None:
        check_level(level)
        self._sink = _Sink(clock, LEVELS.index(level), stream, path)
        try:
            self._sink.open()
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
        self._bound: dict[str, Plain] = {}

    def bind(self, **facts: object) -> EventLog:
        """A log with the same destination that adds these facts to each event."""
        child = object.__new__(EventLog)
        child._sink = self._sink
        child._bound = {**self._bound, **{key: plain(value) for key, value in facts.items()}}
        return child

    def event(self, name: str, /, *, level: str = "info", **facts: object) -> None:
        """Record that `name` happened. Levels: debug (each call), info (each step), warn (or warning), error."""
        level = level if level in LEVELS else "warn" if level == "warning" else "info"
        known = {key: plain(value) for key, value in facts.items()}
        self._sink.put(Event(self._sink.clock.wall(), level, clean(name), {**self._bound, **known}))

    def recent(self, count: int = RECENT_EVENTS) -> list[dict[str, Plain]]:
        """The newest events, oldest first, as plain data."""
        return [event.as_dict() for event in list(self._sink.recent)[-count:]]

    def adopt_logging(self) -> logging.Handler:
        """Write the records of Python's `logging` below the logger `peerd`, as of the network layers, to this log."""
        handler = _Bridge(self)
        logger = logging.getLogger("peerd")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if self._sink.least == 0 else logging.INFO)
        logger.propagate = False
        return handler

    def close(self) -> None:
        """Close the file. Later events still go to memory and the terminal."""
        for handler in list(logging.getLogger("peerd").handlers):
            if isinstance(handler, _Bridge) and handler.log._sink is self._sink:
                logging.getLogger("peerd").removeHandler(handler)
        if self._sink.file is not None:
            self._sink.file.close()
            self._sink.file = None


class _Bridge(logging.Handler):
    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        number = record.levelno
        level = "debug" if number < 20 else "info" if number < 30 else "warn" if number < 40 else "error"
        name = record.name.removeprefix("peerd.")
        facts: dict[str, object] = {"text": record.getMessage()}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:  # error and place only; a traceback is too long for the terminal
            facts["error"] = f"{type(error).__name__}: {error}"
            frames = traceback.extract_tb(error.__traceback__)
            facts["at"] = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        self.log.event(name, level=level, **facts)
