"""The driver of a conductor's machine: its decisions become orders, its time is kept, the silent are dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from peerd.messages.swarm import Done
from peerd.swarm.conductor.machine_driver import MEMBERS
from peerd.swarm.events import MemberGone, MoveEnded, Output, PrepareEnded, Probe, SendMove, TrainerReport
from peerd.swarm.positions.phases import Phase
from peerd.swarm.posts import post_name
from peerd.swarm.roster import START
from tests.worlds.machines.conducting import hello
from tests.worlds.machines.conductor_scene import OTHER, OWN, Scene, running

POST = post_name(OTHER.peer_id.text, 0)


@asynccontextmanager
async def begun() -> AsyncIterator[Scene]:
    """A tenure with one member."""
    async with running() as scene:
        scene.duty.act(0, OWN.peer_id)
        scene.driver.heard[POST] = trio.current_time()
        scene.feed(hello(POST))
        yield scene


async def test_the_machine_wakes_in_time_and_its_decisions_become_orders(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        await trio.sleep(1.1)
        machine = scene.driver.machine
        assert machine is not None
        assert machine.phase is Phase.OPEN
        assert "the swarm is at step 0" in scene.notes
        scene.feed(TrainerReport("t", 0, (1,), ()))
        scene.feed(TrainerReport("t", 0, (), (Done(1, [POST]),)))
        (prepare,), reign = scene.orders.prepares, scene.orders.reign
        assert reign is not None
        assert (reign.term, reign.step) == (1, 0)
        reign.tell(PrepareEnded(POST, prepare.attempt, True))
        await trio.sleep(0.1)
        assert [(move.peer, move.commit) for move in scene.orders.moves] == [(POST, True)]
        scene.driver.end()
        reign.tell(PrepareEnded(POST, prepare.attempt, False))
        assert machine.phase is Phase.MOVING, "a machine whose tenure has ended hears no more"
        assert scene.orders.cancelled == [b"all"]


async def test_a_peer_that_does_not_report_any_more_is_gone(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        await trio.sleep(11.0)
        scene.driver.still_heard(POST)
        await trio.sleep(11.0)
        assert scene.driver.machine is not None
        assert [m.peer for m in scene.driver.machine.members()] == [POST]
        await trio.sleep(4.0)
        assert scene.driver.machine.members() == []
        assert [note for note in scene.notes if note.endswith("is silent")]
        scene.driver.still_heard(POST)
        assert scene.driver.heard == {}, "what waited since does not bring it back"


async def test_a_peer_whose_connection_is_lost_is_gone_with_all_its_posts(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        scene.driver.heard |= {OTHER.peer_id.text: 0.0, OWN.peer_id.text: 0.0}
        scene.driver.peer_gone(OTHER.peer_id)
        assert list(scene.driver.heard) == [OWN.peer_id.text]
        assert scene.driver.machine is not None
        assert scene.driver.machine.members() == []


async def test_a_member_that_others_miss_is_gone_only_if_we_do_not_reach_it_either(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        tenure = scene.driver.tenure
        assert tenure is not None
        probes: list[Output] = [Probe(POST), Probe("no peer")]
        for silent in (False, True):
            scene.others.silent = {OTHER.peer_id} if silent else set()
            scene.driver._carry_out(tenure, probes)
            await trio.sleep(0.1)
            assert (tenure.machine.members() == []) is silent


async def test_whoever_waits_is_woken_by_news_and_by_the_tenures_end(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        tenure, woken = scene.driver.tenure, list[float]()
        assert tenure is not None
        seen = tenure.machine.members_version

        async def wait(news_at: int) -> None:
            await scene.driver.wait_for_news(MEMBERS, lambda: tenure.machine.members_version >= news_at, tenure, 60.0)
            woken.append(trio.current_time())

        began = trio.current_time()
        scene.driver.nursery.start_soon(wait, seen + 1)
        scene.driver.nursery.start_soon(wait, seen + 1000)
        await trio.sleep(0.5)
        scene.feed(MemberGone(POST))
        await trio.sleep(0.5)
        scene.driver.end()
        await trio.sleep(0.5)
        assert [round(at - began, 2) for at in woken] == [0.5, 1.0]


async def test_a_trainer_is_woken_by_what_concerns_it_and_not_by_others(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        tenure, woken, looked = scene.driver.tenure, list[tuple[str, float]](), dict[str, int]()
        assert tenure is not None
        began = trio.current_time()

        async def wait(name: str) -> None:
            seen = tenure.machine.version(name)

            def has_news() -> bool:
                looked[name] = looked.get(name, 0) + 1
                return tenure.machine.version(name) != seen

            await scene.driver.wait_for_news(name, has_news, tenure, 60.0)
            woken.append((name, round(trio.current_time() - began, 2)))

        for name in ("a", "b"):
            scene.driver.nursery.start_soon(wait, name)
        await trio.sleep(0.5)
        tenure.machine._versions.change("a")
        scene.driver.wake_waiting()
        await trio.sleep(0.5)
        assert (woken, looked["b"]) == ([("a", 0.5)], 1)
        scene.driver.end()
        await trio.sleep(0.5)
        assert woken == [("a", 0.5), ("b", 1.0)]
        assert scene.driver._waiting.idle


async def test_members_are_not_woken_by_what_concerns_all_trainers(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        tenure, looks = scene.driver.tenure, list[float]()
        assert tenure is not None

        def has_news() -> bool:
            looks.append(trio.current_time())
            return False

        scene.driver.nursery.start_soon(scene.driver.wait_for_news, MEMBERS, has_news, tenure, 60.0)
        await trio.sleep(0.1)
        tenure.machine._versions.change_all()
        scene.driver.wake_waiting()
        await trio.sleep(0.1)
        assert len(looks) == 1


async def test_a_deadline_that_moves_is_kept_whichever_way_it_moves(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        machine, woken = scene.driver.machine, list[float]()
        assert machine is not None
        began, due = trio.current_time(), [4.0]

        def wake(now: float) -> list[Output]:
            woken.append(round(now - began, 2))
            due[0] = 100.0
            return []

        machine.wake, machine.wake_at = wake, lambda now: began + due[0]  # type: ignore[method-assign]
        scene.driver.wake_waiting()
        for at, then in ((1.0, 6.0), (2.0, 3.0), (5.0, 7.0)):
            await trio.sleep_until(began + at)
            due[0] = then
            scene.driver.wake_waiting()
        await trio.sleep_until(began + 9.0)
        assert woken == [3.0, 7.0]


async def test_all_moves_of_a_large_swarm_begin(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        tenure = scene.driver.tenure
        assert tenure is not None
        posts = [post_name(f"p{i}", 0) for i in range(1000)]
        scene.driver._carry_out(tenure, [SendMove(post, START, commit=True) for post in posts])
        await trio.sleep(0.1)
        assert sorted(move.peer for move in scene.orders.moves) == sorted(posts)


async def test_a_report_behind_much_else_on_a_full_line_is_waited_for_longer(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        sending = [True]
        scene.driver._sends = lambda peer: sending[0] and peer == OTHER.peer_id.text
        await trio.sleep(26.0)
        assert scene.driver.machine is not None
        assert [m.peer for m in scene.driver.machine.members()] == [POST]
        await trio.sleep(8.0)
        assert scene.driver.machine.members() == [], "not for ever"
        scene.driver.heard[POST] = trio.current_time()
        scene.feed(hello(POST))
        sending[0] = False
        await trio.sleep(16.0)
        assert POST not in scene.driver.heard


async def test_members_that_owe_an_answer_or_a_report_are_asked_for_a_sign_of_life(autojump_clock: MockClock) -> None:
    async with begun() as scene:
        asked = list[float]()
        scene.driver._doubt = lambda peer: asked.append(trio.current_time())
        await trio.sleep(3.0)
        scene.driver.still_heard(POST)
        assert asked == []
        scene.feed(TrainerReport("t", 0, (1,), ()))
        scene.feed(TrainerReport("t", 0, (), (Done(1, [POST]),)))
        ordered = trio.current_time()
        await trio.sleep(3.0)
        assert asked, "it does not say that it averaged"
        assert asked[0] - ordered <= 2.5
        prepare, reign = scene.orders.prepares[0], scene.orders.reign
        assert reign is not None
        reign.tell(PrepareEnded(POST, prepare.attempt, True))
        await trio.sleep(0.1)
        (move,) = scene.orders.moves
        reign.tell(MoveEnded(POST, move.target))
        scene.driver.still_heard(POST)
        asked.clear()
        await trio.sleep(3.0)
        assert asked == []
        await trio.sleep(1.5)
        assert asked, "it does not report"
