"""Each constant that a time limit uses has a row in `tests/kit/timeouts`, with the reason why it need not grow. No time
limit uses a plain number.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kit.time_limits import Found, search
from tests.kit.timeouts import TIMEOUTS

ROOT = Path(__file__).parent.parent


def in_the_code() -> Found:
    trees = dict[str, ast.Module]()
    for path in sorted([*ROOT.glob("peerd/**/*.py"), *ROOT.glob("roles/**/*.py")]):
        trees[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text())
    return search(trees)


def searched(code: str) -> Found:
    return search({"a/b.py": ast.parse(code)})


def test_every_constant_in_a_time_limit_has_its_reason() -> None:
    found = in_the_code()
    assert len(found.names) > 300, "the search missed constants"
    assert sorted(found.numbers) == [], "name these numbers, and add rows in tests/kit/timeouts"
    missing, stale = sorted(found.names - TIMEOUTS.keys()), sorted(TIMEOUTS.keys() - found.names)
    assert missing == [], "explain in tests/kit/timeouts why it may be constant, or make it grow"
    assert stale == [], "no time limit uses these any more"


@pytest.mark.parametrize(
    "line",
    [
        "trio.move_on_after(X_S)",
        "trio.fail_after(min(X_S, y))",
        "call(timeout_s=X_S if y else z)",
        "y_s = X_S + size / rate; trio.move_on_after(y_s)",
        "y_s = max(1e-9 * size, X_S); limit_s = y_s; call(timeout_s=limit_s)",
        "a, y = 1, now + X_S; trio.move_on_at(y)",
        "ask(peer, 2 * X_S)",
        "scope.deadline = trio.current_time() + X_S",
        "self.until = now + X_S * 2.0**failures",
        "if now - since > X_S: pass",
        "waited_s = trio.current_time() - began\n    if X_S < waited_s: pass",
        "thread.join(X_S)",
        "client.settimeout(X_S)",
        "with limited(X_S) as limit_s: call(timeout_s=limit_s)",
        "self.resting = Suspicion[str](X_S, y, 9)",
    ],
)
def test_a_constant_is_found_on_its_way_to_a_time_limit(line: str) -> None:
    found = searched(f"def ask(peer, timeout_s): pass\ndef f():\n    {line}")
    assert found.names == {"a.b.X_S"}
    number = line.replace("X_S", "7")
    if "2 *" in line or "* 2.0" in line or "waited_s" in line or "limited" in line:
        return  # the number is then a factor, or is compared with a time
    found = searched(f"def ask(peer, timeout_s): pass\ndef f():\n    {number}")
    assert found.numbers == {"a/b.py:3: 7"}


@pytest.mark.parametrize(
    ("code", "names", "numbers"),
    [
        ("class A:\n  def __init__(self): self._limit_s = min(9.0, X_S)\n  def f(self): call(timeout_s=self._limit_s)",
         {"a.b.X_S"}, {"a/b.py:2: 9.0"}),
        ("def f(*, timeout_s=X_S + 2): pass", {"a.b.X_S"}, {"a/b.py:1: 2"}),
        ("def _deadline_s(size): return X_S + size / 3", {"a.b.X_S"}, set()),
        ("class A:\n  silence_timeout_s: float = 3.0", {"a.b.silence_timeout_s"}, set()),
        ("class A:\n  dial_s: float = 3.0\ndef f(config): trio.move_on_after(config.dial_s)", {"a.b.dial_s"}, set()),
        ("A_TIMEOUT_S = 3.0", set(), set()),
        ("call(timeout_s=0.0); call(timeout_s=None); trio.move_on_after(float('inf'))", set(), set()),
        ("', '.join(names); path.join('a'); event.wait(); pause_s = 3.0; rtt_s > 0.1", set(), set()),
        ("timeout_s = 30.0 + size / rate", set(), {"a/b.py:1: 30.0"}),
    ],
)  # fmt: skip
def test_numbers_and_names_in_other_places(code: str, names: set[str], numbers: set[str]) -> None:
    found = searched(code)
    assert (found.names, found.numbers) == (names, numbers)
