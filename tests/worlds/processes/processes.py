"""Real `peerd` processes for end-to-end tests: start, read what they say, ask their status, signal; none is ever left.

Everything of a test lies in one folder: data directories, logs, the list of running daemons.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.peerd_process import PeerdProcess
from scripts.waiting import eventually
from tests.worlds.processes import prefork

LISTEN = "/ip4/127.0.0.1/tcp/0"
TINY = """\
run: e2e
model: {d_model: 16, heads: 2, layers: 2, context: 16}
pipeline: {stages: 2, microbatch: 2}
batch: {target_samples: 8}
data: {path: "%s", holdout: 0.1, shuffle_buffer: 100}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 2}
"""


def run_file(folder: Path, extra: str = "", name: str = "run.yaml") -> Path:
    """A run so small that a step takes milliseconds, on a text of its own."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 2000)
    file = folder / name
    file.write_text(TINY % text + extra)
    return file


class Process(PeerdProcess):
    """One peerd process and everything it has said."""

    def wait_for(self, text: str, timeout_s: float = 200.0) -> None:
        """Until it has said `text`; fails at once when it ends without."""
        self.wait_until(lambda: text in self.said, f"it never said {text!r}", timeout_s)

    def wait_until(self, done: Callable[[], bool], complaint: str, timeout_s: float = 200.0) -> None:
        eventually(lambda: done() or self.popen.poll() is not None, timeout_s)
        if not done():
            ended = self.popen.poll()
            how = f" ended with {ended}; {complaint}" if ended is not None else f": {complaint} within {timeout_s} s"
            raise AssertionError(f"{self.name}{how}:\n{self.said}")

    def step(self) -> int:
        return int(self.role().get("step") or 0)

    def reaches(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"it never reached step {step}", 90.0)

    def address(self) -> str:
        """Address on which it listens, once it does."""
        self.wait_until(lambda: bool(self.addr()), "it never listened")
        return self.addr()

    def end(self, number: int = signal.SIGINT, timeout_s: float = 15.0) -> tuple[int, float]:
        """Send a signal and wait: exit code and seconds."""
        began = time.monotonic()
        self.popen.send_signal(number)
        code = self.popen.wait(timeout_s)
        return code, time.monotonic() - began


class Processes:
    """All processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []

    def start(self, name: str, *arguments: str) -> Process:
        process = Process(name, self.folder, arguments, prefork.start)
        self.all.append(process)
        return process

    def backbone(self, *arguments: str, name: str = "backbone") -> Process:
        return self.start(name, "backbone", "--listen", LISTEN, *arguments)

    def join(self, name: str, role: str, file: Path, bootstrap: str) -> Process:
        options = ["--model", str(file), "--bootstrap", bootstrap, "--listen", LISTEN]
        return self.start(name, "join", "--role", role, *options)

    def swarm(self, file: Path, stages: int = 2) -> tuple[Process, list[Process], Process]:
        """A backbone that watches the run, one peer for each of `stages` stage processes, and a trainer."""
        backbone = self.backbone("--config", str(file))
        addr = backbone.address()
        peers = [self.join(f"stage-{number}", "stage", file, addr) for number in range(stages)]
        return backbone, peers, self.join("trainer", "trainer", file, addr)


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """No process outlives the block."""
    started = Processes(folder)
    try:
        yield started
    finally:
        for process in started.all:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()
