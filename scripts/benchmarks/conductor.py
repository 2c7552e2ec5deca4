"""Processor time of a conductor per report, with 16 to 1,024 members and 256 to 16,384 microbatches per step.

Runs a conductor's real state machine, driver and report handlers in virtual time. Light members and trainers call them
through the wire encoding, but without a network, and without computing or averaging. A trainer reports each microbatch
separately and keeps a window of them in flight, which finish after exponential times. Measured are the processor time
of the conductor's tasks per report, and the longest time that one of them ran without yielding.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

from peerd.core.keys import Keypair
from peerd.messages.encoding import decode, encode
from peerd.messages.swarm import Mbs, MemberAnswer, MemberSync, Seqs, TrainerAnswer, TrainerSync
from peerd.rpc.rpc import Incoming
from peerd.swarm.batch.trainer_ledger import Start, TrainerLedger
from peerd.swarm.events import MoveEnded, PrepareEnded, SendMove, SendPrepare
from peerd.swarm.posts import post_name
from peerd.swarm.roster import START
from peerd.swarm.steps.member_list import KnownMembers
from scripts.benchmarks._report import Figure, Report
from tests.worlds.machines.conductor_scene import OWN, RUN, Scene

STAGES = 4
SIZES = ((16, 256), (64, 1024), (256, 2048), (1024, 8192), (1024, 16384))
SERVICE_S = 2.0  # mean time of a microbatch
WAIT_S = 8.0
TARGET_MS, TARGET_WORST_MS = 0.1, 5.0


class Meter(trio.abc.Instrument):
    """Processor time of the conductor's tasks, without garbage collection.

    The collector would also scan the objects of the thousand light peers in this process.
    """

    def __init__(self) -> None:
        self.spent_s = self.worst_s = self._began = self._collected_since = 0.0
        self.on = False

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Callback for `gc.callbacks`, at the beginning and end of a collection."""
        if phase == "start":
            self._collected_since = time.thread_time()
        else:
            self._began += time.thread_time() - self._collected_since

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.on and task.name.startswith("conductor"):
            took = time.thread_time() - self._began
            self.spent_s += took
            self.worst_s = max(self.worst_s, took)


@dataclass(slots=True)
class Load:
    """The simulated members and trainers of one swarm, and the counts of their reports."""

    scene: Scene
    meter: Meter
    trainers: int
    microbatches: int
    steps: int
    reports: int = 0
    bytes: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    positions: dict[str, Any] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def call(self, nursery: trio.Nursery, peer: Keypair, body: Any, reply: Any, handler: Any) -> Any:
        """Make a call through the wire encoding, answered in a task of the conductor."""
        asked, answers = encode(body), list[Any]()
        came = trio.Event()
        counts = self.meter.on and reply is TrainerAnswer
        self.reports += counts
        self.bytes += counts * len(asked)

        async def answer() -> None:
            call = Incoming(peer.peer_id, decode(type(body), asked), (), trio.current_time() + 60.0)
            answers.append(encode((await handler(call)).body))
            came.set()

        nursery.start_soon(answer, name="conductor answers")
        await came.wait()
        self.bytes += counts * len(answers[0])
        return decode(reply, answers[0])

    async def member(self, nursery: trio.Nursery, peer: Keypair, stage: int) -> None:
        name, known, seen, held = post_name(peer.peer_id.text, stage), KnownMembers(), 0, True
        self.positions[name] = START
        while True:
            body: dict[str, Any] = {"run": RUN, "session": 7, "stage": stage, "position": self.positions[name]}
            body |= {"prepared": None, "saved": [], "held": Mbs() if held else None, "counted": Mbs(), "addrs": []}
            body |= {"since": 1.0, "term": 0, "seen": seen, "wait_s": WAIT_S, "listed": known.version}
            message = MemberSync(**body)
            answer = await self.call(nursery, peer, message, MemberAnswer, self.scene.reports._member)
            known.take(answer.members)
            seen, held = answer.version, answer.resend

    async def trainer(self, nursery: trio.Nursery, peer: Keypair, number: int, holders: list[str]) -> None:
        books: TrainerLedger[int] = TrainerLedger(number + 1)
        window = math.ceil(2 * self.microbatches / self.trainers / 3)
        known, seen, news, done = KnownMembers(), 0, [True], trio.Event()

        async def compute(item: Any) -> None:
            await trio.sleep(self.rng.expovariate(1 / SERVICE_S))
            if item.seq in books.items:
                books.finish(item, holders)
                news[0] = True
                ring[0].set()

        ring = [done]
        while True:
            books.waiting = books.waiting or [0] * window
            books.wish(window)
            said = books.news()[:1]
            later = [one.seq for one in books.news()[1:]]
            body = TrainerSync(
                run=RUN,
                term=0,
                step=books.step,
                open=Seqs.of([*later, *books.open()]),
                done=said,
                seen=seen,
                seen_members=known.version,
                wait_s=0.0 if said or known.more else WAIT_S,
            )
            ring[0] = trio.Event()
            if body.wait_s:
                answer = await self._until_news(nursery, peer, body, ring)
                if answer is None:
                    continue
            else:
                answer = await self.call(nursery, peer, body, TrainerAnswer, self.scene.reports._trainer)
            known.take(answer.members)
            seen = answer.version
            for order in books.answered(answer, said):
                if isinstance(order, Start):
                    nursery.start_soon(compute, order.item)

    async def _until_news(self, nursery: trio.Nursery, peer: Keypair, body: Any, ring: list[trio.Event]) -> Any:
        """Send a report without news. Returns the answer, or None if there were news before it came."""
        found: list[Any] = []
        async with trio.open_nursery() as both:

            async def ask() -> None:
                found.append(await self.call(both, peer, body, TrainerAnswer, self.scene.reports._trainer))
                both.cancel_scope.cancel()

            both.start_soon(ask)
            await ring[0].wait()
            both.cancel_scope.cancel()
        return found[0] if found else None

    # --- members' side of orders --------------------------------------------------------------------------------

    def begin(self, nursery: trio.Nursery, orders: list[SendPrepare], reign: Any) -> None:
        """Replacement for `Orders.begin`: starts one task per attempt, which starts those of its members."""
        attempts: dict[bytes, list[SendPrepare]] = {}
        for order in orders:
            attempts.setdefault(order.attempt, []).append(order)
        for attempt in attempts.values():
            nursery.start_soon(self._attempt, attempt, reign, name="conductor begins an attempt")

    async def _attempt(self, orders: list[SendPrepare], reign: Any) -> None:
        async with trio.open_nursery() as nursery:
            for order in orders:
                nursery.start_soon(self._prepare, order, reign, name="conductor hears of averaging")

    async def _prepare(self, order: SendPrepare, reign: Any) -> None:
        await trio.sleep(0.5)
        reign.tell(PrepareEnded(order.peer, order.attempt, True, digest=b"d" * 32))

    async def move(self, order: SendMove, reign: Any) -> None:
        await trio.sleep(0.2)
        self.positions[order.peer] = order.target
        reign.tell(MoveEnded(order.peer, order.target))
        if order.target.step > self.steps:
            self.done.set()


