"""Decoders of typed data: threads that meet at a type's first decoding, and values that do not fit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerd.core.decoders import convert, decoder, from_json

ROOT = Path(__file__).resolve().parents[2]
WHILE_IT_IS_BUILT = """
import threading, msgspec
from peerd.core.decoders import convert, decoder, from_json

building, other_is_done = threading.Event(), threading.Event()

def names():  # msgspec calls this when it builds the inner type, after it has begun with the outer one
    building.set()
    other_is_done.wait(0.5)
    return list[str]

class Inner(msgspec.Struct):
    count: int
    names: "names()"

class Outer(msgspec.Struct):
    inner: Inner

plain = {"inner": {"count": 1, "names": ["a"]}}
jobs = {
    "msgpack": lambda: decoder(Outer).decode(msgspec.msgpack.encode(plain)),
    "json": lambda: from_json(msgspec.json.encode(plain), Outer),
    "plain": lambda: convert(plain, Outer),
}

def other():
    building.wait()
    found.append(jobs[JOB]().inner.count)
    other_is_done.set()

found = []
thread = threading.Thread(target=other)
thread.start()
found.append(jobs[JOB]().inner.count)
thread.join()
print(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("job", ["msgpack", "json", "plain"])
def test_a_type_that_another_thread_is_building_does_not_end_the_process(job: str) -> None:
    program = WHILE_IT_IS_BUILT.replace("JOB", repr(job))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[1, 1]\n"), done.stderr


class Point(msgspec.Struct):
    x: int


@pytest.mark.parametrize("value", [{"x": "far"}, {}, 3])
def test_what_does_not_fit_is_an_error_of_msgspec(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(Point).decode(msgspec.msgpack.encode(value))
    with pytest.raises(msgspec.ValidationError):
        from_json(msgspec.json.encode(value), Point)
    with pytest.raises(msgspec.ValidationError):
        convert(value, Point)


def test_typed_data_is_decoded_in_one_place() -> None:
    typed = re.compile(r"msgspec\.(convert\(|\w+\.(Decoder\(|decode\([^\n]*type=))")
    files = [file for folder in ("peerd", "roles") for file in (ROOT / folder).rglob("*.py")]
    found = [file.relative_to(ROOT) for file in files if typed.search(file.read_text("utf-8"))]
    assert found == [Path("peerd/core/decoders.py")]
