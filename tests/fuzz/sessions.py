"""Whole sessions with a real host and a hostile peer, which speaks correctly up to some point and then says anything.

One long-lived host on a simulated network takes session after session. Which point a session reaches, and every step
that it takes from there, follows from (seed, number) alone. After each the hostile peer's connections must go, what was
lent to them must be back, no fault of ours may have been counted, and an honest peer is answered. A failure names seed
and number and shows the shortest beginning of that session that fails by itself.

A new point joins by `@point(name, talk)` on a function that gets a Stage, reaches the point and returns one connection
or several (see `session_points`); `talk` makes what is said from then on. Handlers that a point needs are registered by
`@serving` functions, which get the host under attack before the first session, and a nursery. Points that need more
than a host have a scene of their own (see `service_scene`).
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import trio
from multiaddr import Multiaddr

from peerd.core.errors import RemoteError
from peerd.rpc.rpc import Rpc
from peerd.wire.budget.book import Resource
from peerd.wire.host.host import Host, HostConfig
from peerd.wire.link.config import LinkConfig
from peerd.wire.transport import Transport
from tests.kit.amount import ALL
from tests.worlds.network.hostile import Hostile
from tests.worlds.network.hosts import Hosts, ask, echo, running_hosts
from tests.worlds.network.virtual import addr_of, transport
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.memory import MemoryListener
from tests.worlds.simulation.simnet import NetConfig

STEPS_MAX = 12
PER_HOST = 500  # sessions that one host takes
WITHIN_S = 60.0  # virtual: until a link that is broken, or left by its peer, is gone
UNREAD_BYTES = 1 << 16  # that the honest peer's questions may have made
SLOWEST_CPU_S = 2.0  # one session; a busy machine does not count
NETWORK = NetConfig(window_bytes=64 << 10)  # who does not read makes the host's writer wait
HOST = HostConfig(link=LinkConfig(linger_s=0.5, leave_s=2.0))
LENT = (
    Resource.RECEIVING,
    Resource.ANSWERS,
    Resource.STREAMS,
    Resource.CALLS,
    Resource.LINKS,
)  # what goes back with a connection

Talk = Callable[[random.Random], Callable[[], bytes]]  # of one session: makes plaintext after plaintext
Reach = Callable[["Stage"], Awaitable[Sequence[Hostile]]]


def session_count(everything: int, quick: int) -> int:
    """Number of sessions, of all points together, in a run of everything or not; PEERD_FUZZ_SESSIONS gives another."""
    return int(os.environ.get("PEERD_FUZZ_SESSIONS", everything if ALL else quick))


@dataclass(frozen=True, slots=True)
class Point:
    """Up to where a session is what it should be."""

    name: str
    talk: Talk
    reach: Reach


@dataclass(frozen=True, slots=True)
class Step:
    """Plaintexts sent at once, the session's connection (`lane`) that takes them, and the pause after them."""

    plains: tuple[bytes, ...]
    lane: int
    sealed: bool
    pause_s: float

    def __str__(self) -> str:
        said = " | ".join(plain[:200].hex() + ("..." if len(plain) > 200 else "") for plain in self.plains)
        return f"{'say' if self.sealed else 'shout'} {said} on {self.lane}, wait {self.pause_s:g} s"


@dataclass(frozen=True, slots=True)
class Script:
    """One session, drawn before it begins."""

    number: int
    point: Point
    reads: bool  # takes what the host says
    steps: tuple[Step, ...]


POINTS: list[Point] = []
SERVING: list[Callable[[Host, trio.Nursery], None]] = []


def point(name: str, talk: Talk, points: list[Point] = POINTS) -> Callable[[Reach], Reach]:
    """A point that sessions reach by the function below it."""

    def add(reach: Reach) -> Reach:
        points.append(Point(name, talk, reach))
        return reach

    return add


def serving(add: Callable[[Host, trio.Nursery], None]) -> Callable[[Host, trio.Nursery], None]:
    """Registers further services of the host under attack; called before the first session."""
    SERVING.append(add)
    return add


