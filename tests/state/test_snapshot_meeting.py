"""Donors that make steps while they are asked for their states: they meet at one, and who waits keeps nobody out."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from peerd.core.errors import Refused, RemoteError
from peerd.core.limits import STATE_MEETING
from peerd.messages.state import StateItem, StateManifest, StateRequest
from peerd.messages.swarm import Position
from peerd.rpc.rpc import Answer, Incoming, Rpc
from tests.state.test_snapshot import RUN, Counting, Donor, fetch, peers, state, values
from tests.worlds.machines.workers import InlineWorker


class Slow(Counting):
    """Takes a while, so long at most, to say what it has."""

    def __init__(self, donor: Donor, late_s: float = 0.01, rng: random.Random | None = None) -> None:
        self._late_s, self._rng = late_s, rng
        super().__init__(donor)

    async def _give_manifest(self, call: Incoming[StateRequest]) -> Answer[StateManifest]:
        await trio.sleep(self._late_s * (self._rng.random() if self._rng else 1.0))
        return await super()._give_manifest(call)


async def test_donors_that_step_all_the_time_are_caught_at_the_same_step(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(a, rpc_a), (b, rpc_b), (_, joiner)]):
        givers = [Donor(rpc_a, 0), Donor(rpc_b, 0)]

        async def move(giver: Donor, begin_s: float) -> None:
            await trio.sleep(begin_s)
            while True:
                giver.move()
                await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, givers[0], 0.0)
            nursery.start_soon(move, givers[1], 0.02)  # always a little behind
            rpc_a.unserve("state/1")
            givers[0].giving = Slow(givers[0])
            givers[0].give()
            position, data = await fetch(joiner, [a, b])
            nursery.cancel_scope.cancel()
        assert data == values(state(position.step))


@pytest.mark.parametrize("seed", range(8))
async def test_donors_that_come_to_answer_at_different_moments_meet_at_a_step(
    autojump_clock: MockClock, seed: int
) -> None:
    """As in a swarm of busy computers whose steps are short."""
    async with peers(3) as (_, [(a, rpc_a), (b, rpc_b), (_, joiner)]):
        givers = [Donor(rpc_a, 0), Donor(rpc_b, 0)]
        for giver in givers:
            giver.rpc.unserve("state/1")
            giver.giving = Slow(giver, 2.0, random.Random(f"{seed} {giver.rpc is rpc_a}"))
            giver.give()

        async def move() -> None:
            while True:
                await trio.sleep(0.2)
                for giver in givers:
                    giver.move()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            begun = trio.current_time()
            position, data = await fetch(joiner, [a, b])
            nursery.cancel_scope.cancel()
        assert data == values(state(position.step))
        assert trio.current_time() - begun < 15, "in the time of some seven rounds"


async def test_the_total_of_a_donors_present_step_is_answered_when_it_makes_that_step(
    autojump_clock: MockClock,
) -> None:
    """Members commit one after another: who is told of a step by the first may ask the last before it gets there."""
    async with peers(2) as (_, [(at, rpc), (_, joiner)]):
        donor = Donor(rpc, 7)
        leads_on = Position(7, b"x")

        async def named(of: Position) -> tuple[Position, list[StateItem]] | None:
            return (Position(8, b"x"), state(8)) if donor.step > of.step else None

        donor.giving.offer_named(RUN, 1, named, InlineWorker())

        async def ask(of: Position) -> StateManifest:
            body = StateRequest(RUN, 1, of=of)
            return (await joiner.call(at, "state/1/manifest", body, StateManifest, timeout_s=60)).body

        with pytest.raises(Refused):
            await ask(Position(9, b"x"))  # not the next one: not waited for
        async with trio.open_nursery() as nursery:
            nursery.start_soon(after, 3.0, donor.move)
            begun = trio.current_time()
            assert (await ask(leads_on)).position == Position(8, b"x")
        assert 3.0 <= trio.current_time() - begun < 4.0


async def after(wait_s: float, then: Callable[[], None]) -> None:
    await trio.sleep(wait_s)
    then()


async def test_callers_that_wait_for_a_far_step_keep_nobody_from_an_answer(autojump_clock: MockClock) -> None:
    async with peers(2 + STATE_MEETING) as (_, [(donor, rpc), (_, honest), *hostile]):
        Donor(rpc, 7)
        answered: list[float] = []

        async def ask(caller: Rpc, meet: int) -> None:
            body = StateRequest(RUN, 1, meet=meet)
            await caller.call(donor, "state/1/manifest", body, StateManifest, timeout_s=60)
            answered.append(trio.current_time())

        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _, caller in hostile:
                nursery.start_soon(ask, caller, 1 << 50)
                nursery.start_soon(ask, caller, 1 << 50)  # of one caller, one waits
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, honest, 8)  # soon to come, but there are too many who wait
        waited_s = sorted(at - begun for at in answered)
        assert len(waited_s) == 2 * STATE_MEETING + 1
        assert waited_s[STATE_MEETING] < 1
        assert 1 < waited_s[STATE_MEETING + 1] <= waited_s[-1] < 30


async def test_one_donor_alone_is_not_believed_while_the_conductor_names_more(autojump_clock: MockClock) -> None:
    """Whoever keeps the honest ones from answering would decide what newcomers load."""
    async with peers(3) as (net, [(silenced, _), (liar, rpc), (own, joiner)]):
        Donor(rpc, 10**6)
        net.cut(silenced, own)
        named = [silenced, liar]
        with pytest.raises(RemoteError, match="no 2 donors agree"):
            await fetch(joiner, lambda: named)
        named.remove(silenced)  # the conductor says that it is gone
        assert (await fetch(joiner, lambda: named))[0].step == 10**6
