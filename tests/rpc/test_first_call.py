"""Round trips of the first call to a new peer: across an ocean, five of them take a whole second.

TCP one, the hand-shake one (its third message travels with what follows), the call one: the muxer is chosen early, the
stream and its protocol are optimistic, identify and the directory run beside it. In a run with tokens both sides first
show theirs: one more.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peerd.access.access_guard import Access
from peerd.messages.encoding import Empty
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.wire.host.host import Host
from tests.kit.declared import ANY
from tests.worlds.network.hosts import Hosts, running_hosts
from tests.worlds.network.members import Papers, run_file, token
from tests.worlds.simulation.clock import SimClock

ONE_WAY_S = 0.05  # of each access line
ROUND_TRIP_S = 4 * ONE_WAY_S


async def answer(call: Incoming[Empty]) -> Answer[Empty]:
    await trio.lowlevel.checkpoint()
    return Answer(Empty())


@pytest.mark.parametrize(("tokens", "first"), [(False, 3), (True, 4)])
async def test_the_first_call_to_a_new_peer_takes_three_round_trips_and_one_more_with_tokens(
    autojump_clock: trio.testing.MockClock, tokens: bool, first: int
) -> None:
    async with running_hosts() as hosts:
        a, b = [await hosts.start(name, latency_s=ONE_WAY_S) for name in "ab"]
        asking, asked = [await calls_of(hosts, host, name, tokens=tokens) for host, name in ((a, "a"), (b, "b"))]
        asked.serve("first/1/ask", Empty, answer, declared=ANY)
        a.learn(b.id, [hosts.addr("b")])
        took = []
        for _ in range(2):
            begin = trio.current_time()
            await asking.call(b.id, "first/1/ask", Empty(), Empty, timeout_s=20)
            took.append((trio.current_time() - begin) / ROUND_TRIP_S)
        assert took == pytest.approx([first, 1], abs=0.05)


async def calls_of(hosts: Hosts, host: Host, name: str, *, tokens: bool) -> Rpc:
    clock = SimClock(1, name)
    rpc = Rpc(host, clock)
    if tokens:
        access = Access(run_file(), host, rpc, clock, Papers(token(host.id)))
        rpc.guard(access)
        await hosts.nursery.start(access.run)
    await hosts.nursery.start(rpc.run)
    return rpc
