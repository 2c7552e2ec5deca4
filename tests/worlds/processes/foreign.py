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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.kit.watchdog import excused

ROOT = Path(__file__).resolve().parents[3]
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


def command_line(name: str, flags: Sequence[str] = ()) -> list[str]:
    folder = setup.FOREIGN / name
    program = {
        "go": [sys.executable, str(SCRIPTS / "go_peer.py"), str(folder / "p2pd")],
        "js": ["node", str(folder / "js_peer.mjs")],
        "py": [str(folder / "venv/bin/python"), str(SCRIPTS / "py_peer.py")],
    }[name]
    return [*program, *flags]


class Process:
    """A foreign peer's process. Starting one takes seconds, so tests share them; see `foreign_peer`."""

    def __init__(self, name: str, flags: Sequence[str] = ()) -> None:
        log = os.open(setup.FOREIGN / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        pipe = subprocess.PIPE
        # A session of its own, so that the daemon behind the go peer's driver is killed with it.
        with excused():
            self.popen = subprocess.Popen(
                command_line(name, flags), stdin=pipe, stdout=pipe, stderr=log, start_new_session=True, bufsize=0
            )
        os.close(log)
        self.ready: dict[str, Any] | None = None
        self.asked = 0  # commands so far

    def end(self) -> None:
        """Ask it to end, then kill whatever is left of it."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        self.kill()
        self.popen.wait()
        self.popen.stdout.close()

    def kill(self) -> None:
        """End it and whatever it started, at once and without a goodbye."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)


_shared: dict[str, Process] = {}


def end_shared() -> None:
    """End the processes that tests have shared."""
    while _shared:
        _shared.popitem()[1].end()


@dataclass(eq=False)
class ForeignPeer:
    """One running foreign peer, as one test sees it. `addr` is where it listens, with its peer id."""

    name: str
    process: Process
    id: str = ""
    addr: str = ""
    _answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    _waiting: dict[int, trio.Event] = field(default_factory=dict)
    _ready: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        popen = self.process.popen
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._stdin = trio.lowlevel.FdStream(os.dup(popen.stdin.fileno()))
        self._stdout = trio.lowlevel.FdStream(os.dup(popen.stdout.fileno()))

    async def ask(self, do: str, timeout_s: float = COMMAND_TIMEOUT_S, **arguments: object) -> dict[str, Any]:
        """Give a command and wait for its answer; CommandFailed with the peer's own words."""
        self.process.asked += 1
        number, event = self.process.asked, trio.Event()
        self._waiting[number] = event
        line = json.dumps({"id": number, "do": do, **arguments}) + "\n"
        with trio.fail_after(timeout_s):
            await self._stdin.send_all(line.encode())
            await event.wait()
        answer = self._answers.pop(number, {"error": "the process ended"})
        if "error" in answer:
            raise CommandFailed(f"{self.name}: {do}: {answer['error']}")
        return answer

    async def read_answers(self) -> None:
        if self.process.ready is not None:
            self._take(self.process.ready)
        buffer = b""
        async for data in self._stdout:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        for event in (self._ready, *self._waiting.values()):
            event.set()

    def _take(self, answer: dict[str, Any]) -> None:
        if "ready" in answer:
            self.process.ready = answer
            self.id = answer["ready"]
            self.addr = next((addr for addr in answer["addrs"] if addr.startswith("/ip4/127.0.0.1/")), "")
            self._ready.set()
        elif answer["id"] in self._waiting:  # else an earlier test did not wait for it
            self._answers[answer["id"]] = answer
            self._waiting.pop(answer["id"]).set()

    async def wait_ready(self, own: bool) -> None:
        """Wait until it listens, and has forgotten the peers to which an earlier test connected it, unless it is the
        test's own.
        """
        with trio.fail_after(START_TIMEOUT_S):
            await self._ready.wait()
            if not self.id:
                pytest.fail(f"the {self.name} peer ended at once: see {setup.FOREIGN / self.name}.log")
            while not own and (await self.ask("peers"))["peers"]:  # noqa: ASYNC110 (it sends no events)
                await trio.sleep(0.01)

    async def let_go(self) -> None:
        await self._stdin.aclose()
        await self._stdout.aclose()


@contextlib.asynccontextmanager
async def foreign_peer(name: str, *flags: str, own: bool = False) -> AsyncIterator[ForeignPeer]:
    """A running foreign peer: one that tests share, or the test's `own`, of which nothing is left afterwards.

    With `flags` of the program it is always the test's own.
    """
    require(name)
    own = own or bool(flags)
    process = None if own else _shared.get(name)
    if process is None or process.popen.poll() is not None:
        process = Process(name, flags)
        if not own:
            _shared[name] = process
    peer = ForeignPeer(name, process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.read_answers)
            await peer.wait_ready(own)
            yield peer
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await peer.let_go()
            if own:
                await trio.to_thread.run_sync(process.end)