@dataclass(kw_only=True)
class Stage:
    """The host under attack, the honest peer, and where the hostile one stands."""

    host: Host
    honest: Host
    addr: Multiaddr
    network: Transport
    listener: MemoryListener
    nursery: trio.Nursery
    ephemeral: bytes = bytes(range(32))  # secret bytes for the next hand-shakes
    links: set[object] = field(default_factory=set)  # those that are no session's

    async def dialed(self) -> Hostile:
        """A connection that the host has made to the hostile peer; nothing is said yet."""

        async def dial() -> None:
            with suppress(RemoteError):
                await self.host.connect_addr(self.listener.addrs[0])

        self.nursery.start_soon(dial)
        return Hostile(await self.listener.accept())

    async def check(self) -> str:
        """The fault that a session has left behind; "" when there is none."""
        host, since = self.host, trio.current_time()
        while others := [link for link in host.links if link not in self.links]:
            if trio.current_time() - since > WITHIN_S:
                return f"{others[0]} has not ended within {WITHIN_S:g} s, with {len(others[0].streams)} streams"
            await trio.sleep(0.05)
        if host.faults.total:
            return "; ".join(f"{place}: {fault.error} in {fault.where}" for place, fault in host.faults.places.items())
        if lent := host.window_bytes_lent:
            return f"{lent} bytes of windows are still lent"
        if host.unread.total_bytes > UNREAD_BYTES:
            return f"{host.unread.total_bytes} bytes still count as unread"
        try:
            with trio.move_on_after(WITHIN_S):
                await ask(self.honest, host, b"still there?")
                return ""
            return "an honest peer is not answered"
        except RemoteError as error:
            return f"an honest peer is not answered: {error}"


@dataclass(kw_only=True)
class ServiceStage(Stage):
    """A host with services under attack."""

    asks: Rpc  # of the honest peer

    @property
    def friends(self) -> frozenset[str]:
        """Peers that are not hostile."""
        return frozenset((self.host.id.text, self.honest.id.text))

    async def check(self) -> str:
        """The fault that a session has left behind: also memory that strangers still use, or a call with no answer."""
        return await super().check() or await self._still_lent() or await self.is_answered()

    async def is_answered(self) -> str:
        """The reason why calls of the honest peer fail; "" if they succeed."""
        raise NotImplementedError

    async def _still_lent(self) -> str:
        """The means of the host that strangers still use some time after they left."""

        def has(means: Resource) -> bool:
            return any(user.peer not in self.friends for user in self.host.book._accounts[means].by)

        since = trio.current_time()
        self.host.book.check()
        while kept := [means for means in LENT if has(means)]:
            if trio.current_time() - since > WITHIN_S:
                return f"strangers still have {', '.join(kept)}"
            await trio.sleep(0.05)
        return ""


S = TypeVar("S", bound=Stage)


def draw(seed: int, number: int, points: Sequence[Point]) -> Script:
    """Session `number` of this seed."""
    rng = random.Random(f"{seed}/{number}")
    chosen = points[number % len(points)]
    say = chosen.talk(rng)
    steps = []
    for _ in range(rng.randint(1, STEPS_MAX)):
        plains = tuple(say() for _ in range(rng.choice((1, 1, 1, 2, 3))))
        pause_s = rng.choice((0.0, 0.0, 0.0, 0.01, 0.3, 3.0))
        steps.append(Step(plains, rng.randrange(4), rng.random() < 0.97, pause_s))
    return Script(number, chosen, rng.random() < 0.7, tuple(steps))


@asynccontextmanager
async def attacked(
    hosts: Hosts, host: Host, honest: Host, kind: type[S] = Stage, settle_s: float = 1.0, **parts: Any
) -> AsyncIterator[S]:
    """The scene of hostile sessions with `host`, whose name is "host".

    Connects `honest` to it, adds a hostile peer that the host can dial, and waits `settle_s` until the links that no
    session owns are up. `parts`: further fields of the scene.
    """
    host.handle("/echo/1", echo)
    await honest.connect(host.id, [hosts.addr("host")])
    network = transport(hosts.net, "hostile")
    listener = await network.listen(addr_of(hosts.net, "hostile"))
    async with trio.open_nursery() as nursery:
        fixed = {"addr": hosts.addr("host"), "network": network, "listener": listener, "nursery": nursery}
        made = kind(host=host, honest=honest, **fixed, **parts)
        await trio.sleep(settle_s)
        made.links = set(host.links)
        yield made
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """A host that serves what points need, and an honest peer that is connected to it."""
    async with running_hosts(NETWORK) as hosts:
        host, honest = await hosts.start("host", HOST), await hosts.start("honest")
        for add in SERVING:
            add(host, hosts.nursery)
        async with attacked(hosts, host, honest) as made:
            yield made


