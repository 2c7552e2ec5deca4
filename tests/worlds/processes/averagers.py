"""Real processes that average and nothing else, and that die or hang at a named phase of a round.

The parent's part is `averagers`. A child takes orders from its input, a JSON object a line, and answers likewise; times
are those of the machine's monotonic clock, which all processes share. Vectors are of small whole numbers, so that the
right sum is known to the bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import trio

from peerd.averaging import open_round
from peerd.averaging.allreduce import AllReduceService, PlainParts, Vector
from peerd.averaging.allreduce_round import AveragingPlan, RoundFailed
from peerd.codec.format.frame import TensorFrame
from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.role.peer_stack import peer_stack
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.tcp.tcp_transport import TcpTransport

T = TypeVar("T")

PHASES = ("before", "sending", "reducing", "answer")
COUNT = 240_000  # float32 values: about 80 parts in each of three shares
PART_BYTES = 4096
PARTS_FIRST = 5  # that go well before a phase is halted in
_LOOK_S = 0.02  # how often a child looks how late it is
_WAIT_S = 60.0


def vector_of(rank: int) -> Vector:
    return (np.arange(COUNT) % 97 * (rank + 1)).astype("float32")


class Halt:
    """Sends this process a signal in the phase that is ordered, after a few parts of it."""

    def __init__(self, phase: str, number: int) -> None:
        self._phase, self._number = phase, number
        self._left = 0 if phase == "before" else PARTS_FIRST

    def passes(self, phase: str) -> None:
        if phase == self._phase:
            self._left -= 1
            if self._left < 0:
                say({"halted": time.monotonic()})
                os.kill(os.getpid(), self._number)


class Parts(PlainParts):
    """Plain parts: those of the own share are sums, on their way to the answer."""

    def __init__(self, halt: Halt, own: range) -> None:
        self._halt, self._own = halt, own

    def encode(self, begin: int, values: Vector, seen: Vector | None = None) -> TensorFrame:
        self._halt.passes("answer" if begin in self._own else "sending")
        return super().encode(begin, values, seen)


class ThreadWorker:
    """Computes in a thread; halts in sums."""

    def __init__(self, halt: Halt) -> None:
        self._halt = halt

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0) -> T:
        def whole() -> T:
            if name == "sum a part":
                self._halt.passes("reducing")
            return job()

        return await trio.to_thread.run_sync(whole)


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Child:
    """This process's peer."""

    def __init__(self, host: Host, averaging: AllReduceService) -> None:
        self._host, self._averaging = host, averaging

    async def meet(self, order: dict[str, Any]) -> dict[str, Any]:
        for peer, addr in sorted(order["peers"].items()):
            if peer != self._host.id.text:
                await self._host.connect(PeerId.parse(peer), [parse_addr(addr)])
        return {}

    async def sum(self, order: dict[str, Any]) -> dict[str, Any]:
        """One attempt. `senders` in the order of their ranks; `late_s`: how long this process was kept waiting."""
        group, senders = tuple(order["group"]), tuple(order["senders"])
        shares = tuple(order["shares"])
        own, vector = self._host.id.text, None
        how = AveragingPlan(
            bytes.fromhex(order["attempt"]), group, PART_BYTES, order["patience_s"], senders, shares, COUNT, "float32"
        )
        owned = [part for part in how.parts(COUNT, 4) if part.owner == own]
        halt = Halt(order.get("phase", ""), order.get("signal", 0))
        if own in senders:
            vector = vector_of(senders.index(own))
        late = Lateness()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.watch)
            halt.passes("before")
            own_range = range(owned[0].begin, owned[-1].end) if owned else range(0)
            try:
                total = await self._averaging.sum(how, vector, ThreadWorker(halt), Parts(halt, own_range))
                answer = {"digest": hashlib.sha256(total.tobytes()).hexdigest() if vector is not None else ""}
            except RoundFailed as error:
                answer = {"lost": error.lost, "reason": str(error)}
            nursery.cancel_scope.cancel()
        return {**answer, "end": time.monotonic(), "late_s": late.longest_s}


class Lateness:
    """Scheduling delay: how much longer than asked for this process sleeps, at worst."""

    longest_s = 0.0

    async def watch(self) -> None:
        while True:
            began = time.monotonic()
            await trio.sleep(_LOOK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began - _LOOK_S)


async def main(seed: int) -> None:
    open_round.SMALL_VALUES = 0  # every sum is made in the thread, where a process can be halted in it
    stack = peer_stack(Keypair.from_seed(bytes([seed]) * 32), RealClock(), [TcpTransport()])
    host = stack.host
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        child = Child(host, AllReduceService(stack.rpc, host.id))
        say({"peer": host.id.text, "addr": str(host.addrs()[0])})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            order = json.loads(line)
            say(await (child.meet(order) if order["do"] == "meet" else child.sum(order)))
        nursery.cancel_scope.cancel()


# --- the parent's part -------------------------------------------------------------------------------------------


class Averager:
    """One child, as the parent sees it."""

    def __init__(self, seed: int, log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.worlds.processes.averagers", str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=Path(__file__).parents[3],
            )
        self.peer = self.addr = ""

    def tell(self, **order: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(order).encode() + b"\n")
        self.popen.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"a process ended with {self.popen.wait(_WAIT_S)}: {self.said}"
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")


@contextlib.contextmanager
def averagers(folder: Path, count: int) -> Iterator[list[Averager]]:
    """Peers that know and reach each other, in the order of their ids; none outlives the block."""
    started = [Averager(seed + 1, folder / f"averager-{seed}.log") for seed in range(count)]
    try:
        for child in started:
            found = child.hear()
            child.peer, child.addr = found["peer"], found["addr"]
        started.sort(key=lambda child: child.peer)
        for child in started:
            child.tell(do="meet", peers={other.peer: other.addr for other in started})
            child.hear()
        yield started
    finally:
        for child in started:
            child.popen.send_signal(signal.SIGKILL)
            child.popen.wait(_WAIT_S)
            for pipe in (child.popen.stdin, child.popen.stdout):
                with contextlib.suppress(OSError):  # what was not yet flushed to a dead one
                    pipe.close()  # type: ignore[union-attr]


def order(
    members: Sequence[Averager], helpers: Sequence[Averager], shares: Sequence[float], number: int
) -> dict[str, Any]:
    """An attempt of `members`, which bring vectors, and `helpers`; shares in this order."""
    peers = [child.peer for child in members]
    return {
        "do": "sum",
        "attempt": number.to_bytes(16, "big").hex(),
        "group": peers + [child.peer for child in helpers],
        "senders": peers,
        "shares": list(shares),
    }


def expected(count: int) -> str:
    """The digest of the sum of so many members' vectors."""
    total = sum((vector_of(rank) for rank in range(1, count)), vector_of(0))
    return hashlib.sha256(total.tobytes()).hexdigest()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
