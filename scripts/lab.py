"""A lab of hosts on one wide-area network, each behind an access line of a chosen rate: for tests and benchmarks.

A host is a Linux network namespace. Its only interface leads, as a pair of virtual cables, to a bridge in a namespace
of its own (the WAN); nothing in a lab is connected to the machine's network. A token bucket at each end of the cable
limits what the host sends and what it receives. Rates count Ethernet bytes: TCP payload is about 4 % less.

    with Lab() as lab:
        server, client = lab.host("server", up_mbit=100, down_mbit=100), lab.host("client", up_mbit=10)
        served = server.popen([sys.executable, "-m", "http.server"])
        client.run(["curl", f"http://{server.ip}:8000"])

Needs Linux, root, and `ip` and `tc` of iproute2: `why_not` tells what is missing. All processes of a lab are killed
and its namespaces removed when the block ends. When the owner was killed itself, the next lab removes what is left:
names of namespaces hold the owner's process id and the time of its start.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PREFIX = "peerdlab"
NAMES = Path("/run/netns")
NETWORK = "203.0.113"  # reserved for examples (RFC 5737): nobody's address by accident
HOSTS = 250
GATEWAY = f"{NETWORK}.254"  # where packets to anywhere else go, and end: the WAN says that it has no route
QUEUE_MS = 50  # what waits at each end of a line before packets are dropped
BURST_MS = 2  # what may pass at once after a pause: the shorter, the sooner the rate is right
BURST_BYTES = 32768  # at least: more than one packet of GSO_BYTES
GSO_BYTES = 16384  # of the packets that the kernel cuts into frames late; they pass the bucket whole

_numbers = itertools.count()


class LabError(Exception):
    """A command that builds the lab failed."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Ethernet bytes that a host has sent and received since it is there."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


@functools.cache
def why_not() -> str | None:
    """Why there can be no lab on this machine; None when there can."""
    if sys.platform != "linux":
        return "a network lab needs Linux"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a network lab needs {' and '.join(missing)} of iproute2"
    if os.geteuid() != 0:
        return "a network lab needs root"
    try:
        with Lab() as lab:
            lab.host("probe", up_mbit=1, down_mbit=1)
    except LabError as error:
        return f"this machine cannot have a network lab: {error}"
    return None


class Space:
    """One network namespace and the processes in it."""

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self.label = label  # of the namespace
        self._started: list[subprocess.Popen[Any]] = []
        ip("netns", "add", label)
        self.links("link set lo up")
        # Without IPv6 nobody finds addresses that lead nowhere. A network without delay needs no clever sender.
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

    def links(self, *lines: str) -> None:
        """Commands of `ip`, in here."""
        ip("-n", self.label, "-batch", "-", text="\n".join(lines))

    def pids(self) -> list[int]:
        """Every process in here, whoever started it."""
        return pids(self.label)

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


class Host(Space):
    """A machine on the WAN."""

    def __init__(self, name: str, label: str, wan: Space, number: int) -> None:
        super().__init__(name, label)
        self.ip = f"{NETWORK}.{number}"
        self._wan, self._port = wan, f"port{number}"
        cable(wan, self._port, self, "eth0")
        wan.links(f"link set {self._port} master bridge up")
        self.links(f"addr add {self.ip}/24 dev eth0", "link set eth0 up", f"route add default via {GATEWAY}")

    def limit(self, up_mbit: float | None, down_mbit: float | None) -> None:
        """Change the line's rates, in 10^6 bits per second; None: as fast as the machine can."""
        shape(self, "eth0", up_mbit)
        shape(self._wan, self._port, down_mbit)

    def traffic(self) -> Traffic:
        (link,) = json.loads(ip("-n", self.label, "-json", "-stats", "link", "show", "eth0"))
        return Traffic(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])


class Lab:
    """Hosts on one WAN. Building one first removes what dead owners left."""

    def __init__(self) -> None:
        collect()
        self._label = f"{PREFIX}.{os.getpid()}.{born(os.getpid())}.{next(_numbers)}"
        self.hosts: dict[str, Host] = {}
        self._spaces: list[Space] = []

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as unless_built:
            unless_built.callback(self.close)
            self.wan = self._add(Space("wan", f"{self._label}.wan"))
            self.wan.links("link add bridge type bridge", f"addr add {GATEWAY}/24 dev bridge", "link set bridge up")
            self.wan.set("net/ipv4/ip_forward", "1")
            unless_built.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def host(self, name: str, up_mbit: float | None = None, down_mbit: float | None = None) -> Host:
        """A new host with a line of these rates, in 10^6 bits per second; None: as fast as the machine can."""
        assert name not in self.hosts, f"there is a host {name} already"
        assert len(self.hosts) < HOSTS, "the WAN has no address left"
        host = Host(name, f"{self._label}.host-{name}", self.wan, len(self.hosts) + 1)
        self._add(host)
        self.hosts[name] = host
        host.limit(up_mbit, down_mbit)
        return host

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

    def _add(self, space: Space) -> Space:
        self._spaces.append(space)
        return space


# --- parts ---------------------------------------------------------------------------------------------------------
def cable(a: Space, a_name: str, b: Space, b_name: str) -> None:
    """Join two namespaces by a cable whose ends have these names."""
    sizes = f"mtu 1500 gso_max_size {GSO_BYTES}"
    a.links(f"link add {a_name} {sizes} type veth peer name {b_name} {sizes} netns {b.label}")


def shape(space: Space, device: str, rate_mbit: float | None) -> None:
    """Limit what leaves `space` through `device`."""
    if rate_mbit is None:
        call("tc", "-n", space.label, "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000")
        return
    bytes_per_ms = rate_mbit * 125
    burst = max(BURST_BYTES, int(bytes_per_ms * BURST_MS))
    limit = burst + max(int(bytes_per_ms * QUEUE_MS), 4 * GSO_BYTES)
    bucket = ["rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{burst}", "limit", f"{limit}"]
    call("tc", "-n", space.label, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def ip(*arguments: str, text: str | None = None) -> str:
    return call("ip", *arguments, text=text)


def call(*argv: str, text: str | None = None) -> str:
    """What the command prints; LabError with what it complained about."""
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


def remove(label: str) -> None:
    """Kill what runs in a namespace, then delete its name: the kernel drops what nobody uses."""
    while found := pids(label):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(LabError):  # somebody else was faster
        ip("netns", "delete", label)


def collect() -> None:
    """Remove the labs whose owners are dead."""
    for label in labels():
        _, pid, began, *_ = label.split(".")
        if born(int(pid)) != began:
            remove(label)


def born(pid: int) -> str | None:
    """When a living process began, in ticks of the machine; None when it is dead. A number alone is used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
