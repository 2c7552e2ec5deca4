"""Donors of one large state and a newcomer over TCP on loopback; one donor is lost half-way and one sends wrong bytes.

The donors are peers in this process, or processes of their own, which get a signal. By hand, with a state of so many
MB: `python -m tests.kit.statepeers 1000 SIGKILL`.
"""

from __future__ import annotations

import hashlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import trio
from multiaddr import Multiaddr

from peerd.compute.worker import DeviceWorker
from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.limits import STATE_PIECE_BYTES
from peerd.core.messages.encoding import Empty
from peerd.core.messages.state import TensorSpec
from peerd.core.messages.swarm import Position, StatePiece, StateRequest
from peerd.core.work import Worker
from peerd.net.clock import RealClock
from peerd.net.host.host import Host
from peerd.net.tcp.tcp_transport import TcpTransport
from peerd.service.peer_stack import peer_stack
from peerd.service.rpc.rpc import Answer, Incoming, Rpc
from peerd.service.state.serve import Giving
from peerd.service.state.snapshot import FetchReport, Snapshots, StateItem

RUN = b"r" * 16
POSITION = Position(3, b"x")
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
    """Result of a download."""

    right: bool  # what came is what the donors have
    report: FetchReport
    lost: str
    liar: str
    lost_at_share: float
    notes: list[str]
    seconds: float


def large_state(total_bytes: int) -> list[StateItem]:
    """Tensors of very different sizes, one array beneath them all."""
    data = np.random.default_rng(1).integers(0, 256, total_bytes, dtype="uint8")
    cuts = [0, 100, total_bytes // 3, total_bytes // 3 + 12, 2 * total_bytes // 3 + 1, total_bytes]
    parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
    return [StateItem(f"t{i}", "uint8", (len(part),), part.data) for i, part in enumerate(parts)]


@dataclass
class Known:
    """A donor as the newcomer's side of the test sees it."""

    id: PeerId
    addrs: list[Multiaddr]
    lose: Callable[[], None]


async def download(total_bytes: int, lose_by: str = "") -> Outcome:
    """The newcomer fetches from three donors: one is lost at half, one lies from its n-th piece on.

    `lose_by`: the signal, where donors are processes; "": they are peers in this one.
    """
    items = large_state(total_bytes)
    pieces = -(-total_bytes // STATE_PIECE_BYTES)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        workers = [await stack.enter_async_context(DeviceWorker(f"state {i}", threads=1)) for i in range(2)]
        donors: list[Known] = []
        for name, lies_from in (("good", 0), ("lost", 0), ("liar", max(1, pieces // 20))):
            if lose_by:
                donors.append(await nursery.start(_process, name, total_bytes, lies_from, lose_by))
            else:
                donors.append(await nursery.start(_donor, name, items, workers[0], lies_from))
        _, lost, liar = donors
        joiner, rpc = await nursery.start(_peer, "joiner")
        for donor in donors:
            joiner.learn(donor.id, donor.addrs)
        snapshots, notes = Snapshots(rpc), list[str]()
        snapshots.notes = notes.append
        worker = _Counting(workers[1], pieces // 2, lost.lose)
        expected = [TensorSpec(item.name, item.dtype, item.shape) for item in items]
        began = trio.current_time()
        request = StateRequest(RUN, 0)
        position, fetched = await snapshots.fetch([donor.id for donor in donors], request, expected, worker)
        seconds = trio.current_time() - began
        right = position == POSITION and await workers[1].run(lambda: _same(items, fetched), name="compare")
        assert snapshots.report is not None
        nursery.cancel_scope.cancel()
    return Outcome(right, snapshots.report, lost.id.text, liar.id.text, worker.fired_at / pieces, notes, seconds)


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
    stack = peer_stack(Keypair.from_seed(name.encode().ljust(32, b".")), RealClock(seed=1), [TcpTransport()])
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        task_status.started((stack.host, stack.rpc))


async def stand_still(step: int) -> None:
    """`reached` of a donor that makes no steps."""
    await trio.lowlevel.checkpoint()
    assert step <= POSITION.step, "a joiner waits for a step that nobody makes"


async def _donor(
    name: str, items: list[StateItem], worker: Worker, lies_from: int, *, task_status: trio.TaskStatus[Known]
) -> None:
    async def freeze() -> tuple[Position, list[StateItem]]:
        await trio.lowlevel.checkpoint()
        return POSITION, items

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            host, rpc = await nursery.start(_peer, name)
            Liar(rpc, lies_from).offer(RUN, 0, freeze, worker, lambda: POSITION, stand_still)
            task_status.started(Known(host.id, host.addrs(), scope.cancel))
            await trio.sleep_forever()


async def _process(
    name: str, total_bytes: int, lies_from: int, lose_by: str, *, task_status: trio.TaskStatus[Known]
) -> None:
    command = [sys.executable, "-m", "tests.kit.statepeers", "donor", name, str(total_bytes), str(lies_from)]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = b""
        while not said.endswith(b"\n"):
            more = await process.stdout.receive_some()
            assert more, "the donor ended before it said where it listens"
            said += more
        peer, *addrs = said.decode().split()
        number = signal.Signals[lose_by]
        task_status.started(
            Known(PeerId.parse(peer), [parse_addr(a) for a in addrs], lambda: process.send_signal(number))
        )
        await trio.sleep_forever()
    finally:
        process.kill()  # a stopped one too
        with trio.CancelScope(shield=True):
            await process.wait()


async def _be_donor(name: str, total_bytes: int, lies_from: int) -> None:
    async with DeviceWorker("state", threads=1) as worker, trio.open_nursery() as nursery:
        known: Known = await nursery.start(_donor, name, large_state(total_bytes), worker, lies_from)
        print(known.id.text, *known.addrs, flush=True)


def main() -> None:
    """Print what came of it; or be one of the donors."""
    if sys.argv[1:2] == ["donor"]:
        trio.run(_be_donor, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    mb = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    outcome = trio.run(download, mb * 1_000_000, "".join(sys.argv[2:3]))
    report = outcome.report
    print("right result:", outcome.right)
    print(f"{report.pieces} pieces, {report.asked} asked; one donor lost at {outcome.lost_at_share:.0%}")
    print(f"lost: {outcome.lost[-6:]}; liar: {outcome.liar[-6:]}, found: {[name[-6:] for name in report.liars]}")
    print(*outcome.notes, sep="\n")


if __name__ == "__main__":
    main()
