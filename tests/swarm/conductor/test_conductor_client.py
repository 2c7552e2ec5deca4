"""Everyone ends at the same conductor: the one that served longest, or the next when it cannot be reached."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import MockClock

from peerd.core.errors import Refused, not_conducting
from peerd.core.ids import PeerId
from peerd.core.limits import REPORTS_AT_ONCE, REPORTS_PER_S
from peerd.messages.encoding import Empty
from peerd.messages.progress import StageProgress
from peerd.messages.swarm import Leave, MemberInfo
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.directory import StagePeer
from tests.kit.declared import ANY
from tests.worlds.machines.fakehost import FakeNet, TrioClock, fake_net


class Announced:
    """A directory whose content the test writes."""

    def __init__(self) -> None:
        self.announced: dict[tuple[PeerId, int], StagePeer] = {}
        self.reads, self.only_dials = 0, False

    def add(self, peer: PeerId, since: float, stage: int = 0, *, client: bool = False) -> None:
        progress = StageProgress(stage, since, 0, 0, 0.0, "cpu", "", "", [], client=client)
        self.announced[peer, progress.stage] = StagePeer(peer, progress)

    def learn_members(self, members: list[MemberInfo]) -> list[MemberInfo]:
        return members

    async def refresh(self) -> dict[PeerId, StagePeer]:
        await trio.lowlevel.checkpoint()
        self.reads += 1
        return self.announced


@asynccontextmanager
async def peers(count: int) -> AsyncIterator[tuple[FakeNet, list[PeerId], list[Rpc], Announced]]:
    async with fake_net() as net, trio.open_nursery() as nursery:
        ids, rpcs = [], []
        for i in range(count):
            host = net.host(f"peer {i}")
            rpc = Rpc(host, TrioClock())
            await nursery.start(rpc.run)
            ids.append(host.id)
            rpcs.append(rpc)
        yield net, ids, rpcs, Announced()
        nursery.cancel_scope.cancel()


def following(rpc: Rpc, own: PeerId, directory: Any) -> ConductorClient:
    return ConductorClient(rpc, own, directory)


def conducts(rpc: Rpc, log: list[int], number: int) -> None:
    async def answer(call: Incoming[Empty]) -> Answer[Empty]:
        log.append(number)
        return Answer(Empty())

    rpc.serve("swarm/6/test", Empty, answer, declared=ANY)


def refuses(rpc: Rpc, log: list[int], number: int) -> None:
    async def answer(call: Incoming[Empty]) -> Answer[Empty]:
        log.append(number)
        raise not_conducting(", somebody should")

    rpc.serve("swarm/6/test", Empty, answer, declared=ANY)


class LivingLinks:
    """Ways on which every peer answers pings."""

    def __init__(self) -> None:
        self.probed: list[PeerId] = []

    def doubt(self, peer: PeerId) -> float:
        return 0.0

    async def probe(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        self.probed.append(peer)


async def test_one_that_answers_pings_and_no_calls_is_asked_twice_and_then_the_next(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, ids, rpcs, directory):
        log: list[int] = []
        directory.add(ids[1], 10.0)
        directory.add(ids[2], 20.0)

        async def hang(call: Incoming[Empty]) -> Answer[Empty]:
            log.append(1)
            await trio.sleep_forever()
            raise AssertionError

        rpcs[1].serve("swarm/6/test", Empty, hang, declared=ANY)
        conducts(rpcs[2], log, 2)
        links = LivingLinks()
        me = ConductorClient(rpcs[0], ids[0], directory, ways=links)
        await me.ask("swarm/6/test", Empty, Empty, 10.0)
        assert log == [1, 1, 2]
        assert links.probed == [ids[1]]


async def test_two_that_answer_nobody_are_not_asked_in_turns_for_ever_while_a_third_one_conducts(
    autojump_clock: MockClock,
) -> None:
    async with peers(4) as (_, ids, rpcs, directory):
        log: list[int] = []

        def serve(number: int) -> None:
            async def hang(call: Incoming[Empty]) -> Answer[Empty]:
                log.append(number)
                await trio.sleep_forever()
                raise AssertionError

            rpcs[number].serve("swarm/6/test", Empty, hang, declared=ANY)

        for number in (1, 2):
            serve(number)
        conducts(rpcs[3], log, 3)
        for number in (1, 2, 3):
            directory.add(ids[number], 10.0 * number)
        me = following(rpcs[0], ids[0], directory)
        await me.ask("swarm/6/test", Empty, Empty, 10.0)  # each call takes longer than one is suspected
        assert log == [1, 2, 3]


async def test_who_served_longest_comes_first_and_other_stages_never(autojump_clock: MockClock) -> None:
    async with peers(4) as (_, ids, rpcs, directory):
        directory.add(ids[1], 20.0)
        directory.add(ids[2], 10.0)
        directory.add(ids[3], 1.0, stage=1)
        me = following(rpcs[0], ids[0], directory)
        assert me.order() == [ids[2], ids[1]]
        me.joined_since = 15.0
        assert me.order() == [ids[2], ids[0], ids[1]]
        assert me.duty() == ids[2]
        me.suspect(ids[2])
        assert me.duty() == ids[0]
        await trio.sleep(10)
        assert me.duty() == ids[2]


async def test_the_conductors_list_has_whom_the_directory_does_not_know_yet(autojump_clock: MockClock) -> None:
    """Two join, and the conductor is lost a moment later: each must know that the other was there first, or not."""
    async with peers(4) as (_, ids, rpcs, directory):
        conductor, first, second, helper = ids
        orders = []
        for own, since in ((first, 10.0), (second, 20.0)):
            me = following(rpcs[ids.index(own)], own, directory)
            me.joined_since = since
            me.note_members(
                [
                    MemberInfo(conductor.text, 0, [], True, since=1.0),
                    MemberInfo(first.text, 0, [], True, since=10.0),
                    MemberInfo(second.text, 0, [], False, since=20.0),
                    MemberInfo(helper.text, 0, [], False),
                ]
            )
            me.suspect(conductor)
            assert me.known() == {conductor, first, second}
            orders.append((me.order(), me.duty()))
        assert orders == [([conductor, first, second], first)] * 2
        me.note_members([MemberInfo(second.text, 0, [], True, client=True, since=5.0)])
        assert me.order() == [second]


async def test_who_cannot_be_dialed_conducts_last_however_long_it_serves(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, ids, rpcs, directory):
        directory.add(ids[1], 20.0)
        directory.add(ids[2], 10.0, client=True)
        me = following(rpcs[0], ids[0], directory)
        me.joined_since = 1.0
        assert me.order() == [ids[0], ids[1], ids[2]]
        directory.only_dials = True
        assert me.order() == [ids[1], ids[0], ids[2]]
        assert me.duty() == ids[1]


async def test_the_next_is_asked_when_the_first_is_gone_and_the_change_is_told(autojump_clock: MockClock) -> None:
    async with peers(3) as (net, ids, rpcs, directory):
        log: list[int] = []
        conducts(rpcs[1], log, 1)
        conducts(rpcs[2], log, 2)
        directory.add(ids[1], 1.0)
        directory.add(ids[2], 2.0)
        me = following(rpcs[0], ids[0], directory)
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert (log, me.conductor, me.changes) == ([1, 1], ids[1], 1)
        net.cut(ids[0], ids[1])
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert (log, me.conductor, me.changes) == ([1, 1, 2], ids[2], 2)
        net.heal(ids[0], ids[1])
        await trio.sleep(60)
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert me.conductor == ids[2], "whoever conducts well goes on"


async def test_it_waits_with_a_reason_until_stage_0_has_a_peer(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, ids, rpcs, directory), trio.open_nursery() as nursery:
        log: list[int] = []
        conducts(rpcs[1], log, 1)
        me = following(rpcs[0], ids[0], directory)
        nursery.start_soon(me.ask, "swarm/6/test", Empty, Empty, 5.0)
        await trio.sleep(5)
        assert me.waits_for == "stage 0 has no peers"
        directory.add(ids[1], 1.0)
        await trio.sleep(5)
        assert log == [1]
        assert me.waits_for is None


async def test_a_refusal_is_shown_and_asked_again(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, ids, rpcs, directory):
        refusals = 2

        async def answer(call: Incoming[Empty]) -> Answer[Empty]:
            nonlocal refusals
            refusals -= 1
            if refusals >= 0:
                raise Refused("the conductor is somebody else")
            return Answer(Empty())

        rpcs[1].serve("swarm/6/test", Empty, answer, declared=ANY)
        directory.add(ids[1], 1.0)
        me = following(rpcs[0], ids[0], directory)
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert refusals == -1


async def test_who_is_refused_asks_further_and_the_first_again_before_all_others(autojump_clock: MockClock) -> None:
    async with peers(16) as (_, ids, rpcs, directory):
        log: list[int] = []
        for number in range(1, 16):
            if number != 14:
                refuses(rpcs[number], log, number)
            directory.add(ids[number], float(number))
        conducts(rpcs[14], log, 14)
        me = following(rpcs[0], ids[0], directory)
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert log[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1], "the first may have taken the duty on meanwhile"
        assert log[-1] == 14
        assert me.accepted_by == me.conductor == ids[14]
        await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert log[-2:] == [14, 14]


async def test_one_that_failed_long_is_asked_again_where_all_others_say_that_they_do_not_conduct(
    autojump_clock: MockClock,
) -> None:
    async with peers(3) as (_, ids, rpcs, directory):
        log: list[int] = []
        conducts(rpcs[1], log, 1)
        refuses(rpcs[2], log, 2)
        directory.add(ids[1], 1.0)
        directory.add(ids[2], 2.0)
        me = following(rpcs[0], ids[0], directory)
        for _ in range(10):
            me.suspect(ids[1])
        assert me.suspected(ids[1]), "for minutes: a relay was gone, say"
        with trio.fail_after(20):
            await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert me.accepted_by == ids[1]
        assert log.count(2) >= 25, "those that can be reached have ten seconds to agree on one"


async def test_one_that_failed_and_answers_again_is_not_asked_for_ever_while_it_does_not_conduct(
    autojump_clock: MockClock,
) -> None:
    """Nobody conducts for half a minute; then the one does that has refused until now, and never failed."""
    async with peers(3) as (_, ids, rpcs, directory):
        log: list[int] = []
        for number in (1, 2):
            refuses(rpcs[number], log, number)
            directory.add(ids[number], float(number))
        me = following(rpcs[0], ids[0], directory)
        me.suspect(ids[2])
        with trio.move_on_after(30):
            await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert min(log.count(1), log.count(2)) > 25
        rpcs[1].unserve("swarm/6")
        conducts(rpcs[1], log, 1)
        with trio.fail_after(3):
            await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert me.conductor == ids[1]


async def test_the_duty_passes_over_one_that_refuses_while_all_others_do(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, ids, rpcs, directory):
        refused: list[int] = []
        refuses(rpcs[1], refused, 1)  # it says that it came first
        refuses(rpcs[2], refused, 2)
        directory.add(ids[1], 1.0)
        directory.add(ids[2], 20.0)
        me = following(rpcs[0], ids[0], directory)
        me.joined_since = 10.0

        async def own(call: Incoming[Empty]) -> Answer[Empty]:
            if me.duty() != ids[0]:
                raise not_conducting(f", {me.duty().short} should")
            return Answer(Empty())

        rpcs[0].serve("swarm/6/test", Empty, own, declared=ANY)
        assert me.duty() == ids[1]
        with trio.fail_after(10.0):
            await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert me.accepted_by == ids[0]
        assert refused.count(1) == 3
        assert me.duty() == ids[1], "once somebody conducts, it is as before"


async def test_of_refusals_the_conductors_own_is_shown(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, ids, rpcs, directory):
        allowed = trio.Event()

        async def deny(call: Incoming[Empty]) -> Answer[Empty]:
            if allowed.is_set():
                return Answer(Empty())
            raise Refused("your token does not allow stage")

        rpcs[1].serve("swarm/6/test", Empty, deny, declared=ANY)
        refuses(rpcs[2], [], 2)
        directory.add(ids[1], 1.0)
        directory.add(ids[2], 2.0)
        me = following(rpcs[0], ids[0], directory)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(me.ask, "swarm/6/test", Empty, Empty, 5.0)
            for _ in range(20):
                await trio.sleep(0.1 * math.pi)
                assert "your token does not allow stage" in str(me.waits_for)
            allowed.set()
        assert me.waits_for is None
        assert me.accepted_by == ids[1]


async def test_who_leaves_tells_the_conductor_and_waits_no_longer_than_a_second_for_it(
    autojump_clock: MockClock,
) -> None:
    async with peers(3) as (_, ids, rpcs, directory):
        told: list[tuple[PeerId, bytes]] = []

        async def leaves(call: Incoming[Leave]) -> Answer[Empty]:
            told.append((call.peer, call.body.run))
            return Answer(Empty())

        async def hangs(call: Incoming[Leave]) -> Answer[Empty]:
            await trio.sleep_forever()
            raise AssertionError

        rpcs[1].serve("swarm/6/leave", Leave, leaves, declared=ANY)
        rpcs[2].serve("swarm/6/leave", Leave, hangs, declared=ANY)
        me, run = following(rpcs[0], ids[0], directory), bytes(16)
        for conductor in (None, ids[0]):  # nobody, or we ourselves: there is nothing to say
            me.conductor = conductor
            await me.say_goodbye(run)
        assert told == []
        me.conductor = ids[1]
        await me.say_goodbye(run)
        assert told == [(ids[0], run)]
        me.conductor, began = ids[2], trio.current_time()
        await me.say_goodbye(run)
        assert trio.current_time() - began <= 1.0


async def test_a_conductor_that_answers_at_once_is_asked_no_more_often_than_reports_may_come(
    autojump_clock: MockClock,
) -> None:
    async with peers(2) as (_, ids, rpcs, directory):
        directory.add(ids[1], 1.0)
        log: list[int] = []
        conducts(rpcs[1], log, 1)
        me = following(rpcs[0], ids[0], directory)
        with trio.move_on_after(10):
            while len(log) < 10_000:
                await me.ask("swarm/6/test", Empty, Empty, 5.0)
        assert REPORTS_AT_ONCE + 9 * REPORTS_PER_S <= len(log) <= REPORTS_AT_ONCE + 11 * REPORTS_PER_S
