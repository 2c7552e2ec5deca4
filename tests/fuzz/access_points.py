"""Points at a gate: a host of a run with tokens, and a peer that shows one, no good one, or another's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from peerd.access.access_guard import Access, Present
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.dht.dht import Dht
from peerd.messages.encoding import Empty
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.wire.host.host import Host
from tests.fuzz import goods
from tests.fuzz.bodies import Pool
from tests.fuzz.calls import Good, Menu
from tests.fuzz.goods import SELF
from tests.fuzz.service_points import ask
from tests.fuzz.session_points import entered
from tests.fuzz.sessions import HOST, NETWORK, Point, ServiceStage, Stage, attacked, point
from tests.kit.declared import ANY
from tests.worlds.network.hostile import Hostile
from tests.worlds.network.hosts import Hosts, keypair, running_hosts
from tests.worlds.network.members import ORGANIZER, STRANGER, Papers, revoked, run_file, token
from tests.worlds.simulation.clock import SimClock

POINTS: list[Point] = []
RUN = run_file()
TOKEN, ANOTHERS, EXPIRED = token(SELF), token(goods.HONEST), token(SELF, expires=1)
FORGED, LISTS = token(SELF, by=STRANGER), (revoked(1, 99), revoked(2, 98, 99), revoked(3, 99, by=STRANGER))
POOL = Pool(
    texts=(*goods.POOL.texts, RUN.run),
    data=(*goods.POOL.data, TOKEN, ANOTHERS, EXPIRED, FORGED, *LISTS, ORGANIZER.peer_id.raw),
)
SHOWN = Good("access/1/present", Present(RUN.run, TOKEN, b""))
CALLS = [
    SHOWN,
    *(Good("access/1/present", Present(RUN.run, one, LISTS[0])) for one in (ANOTHERS, EXPIRED, FORGED, b"")),
    Good("access/1/present", Present(RUN.run, TOKEN, LISTS[1])),
    Good("access/1/present", Present(RUN.run, TOKEN, LISTS[2])),
    *(Good(method, Empty()) for method in ("other/1/ask", "stage/6/forward", "swarm/6/member")),
    *goods.DHT[:3],
]


class GateStage(ServiceStage):
    """A host that admits members only; the honest peer has a token."""

    async def is_answered(self) -> str:
        """The honest peer may call what only members may."""
        try:
            await self.asks.call(self.host.id, "other/1/ask", Empty(), Empty, timeout_s=30)
        except RemoteError as error:
            return f"a member's call is not answered: {error}"
        return ""


async def _start(hosts: Hosts, name: str) -> tuple[Host, Rpc]:
    host, clock = await hosts.start(name, HOST), SimClock(1, name)
    rpc = Rpc(host, clock)
    dht = Dht(host, rpc, clock, keypair(name))
    access = Access(RUN, host, rpc, clock, Papers(token(PeerId.parse(host.id.text), expires=1 << 37)))
    rpc.guard(access)

    async def answer(call: Incoming[Empty]) -> Answer[Empty]:
        await trio.lowlevel.checkpoint()
        return Answer(Empty())

    for method in ("other/1/ask", "stage/6/forward", "swarm/6/member"):
        rpc.serve(method, Empty, answer, declared=ANY)
    for part in (rpc, access):
        await hosts.nursery.start(part.run)
    await hosts.nursery.start(dht.run, [])
    hosts.nursery.start_soon(access.refresh, dht)
    return host, rpc


@asynccontextmanager
async def gate() -> AsyncIterator[GateStage]:
    """A run with tokens."""
    async with running_hosts(NETWORK) as hosts:
        host, _ = await _start(hosts, "host")
        honest, asks = await _start(hosts, "honest")
        async with attacked(hosts, host, honest, GateStage, asks=asks) as made:
            yield made


@point("before a closed gate", Menu(POOL, CALLS).talk(), POINTS)
async def _stranger(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)  # who has shown a token before, and gone since
    assert await ask(hostile, Good("other/1/ask", Empty())) == b""
    return [hostile]


@point("with a token", Menu(POOL, CALLS).talk(), POINTS)
async def _member(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    assert await ask(hostile, SHOWN)
    assert await ask(hostile, Good("other/1/ask", Empty()))
    return [hostile]


@point("with another's token", Menu(POOL, CALLS).talk(), POINTS)
async def _another(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    assert await ask(hostile, CALLS[1])
    return [hostile]
