"""Foreign libp2p peers (go, js, py) as processes under remote control, for the interoperability tests.

Each peer listens on loopback, echoes `/peerd-test/echo/1`, and obeys one JSON command a line on stdin:

    {"id": 1, "do": "dial", "addr": "/ip4/.../p2p/..."}       -> {"id": 1, "peer": "..."}
    {"id": 2, "do": "ping", "addr": ...}                      -> {"rtt_ms": 0.4}
    {"id": 3, "do": "about", "peer": "..."}                   -> {"agent", "protocols", "addrs", "observed"}
    {"id": 4, "do": "echo", "addr": ..., "bytes": 67108864}   -> {"sent_sha256", "got_sha256", "bytes", "seconds"}
    {"id": 5, "do": "peers"}                                  -> {"peers": [...]}

`about` says what the other side's identify told. `echo` takes "half_close": true (js, py) to end its direction before
the echo is complete; p2pd resets such streams. An answer with "error" failed. The first line a peer prints is
{"ready": peer id, "addrs": [...]}. The programs are in scripts/foreign; `make foreign` prepares what they need. Where
that can't be had the tests are skipped with the reason, unless PEERD_REQUIRE_FOREIGN=1 (as in CI) makes it a failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "foreign"
NAMES = ("go", "js", "py")
START_TIMEOUT_S = 60
COMMAND_TIMEOUT_S = 100

_spec = importlib.util.spec_from_file_location("peerd_foreign_setup", SCRIPTS / "setup.py")
assert _spec is not None
assert _spec.loader is not None
setup = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(setup)


class CommandFailed(Exception):
    """The foreign peer could not do it; the message is its own."""


def require(name: str) -> None:
    """Skip the test, or fail it under PEERD_REQUIRE_FOREIGN=1, when the foreign peer is not prepared."""
    if setup.is_ready(name):
        return
    reason = f"the {name} peer is not prepared or not up to date: run `make foreign`"
    if os.environ.get("PEERD_REQUIRE_FOREIGN") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def command_line(name: str) -> list[str]:
    folder = setup.FOREIGN / name
    return {
        "go": [sys.executable, str(SCRIPTS / "go_peer.py"), str(folder / "p2pd")],
        "js": ["node", str(folder / "js_peer.mjs")],
        "py": [str(folder / "venv/bin/python"), str(SCRIPTS / "py_peer.py")],
    }[name]


@dataclass(eq=False)
class ForeignPeer:
    """One running foreign peer. `addr` is where it listens, with its peer id."""

    name: str
    process: trio.Process
    id: str = ""
    addr: str = ""
    _answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    _waiting: dict[int, trio.Event] = field(default_factory=dict)
    _ready: trio.Event = field(default_factory=trio.Event)
    _sent: int = 0
    _ended: bool = False

    async def ask(self, do: str, timeout_s: float = COMMAND_TIMEOUT_S, **arguments: object) -> dict[str, Any]:
        """Give a command and wait for its answer; CommandFailed with the peer's own words."""
        assert self.process.stdin is not None
        self._sent += 1
        number, event = self._sent, trio.Event()
        self._waiting[number] = event
        line = json.dumps({"id": number, "do": do, **arguments}) + "\n"
        with trio.fail_after(timeout_s):
            await self.process.stdin.send_all(line.encode())
            await event.wait()
        answer = self._answers.pop(number, {"error": "the process ended"})
        if "error" in answer:
            raise CommandFailed(f"{self.name}: {do}: {answer['error']}")
        return answer

    async def read_answers(self) -> None:
        assert self.process.stdout is not None
        buffer = b""
        async for data in self.process.stdout:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        self._ended = True
        for event in (self._ready, *self._waiting.values()):
            event.set()

    def _take(self, answer: dict[str, Any]) -> None:
        if "ready" in answer:
            self.id = answer["ready"]
            self.addr = next(addr for addr in answer["addrs"] if addr.startswith("/ip4/127.0.0.1/"))
            self._ready.set()
        else:
            self._answers[answer["id"]] = answer
            self._waiting.pop(answer["id"]).set()

    async def wait_ready(self) -> None:
        with trio.fail_after(START_TIMEOUT_S):
            await self._ready.wait()
        if self._ended:
            pytest.fail(f"the {self.name} peer ended at once")


def _kill(process: trio.Process) -> None:
    """Kill the whole session, so that the daemon behind the go peer's driver goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def foreign_peer(name: str) -> AsyncIterator[ForeignPeer]:
    """A running foreign peer; nothing of it is left afterwards."""
    require(name)
    process = await trio.lowlevel.open_process(
        command_line(name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=_log_file(name),
        start_new_session=True,
    )
    peer = ForeignPeer(name, process)
    async with trio.open_nursery() as nursery:
        try:
            nursery.start_soon(peer.read_answers)
            await peer.wait_ready()
            yield peer
        finally:
            with trio.CancelScope(shield=True):
                assert process.stdin is not None
                assert process.stdout is not None
                await process.stdin.aclose()
                with trio.move_on_after(5):
                    await process.wait()
                _kill(process)
                await process.wait()
            nursery.cancel_scope.cancel()
            await process.stdout.aclose()


def _log_file(name: str) -> int:
    """Where a peer's own complaints go: to read after a failure."""
    path = setup.FOREIGN / f"{name}.log"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