async def _swarm(load: Load, members: int, limit_s: float) -> None:
    scene = load.scene
    scene.orders.begin = load.begin  # type: ignore[method-assign]
    scene.orders.move = load.move  # type: ignore[method-assign]
    peers = [OWN, *(Keypair.from_seed(f"m{i}".encode().ljust(32, b".")) for i in range(members - 1))]
    async with trio.open_nursery() as nursery:
        scene.driver.nursery = nursery
        nursery.start_soon(scene.driver.keep_time, name="conductor keeps time")
        nursery.start_soon(scene.driver.watch_silence, name="conductor watches")
        for i, peer in enumerate(peers):
            nursery.start_soon(load.member, nursery, peer, i % STAGES)
        await trio.sleep(5.0)
        by_stage = [[p.peer_id.text for p in peers[s::STAGES]] for s in range(STAGES)]
        for i in range(load.trainers):
            who = Keypair.from_seed(f"t{i}".encode().ljust(32, b"."))
            nursery.start_soon(load.trainer, nursery, who, i, [stage[i % len(stage)] for stage in by_stage])
        while scene.driver.machine is None or scene.driver.machine.course.step < 1:  # noqa: ASYNC110 (it tells nobody)
            await trio.sleep(0.5)
        gc.collect()
        gc.freeze()  # as a daemon does; excludes the light peers' objects from collections
        load.meter.on = True
        began = time.perf_counter()
        while not load.done.is_set() and time.perf_counter() - began < limit_s:  # noqa: ASYNC110 (real time)
            await trio.sleep(0.25)
        nursery.cancel_scope.cancel()


def measured(members: int, microbatches: int, steps: int, limit_s: float) -> Load:
    """Run a swarm for `steps` steps after a first one. Returns its counts."""
    scene, meter = Scene(stages=STAGES, microbatches=microbatches, gather_s=1.0), Meter()
    load = Load(scene, meter, max(4, members // 4), microbatches, steps)
    clock = trio.testing.MockClock(autojump_threshold=0)
    gc.callbacks.append(meter.collected)
    try:
        trio.run(_swarm, load, members, limit_s, clock=clock, instruments=[meter])
    finally:
        gc.callbacks.remove(meter.collected)
        gc.unfreeze()
    return load


def measure(full: bool) -> Report:
    sections: list[list[Figure]] = []
    for members, microbatches in SIZES:
        load = measured(members, microbatches, 3 if full else 1, 60.0)
        sections.append([*_figures(members, microbatches, load)])
    return Report("Conductor: processor time of a report", sections)


def _figures(members: int, microbatches: int, load: Load) -> Iterator[Figure]:
    size, key = f"{members:,} members, {microbatches:,} microbatches", f"{members}_{microbatches}"
    ms, worst_ms = 1e3 * load.meter.spent_s / load.reports, 1e3 * load.meter.worst_s
    yield Figure(f"ms_{key}", f"{size}: ms a report", ms, "ms", 3, at_most=TARGET_MS)
    yield Figure(f"worst_ms_{key}", "  longest without a pause", worst_ms, "ms", 1, at_most=TARGET_WORST_MS)
    yield Figure(f"bytes_{key}", "  bytes of a report and its answer", load.bytes / load.reports, "B", 0)
    yield Figure(f"reports_{key}", "  reports", float(load.reports), digits=0)
