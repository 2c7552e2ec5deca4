"""Donors of one large state and a newcomer over TCP on loopback; one donor dies half-way and one sends wrong bytes.

By hand, with a state of so many MB: `python -m tests.kit.statepeers 1000`.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import trio

from peerd.compute.worker import DeviceWorker
from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.core.limits import STATE_PIECE_BYTES
from peerd.core.messages import Empty
from peerd.core.state import TensorSpec
from peerd.core.training import Position, StatePiece, StateRequest
from peerd.core.work import Worker
from peerd.net.clock import RealClock
from peerd.net.host import Host
from peerd.net.tcp import TcpTransport
from peerd.service.rpc import Answer, Incoming, Rpc
from peerd.service.snapshot import FetchReport, Snapshots, StateItem
from peerd.service.snapshot_giving import Giving

RUN = b"r" * 16
T = TypeVar("T")


class Liar(Giving):
    """From its n-th piece on, one bit is wrong. With 0: in none."""

    def __init__(self, rpc: Rpc, lies_from: int = 0) -> None:
        super().__init__(rpc)
        self.asked = 0
        self.lies_from = lies_from

    async def _give_piece(self, call: Incoming[StatePiece]) -> Answer[Empty]:
        self.asked += 1
        answer = await super()._give_piece(call)
        if not self.lies_from or self.asked < self.lies_from:
            return answer
        (frame,) = answer.frames
        spoilt = bytearray(frame.payload)
        spoilt[len(spoilt) // 2] ^= 1
        return Answer(Empty(), (replace(frame, payload=spoilt),))


@dataclass
class Outcome:
    """What came of it."""

    right: bool  # what came is what the donors have
    report: FetchReport
    killed: str
    liar: str
    killed_at_share: float
    notes: list[str]
    seconds: float


def large_state(total_bytes: int) -> list[StateItem]:
    """Tensors of very different sizes, one array beneath them all."""
    data = np.random.default_rng(1).integers(0, 256, total_bytes, dtype="uint8")
    cuts = [0, 100, total_bytes // 3, total_bytes // 3 + 12, 2 * total_bytes // 3 + 1, total_bytes]
    parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
    return [StateItem(f"t{i}", "uint8", (len(part),), part.data) for i, part in enumerate(parts)]


async def download(total_bytes: int) -> Outcome:
    """The newcomer fetches from three donors: one is killed at half, one lies from a sixth on."""
    items = large_state(total_bytes)
    pieces = -(-total_bytes // STATE_PIECE_BYTES)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        workers = [await stack.enter_async_context(DeviceWorker(f"state {i}", threads=1)) for i in range(2)]
        donors = []
        for name, lies_from in (("good", 0), ("killed", 0), ("liar", max(1, pieces // 6))):
            donor: tuple[Host, trio.CancelScope] = await nursery.start(_donor, name, items, workers[0], lies_from)
            donors.append(donor)
        (_, _), (killed, scope), (liar, _) = donors
        joiner, rpc = await nursery.start(_peer, "joiner")
        for host, _ in donors:
            joiner.learn(host.id, host.addrs())
        snapshots, notes = Snapshots(rpc), list[str]()
        snapshots.notes = notes.append
        worker = _Counting(workers[1], pieces // 2, scope.cancel)
        expected = [TensorSpec(item.name, item.dtype, item.shape) for item in items]
        began = trio.current_time()
        ids = [host.id for host, _ in donors]
        position, fetched = await snapshots.fetch(ids, StateRequest(RUN, 0), expected, worker)
        seconds = trio.current_time() - began
        died_at = worker.fired_at / pieces
        right = position == Position(3, b"x") and await workers[1].run(lambda: _same(items, fetched), name="compare")
        assert snapshots.report is not None
        nursery.cancel_scope.cancel()
    return Outcome(right, snapshots.report, killed.id.text, liar.id.text, died_at, notes, seconds)


class _Counting:
    """A worker that calls `then` when so many pieces were checked."""

    def __init__(self, worker: Worker, after: int, then: Callable[[], None]) -> None:
        self._worker, self._after, self._then = worker, after, then
        self._done = 0
        self.fired_at = 0

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0) -> T:
        result = await self._worker.run(job, name=name)
        self._done += name == "check a piece of the state"
        if self._done >= self._after and not self.fired_at:
            self.fired_at = self._done
            self._then()
        return result


def _same(ours: list[StateItem], theirs: list[StateItem]) -> bool:
    return [hashlib.sha256(i.payload).digest() for i in ours] == [hashlib.sha256(i.payload).digest() for i in theirs]


async def _peer(name: str, *, task_status: trio.TaskStatus[tuple[Host, Rpc]]) -> None:
    host, rpc = _host(name)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        await nursery.start(rpc.run)
        task_status.started((host, rpc))


def _host(name: str) -> tuple[Host, Rpc]:
    clock = RealClock(seed=1)
    host = Host(Keypair.from_seed(name.encode().ljust(32, b".")), clock, [TcpTransport()])
    return host, Rpc(host, clock)


async def _donor(
    name: str,
    items: list[StateItem],
    worker: Worker,
    lies_from: int,
    *,
    task_status: trio.TaskStatus[tuple[Host, trio.CancelScope]],
) -> None:
    async def freeze() -> tuple[Position, list[StateItem]]:
        await trio.lowlevel.checkpoint()
        return Position(3, b"x"), items

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            host, rpc = await nursery.start(_peer, name)
            Liar(rpc, lies_from).offer(RUN, 0, freeze, worker)
            task_status.started((host, scope))
            await trio.sleep_forever()


def main() -> None:
    """Print what came of it."""
    mb = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    outcome = trio.run(download, mb * 1_000_000)
    print("right result:", outcome.right)
    print(outcome.report.text())
    report = outcome.report
    print(f"{report.pieces} pieces, {report.asked} asked; killed at {outcome.killed_at_share:.0%}")
    print(f"killed: {outcome.killed[-6:]}; liar: {outcome.liar[-6:]}, found: {[name[-6:] for name in report.liars]}")
    print(*outcome.notes, sep="\n")


if __name__ == "__main__":
    main()
