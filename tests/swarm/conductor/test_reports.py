"""Reports to the conductor: each is answered for its sender alone, waits while there are no news, or is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Refused
from peerd.core.keys import Keypair
from peerd.core.limits import POSTS
from peerd.messages.proof import is_granted
from peerd.messages.swarm import Done, Leave, LineInfo, MemberAnswer, MemberSync, Seqs, WhoConducts
from peerd.rpc.rpc import Incoming
from peerd.swarm.posts import post_name
from peerd.swarm.roster import START
from tests.worlds.machines.conductor_scene import OTHER, OWN, RUN, THIRD, Scene, member, running, trainer


async def test_what_is_meant_for_another_run_is_refused(autojump_clock: MockClock) -> None:
    async with running() as scene:
        other = b"o" * 16
        for report in (
            lambda: scene.reports._member(member(OTHER, run=other)),
            lambda: scene.reports._trainer(trainer(OTHER, run=other)),
            lambda: scene.reports._leave(Incoming(OTHER.peer_id, Leave(other, 0), (), 60.0)),
            lambda: scene.reports._who(Incoming(OTHER.peer_id, WhoConducts(other), (), 60.0)),
        ):
            with pytest.raises(Refused):
                await report()
        assert scene.driver.tenure is None


async def test_one_identity_serves_few_stages_and_none_of_those_that_are_not(autojump_clock: MockClock) -> None:
    async with running(stages=6) as scene:
        with pytest.raises(Refused, match="no stage 6"):
            await scene.reports._member(member(OTHER, stage=6))
        for stage in range(POSTS):
            await scene.reports._member(member(OTHER, stage=stage))
        for _ in range(2):
            with pytest.raises(Refused, match=f"one peer serves {POSTS} stages at most"):
                await scene.reports._member(member(OTHER, stage=POSTS))
        await scene.reports._member(member(OTHER, stage=0))  # what it has, it keeps
        await scene.reports._leave(Incoming(OTHER.peer_id, Leave(RUN, 0), (), 60.0))
        await scene.reports._member(member(OTHER, stage=POSTS))
        await scene.reports._member(member(THIRD, stage=0))
        assert len(scene.driver.heard) == POSTS + 1


async def test_one_identity_helps_one_stage_beside_those_that_it_serves(autojump_clock: MockClock) -> None:
    async with running(stages=6) as scene:
        for stage in range(POSTS):
            await scene.reports._member(member(OTHER, stage=stage))
        for stage in range(POSTS, 6):  # each ends the help before
            await scene.reports._member(helper(OTHER, stage))
            assert served_and_helped(scene) == ([0, 1], [stage])
        with pytest.raises(Refused, match=f"one peer serves {POSTS} stages at most"):
            await scene.reports._member(member(OTHER, stage=5))  # what it helped it does not serve besides
        await scene.reports._member(helper(OTHER, 0))  # a post that served helps now, and is no member any more
        assert served_and_helped(scene) == ([1], [0])
        await scene.reports._member(member(OTHER, stage=0, line=None))
        assert served_and_helped(scene) == ([0, 1], [])


def helper(by: Keypair, stage: int) -> Incoming[MemberSync]:
    return member(by, stage=stage, session=stage, held=None, line=LineInfo("aux", 1e6, 1e6))


def served_and_helped(scene: Scene) -> tuple[list[int], list[int]]:
    """The stages that the conductor lists as served and as helped, by anybody."""
    assert scene.driver.machine is not None
    roster = scene.driver.machine.roster
    return [entry.stage for _, entry in sorted(roster.entries.items())], [m.stage for m in roster.lines.helpers()]


async def test_only_a_peer_that_conducts_says_so(autojump_clock: MockClock) -> None:
    async with running() as scene:
        ask = Incoming(OTHER.peer_id, WhoConducts(RUN), (), 60.0)
        with pytest.raises(Refused):
            await scene.reports._who(ask)
        await scene.reports._member(member(OTHER, term=2))
        assert (await scene.reports._who(ask)).body.term == 3


async def test_a_member_is_asked_for_all_that_a_new_conductor_cannot_know(autojump_clock: MockClock) -> None:
    async with running() as scene:
        short = (await scene.reports._member(member(OTHER, held=None))).body
        assert short.resend
        whole = (await scene.reports._member(member(OTHER))).body
        assert not whole.resend
        assert whole.members is not None
        assert [(m.peer, m.stage) for m in whole.members.changed] == [(OTHER.peer_id.text, 0)]
        assert (await scene.reports._member(member(OTHER, held=None, session=8))).body.resend
        assert scene.following.duty() == OTHER.peer_id or OTHER.peer_id in scene.following.order()


async def test_a_report_without_news_waits_for_them(autojump_clock: MockClock) -> None:
    async with running() as scene:
        first = (await scene.reports._member(member(OTHER))).body
        answers: list[tuple[float, MemberAnswer]] = []

        async def report() -> None:
            waiting = member(OTHER, held=None, seen=first.version, wait_s=30.0)
            answers.append((trio.current_time(), (await scene.reports._member(waiting)).body))

        scene.driver.nursery.start_soon(report)
        await trio.sleep(0.5)
        assert answers == []
        await trio.sleep(1.0)
        ((_, told),) = answers
        assert told.current == START, "the members are gathered"


async def test_a_report_that_waited_is_refused_when_the_duty_has_gone_on(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await scene.reports._member(member(OTHER))
        await trio.sleep(2.0)
        assert scene.driver.machine is not None
        seen = scene.driver.machine.members_version

        async def report() -> None:
            with pytest.raises(Refused, match="any more"):
                await scene.reports._member(member(OTHER, held=None, seen=seen, wait_s=30.0))

        async with trio.open_nursery() as reporting:
            reporting.start_soon(report)
            await trio.sleep(0.5)
            scene.driver.end()


async def test_a_helper_is_known_by_its_line_and_needs_no_token(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.rpc.gate = SimpleNamespace(allows=lambda peer, method: False)
        with pytest.raises(Refused, match="token"):
            await scene.reports._member(member(OTHER))
        told = (await scene.reports._member(member(THIRD, line=LineInfo("aux", 1e6, 1e6)))).body
        assert not told.resend
        assert told.members is not None
        assert [(m.peer, m.ready) for m in told.members.changed] == [(THIRD.peer_id.text, False)]


async def test_a_trainer_gets_its_microbatches_with_a_grant(autojump_clock: MockClock) -> None:
    async with running(microbatches=2) as scene:
        await scene.reports._member(member(OTHER))
        await trio.sleep(1.5)
        told = (await scene.reports._trainer(trainer(THIRD, open=Seqs.of([4, 5, 6])))).body
        assert (list(told.admitted), told.taken, told.step) == ([4, 5], True, 0)
        assert told.grant is not None
        assert is_granted(OWN.peer_id, RUN, THIRD.peer_id.text, told.grant)
        done = [Done(4, [OTHER.peer_id.text]), Done(5, [OTHER.peer_id.text])]
        await scene.reports._trainer(trainer(THIRD, done=done))
        assert [order.peer for order in scene.orders.prepares] == [post_name(OTHER.peer_id.text, 0)]


async def test_a_peer_that_leaves_is_gone_at_once(autojump_clock: MockClock) -> None:
    async with running() as scene:
        await scene.reports._member(member(OTHER))
        assert scene.driver.machine is not None
        await scene.reports._leave(Incoming(THIRD.peer_id, Leave(RUN, 0), (), 60.0))
        assert len(scene.driver.machine.members()) == 1
        await scene.reports._leave(Incoming(OTHER.peer_id, Leave(RUN, 0), (), 60.0))
        assert scene.driver.machine.members() == []
