"""The ground of a lab: network namespaces, the processes in them, and the removal of all that is left of them.

Names of namespaces hold the owner's process id and the time of its start: when the owner was killed, the next lab
removes what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

PREFIX = "peerdlab"
NAMES = Path("/run/netns")
GSO_BYTES = 16384  # of the packets that the kernel cuts into frames late; they pass a token bucket whole

CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


class LabError(Exception):
    """A command that builds the lab failed."""


class Space:
    """One network namespace and the processes in it."""

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self.label = label  # of the namespace
        self._started: list[subprocess.Popen[Any]] = []
        ip("netns", "add", label)
        self.links("link set lo up")
        # Without IPv6 nobody finds addresses that lead nowhere. Most machines send by cubic; where the system lets only
        # its own namespace have that, this one has what the machine has.
        self.set("net/ipv6/conf/all/disable_ipv6", "1")
        self.set("net/ipv4/tcp_congestion_control", "cubic")

    def argv(self, argv: list[str]) -> list[str]:
        """The command that runs `argv` in here; it becomes `argv`, so signals reach that."""
        return ["ip", "netns", "exec", self.label, *argv]

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process that lives no longer than the lab. `options` as for subprocess.Popen."""
        process = subprocess.Popen(self.argv(argv), **options)
        self._started.append(process)
        return process

    def run(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command to its end. `options` as for subprocess.run."""
        return subprocess.run(self.argv(argv), check=options.pop("check", True), **options)

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """A socket of the calling process that lives in here."""
        made: list[socket.socket | OSError] = []

        def enter() -> None:  # in a thread that ends with it: nobody else finds itself in another namespace
            try:
                with open(NAMES / self.label) as name:
                    if _libc.setns(name.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), f"cannot enter {self.label}")
                made.append(socket.socket(family, kind, protocol))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def links(self, *lines: str) -> None:
        """Commands of `ip`, in here."""
        ip("-n", self.label, "-batch", "-", text="\n".join(lines))

    def pids(self) -> list[int]:
        """Every process in here, whoever started it."""
        return pids(self.label)

    def kill(self) -> None:
        """End every process in here; the kernel closes their connections."""
        while found := self.pids():
            end(found)

    def remove(self) -> None:
        remove(self.label)
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def set(self, key: str, value: str) -> None:
        """A kernel setting of this namespace, where the kernel has it."""
        self.run(["sh", "-c", f"test ! -w /proc/sys/{key} || echo {value} 2>/dev/null > /proc/sys/{key}"], check=False)

    @property
    def congestion_control(self) -> str:
        """By which rule TCP sends in here: figures of a slow or a far line depend on it."""
        shown = self.run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"], stdout=subprocess.PIPE, text=True)
        return str(shown.stdout).strip()


S = TypeVar("S", bound=Space)


class Ground:
    """Namespaces that end together. Making one first removes what dead owners left."""

    def __init__(self) -> None:
        collect()
        self._label = f"{PREFIX}.{os.getpid()}.{born(os.getpid())}.{next(_numbers)}"
        self._spaces: list[Space] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as unless_built:
            unless_built.callback(self.close)
            self.build()
            unless_built.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def build(self) -> None:
        """Build what is there before the first host."""

    def labels(self) -> list[str]:
        """The namespaces of this lab that exist."""
        return [label for label in labels() if label.startswith(self._label + ".")]

    def close(self) -> None:
        """Kill every process in the lab and remove it; nothing is left."""
        for space in reversed(self._spaces):
            space.remove()
        for label in self.labels():  # of a space that could not be finished
            remove(label)
        self._spaces.clear()

    def label(self, name: str) -> str:
        """The name of the namespace for a part of this lab."""
        return f"{self._label}.{name}"

    def add(self, space: S) -> S:
        self._spaces.append(space)
        return space


# --- commands ---------------------------------------------------------------------------------------------------
def cable(a: Space, a_name: str, b: Space, b_name: str) -> None:
    """Join two namespaces by a cable whose ends have these names."""
    sizes = f"mtu 1500 gso_max_size {GSO_BYTES}"
    a.links(f"link add {a_name} {sizes} type veth peer name {b_name} {sizes} netns {b.label}")


def ip(*arguments: str, text: str | None = None) -> str:
    return call("ip", *arguments, text=text)


def call(*argv: str, text: str | None = None) -> str:
    """Output of the command; LabError with what it complained about."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


# --- what is left ----------------------------------------------------------------------------------------------------
def labels() -> list[str]:
    """The namespaces of all labs."""
    return sorted(path.name for path in NAMES.glob(f"{PREFIX}.*"))


def pids(label: str) -> list[int]:
    """The processes in a namespace; none when it is gone."""
    try:
        return [int(word) for word in ip("netns", "pids", label).split()]
    except LabError:
        return []


def end(found: list[int]) -> None:
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove(label: str) -> None:
    """Kill what runs in a namespace, then delete its name: the kernel drops what nobody uses."""
    while found := pids(label):
        end(found)
    with contextlib.suppress(LabError):  # somebody else was faster
        ip("netns", "delete", label)


def collect() -> None:
    """Remove the labs whose owners are dead."""
    for label in labels():
        _, pid, began, *_ = label.split(".")
        if born(int(pid)) != began:
            remove(label)


def born(pid: int) -> str | None:
    """Start time of a living process, in ticks of the machine; None when it is dead. A number alone is used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
