"""Events are one line each, safe to show, and bounded in memory and on disk."""

from __future__ import annotations

import io
import json
import logging
import random
from pathlib import Path

import pytest

from peerd import log as log_module
from peerd.core.errors import ConfigError
from peerd.core.ids import PeerId
from peerd.log import EventLog, clean, plain

PEER = PeerId.parse("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN")


class Clock:
    """Stands still."""

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_000_000.0

    def secure_bytes(self, count: int) -> bytes:
        return bytes(count)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(purpose)


def test_an_event_is_one_line_with_time_name_and_facts() -> None:
    stream = io.StringIO()
    EventLog(Clock(), stream=stream).bind(role="stage").event("averaged", step=3, peer=PEER, took_s=0.123456)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("averaged role=stage step=3 peer=…4kx6nXTN took_s=0.1235")


def test_text_from_strangers_cannot_reach_the_terminal_as_control_characters() -> None:
    stream = io.StringIO()
    log = EventLog(Clock(), stream=stream)
    log.event("refused", why="\x1b[2Jgone\nforged line" + "x" * 10_000)
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue()) < 600


def test_only_events_of_the_level_asked_for_are_shown() -> None:
    stream = io.StringIO()
    log = EventLog(Clock(), level="warn", stream=stream)
    log.event("a", level="debug")
    log.event("b")
    log.event("c", level="warn")
    log.event("d", level="error")
    assert [line.split()[1:] for line in stream.getvalue().splitlines()] == [["warning:", "c"], ["error:", "d"]]
    assert [event["name"] for event in log.recent()] == ["b", "c", "d"]


def test_an_unknown_level_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="allowed: debug, info, warn, error"):
        EventLog(Clock(), level="loud")


def test_memory_keeps_the_newest_events_only() -> None:
    log = EventLog(Clock())
    for number in range(1000):
        log.event("tick", number=number)
    assert [event["number"] for event in log.recent()] == list(range(800, 1000))


def test_the_file_turns_over_before_it_grows_beyond_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "FILE_BYTES", 2000)
    log = EventLog(Clock(), path=tmp_path / "events.jsonl")
    for number in range(100):
        log.event("tick", number=number)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["events.jsonl", "events.jsonl.1"]
    assert all(file.stat().st_size < 2200 for file in files)
    numbers = [json.loads(line)["number"] for file in reversed(files) for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 100))


def test_a_full_disk_stops_the_file_and_not_the_daemon(tmp_path: Path) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    log = EventLog(Clock(), path=tmp_path / "events.jsonl")
    log.close()
    log._sink.file = Full()
    log.event("first")
    log.event("second")
    assert [event["name"] for event in log.recent()] == ["first", "log.file_stopped", "second"]


def test_what_the_network_says_through_logging_arrives_as_events() -> None:
    log = EventLog(Clock())
    log.adopt_logging()
    logging.getLogger("peerd.wire.host").warning("lost %s", "someone")
    log.close()
    logging.getLogger("peerd.wire.host").warning("unheard")
    assert [(e["level"], e["name"], e["text"]) for e in log.recent()] == [("warn", "wire.host", "lost someone")]


def test_plain_data_is_always_json() -> None:
    values = {"a": float("nan"), PEER: (1, {2}), "c": b"\x00\xff", "d": object(), "e": [None, True]}
    assert json.loads(json.dumps(plain(values), allow_nan=False))["c"] == "00ff"


def test_clean_text_keeps_letters_of_all_languages() -> None:
    assert clean("größer 数") == "größer 数"
    assert clean("a\tb\r\n") == "a\\tb\\r\\n"