async def play(made: Stage, script: Script) -> None:
    """One session, whatever comes of it; then the hostile peer is gone."""
    made.ephemeral = random.Random(script.number).randbytes(32)
    lanes: Sequence[Hostile] = ()
    try:
        with trio.move_on_after(WITHIN_S):
            lanes = await script.point.reach(made)
            async with trio.open_nursery() as nursery:
                if script.reads:
                    for lane in lanes:
                        nursery.start_soon(lane.gone)
                for step in script.steps:
                    lane = lanes[step.lane % len(lanes)]
                    with trio.move_on_after(1.0):  # the host need not read either
                        await (lane.say(*step.plains) if step.sealed else lane.shout(b"".join(step.plains)))
                    if step.pause_s:
                        await trio.sleep(step.pause_s)
                nursery.cancel_scope.cancel()
    except RemoteError:
        pass  # the host would not have it: its right
    finally:
        for lane in lanes:
            await lane.raw.aclose()


@dataclass
class Found:
    """A fault, and the number of the session that caused it."""

    number: int = -1
    what: str = ""


Scene = Callable[[], AbstractAsyncContextManager[Stage]]


async def reach(point: Point, scene: Scene) -> None:
    """Bring a session to `point`, and check that the host keeps its connections and is well after they close."""
    async with scene() as made:
        lanes = await point.reach(made)
        await trio.sleep(0.1)
        links = [link for link in made.host.links if link not in made.links]
        if scene is stage and lanes[0].secured is not None:  # further lanes are rails of the first one's link
            assert [len(link.rails) for link in links] == [len(lanes) - 1]
        for lane in lanes:
            with trio.move_on_after(0.1):
                await lane.gone()
            assert not lane.ended
        for lane in lanes:
            await lane.raw.aclose()
        assert await made.check() == ""


async def _run(scripts: Sequence[Script], found: Found, scene: Scene) -> None:
    async with scene() as made:
        for script in scripts:
            found.number, began = script.number, time.process_time()
            await play(made, script)
            found.what = await made.check()
            if not found.what and (took_s := time.process_time() - began) > SLOWEST_CPU_S:
                found.what = f"it took {took_s:.1f} seconds of the processor"
            if found.what:
                return


def _outcome(scripts: Sequence[Script], seed: int, scene: Scene) -> Found:
    found = Found()
    try:
        run_virtual(_run, scripts, found, scene, seed=seed)
    except Exception as error:  # whatever ends the host is the finding
        found.what = f"the host ended: {''.join(traceback.format_exception(error))[-3000:]}"
    return found


def first_failure(seed: int, numbers: range, points: Sequence[Point] = POINTS, scene: Scene = stage) -> str:
    """Play these sessions of this seed, one after another; what went wrong first, or ""."""
    for begin in range(numbers.start, numbers.stop, PER_HOST):
        some = range(begin, min(begin + PER_HOST, numbers.stop))
        found = _outcome([draw(seed, number, points) for number in some], seed, scene)
        if found.what:
            return _explained(found, draw(seed, found.number, points), seed, some, scene)
    return ""


def _explained(found: Found, script: Script, seed: int, numbers: range, scene: Scene) -> str:
    told = f"{found.what}\nin session {script.number} of seed {seed}, {script.point.name}"
    for length in range(len(script.steps) + 1):
        cut = replace(script, steps=script.steps[:length])
        if again := _outcome([cut], seed, scene).what:
            steps = "\n".join(f"  {step}" for step in cut.steps)
            return f"{told}; these {length} steps suffice, reading {script.reads}: {again}\n{steps}"
    return f"{told}; not by itself: it needs the sessions before it, from {numbers.start} on"
