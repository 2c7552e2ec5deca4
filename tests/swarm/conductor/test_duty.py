"""The conductor's duty: taken on in turn and in a later term, given up to a better claim and to nobody's word alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Refused
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.progress import StageProgress
from peerd.messages.swarm import Conducts, MemberInfo, Position
from peerd.swarm.batch.counted_work import CountedWork
from peerd.swarm.directory import StagePeer
from peerd.swarm.positions.phases import Phase
from peerd.swarm.posts import post_name
from tests.worlds.machines.conducting import hello
from tests.worlds.machines.conductor_scene import OTHER, OWN, THIRD, Scene, running


async def test_the_duty_is_taken_on_only_in_turn_and_while_this_peer_runs(autojump_clock: MockClock) -> None:
    scene = Scene()
    with pytest.raises(Refused):
        scene.duty.act(0, OWN.peer_id)
    async with trio.open_nursery() as nursery:
        scene.start(nursery)
        scene.following.note_stage0(OTHER.peer_id, 0.5, False)
        with pytest.raises(Refused, match=OTHER.peer_id.short):
            scene.duty.act(0, OWN.peer_id)
        scene.following.suspect(OTHER.peer_id)
        tenure = scene.duty.act(4, OWN.peer_id)
        assert (tenure.term, scene.duty.term) == (5, 5)
        assert scene.duty.act(0, OWN.peer_id) is tenure
        nursery.cancel_scope.cancel()


async def test_who_is_conducted_by_another_conducts_only_for_one_that_goes_on_asking(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.following.hand_to(OTHER.peer_id)
        for _ in range(12):
            for asker in (THIRD.peer_id, OWN.peer_id):
                with pytest.raises(Refused, match=f"does not conduct, {OTHER.peer_id.short} does"):
                    scene.duty.act(0, asker)
            await trio.sleep(0.6)
        await trio.sleep(12.1)
        with pytest.raises(Refused):
            scene.duty.act(0, THIRD.peer_id)  # another day
        await trio.sleep(8.0)
        with pytest.raises(Refused):
            scene.duty.act(0, OWN.peer_id)
        assert scene.duty.act(0, THIRD.peer_id).term == 1, "it does not reach the other one"


async def test_who_is_conducted_by_another_conducts_at_once_when_that_one_is_gone(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.following.hand_to(OTHER.peer_id)
        with pytest.raises(Refused):
            scene.duty.act(0, THIRD.peer_id)
        scene.following.suspect(OTHER.peer_id)
        assert scene.duty.act(0, THIRD.peer_id).term == 1


async def test_members_may_fetch_a_kept_checkpoint_for_as_long_as_its_size_asks(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.duty.state_bytes = 3_000_000_000
        config = scene.duty.act(0, OWN.peer_id).machine.search._config
        assert config.fetch_s == 2 * 3_000_000_000 / 125_000


async def test_a_term_that_is_named_makes_it_look_soon_and_changes_nothing(autojump_clock: MockClock) -> None:
    async with running() as scene:
        tenure = scene.duty.act(0, OWN.peer_id)
        assert tenure.machine.phase is Phase.GATHERING
        scene.feed(hello(post_name(OWN.peer_id.text, 0)))
        await trio.sleep(4.0)
        assert tenure.machine.phase is Phase.OPEN
        before = len(scene.others.looks)
        await trio.sleep(0.1)
        assert scene.duty.act(9, OWN.peer_id) is tenure
        scene.duty.hear_of_term(9)
        await trio.sleep(0.6)
        assert len(scene.others.looks) == before + 1
        assert scene.duty.term == 1


async def test_a_peer_that_conducts_with_the_better_claim_gets_the_duty(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.duty.act(0, OWN.peer_id)
        post = post_name(THIRD.peer_id.text, 0)
        scene.driver.heard[post] = trio.current_time()
        scene.feed(hello(post, since=1.0))
        scene.feed(hello(post_name(OWN.peer_id.text, 0), since=1.0))
        scene.others.terms = {OTHER.peer_id: 1}
        await trio.sleep(3.0)
        assert scene.driver.tenure is not None
        assert scene.others.ours[-1].followers == {THIRD.peer_id.text}, "those who report, and not who only should"
        scene.others.terms = {OTHER.peer_id: 2}
        await trio.sleep(3.0)
        assert scene.driver.tenure is None
        assert scene.following.conductor == OTHER.peer_id
        assert scene.notes[-1].endswith("conducts, too, and has the better claim")
        scene.duty.hear_of_term(2)
        assert scene.duty.term == 2


async def test_a_peer_that_only_dials_gives_the_duty_to_one_that_can_be_dialed(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.duty.act(0, OWN.peer_id)
        scene.directory.only_dials = True
        scene.following.note_stage0(OTHER.peer_id, 5.0, False)
        await trio.sleep(3.0)
        assert scene.driver.tenure is None
        assert scene.following.conductor is None


async def test_members_that_are_announced_are_waited_for_unless_nobody_reaches_them(autojump_clock: MockClock) -> None:
    for gone in (False, True):
        async with running(expect_s=6.0) as scene:
            scene.following.members = [MemberInfo(OTHER.peer_id.text, 0, [], True, since=1.0)]
            scene.unreachable = {OTHER.peer_id} if gone else set()
            machine = scene.duty.act(0, OWN.peer_id).machine
            scene.feed(hello(post_name(OWN.peer_id.text, 0)))
            await trio.sleep(2.0)
            assert (machine.phase is Phase.OPEN) is gone


async def test_a_new_conductor_waits_for_those_that_were_listed_last_and_that_answer(autojump_clock: MockClock) -> None:
    struck_off, came = Keypair.from_seed(b"struck off".ljust(32, b".")), Keypair.from_seed(b"came".ljust(32, b"."))
    async with running() as scene:
        listed = [MemberInfo(OTHER.peer_id.text, 0, [], ready=True, since=50.0)]
        scene.following.members = listed
        for key, since in ((struck_off, 40.0), (came, 60.0)):
            progress = StageProgress(0, since, 3, 0, 0.0, "cpu", "", "", [])
            scene.directory.announced[key.peer_id, 0] = StagePeer(key.peer_id, progress)
        assert scene.following.alive() == {(OTHER.peer_id, 0), (came.peer_id, 0)}
        scene.others.silent = {OTHER.peer_id}  # its link stands, and it does not answer
        scene.following.joined_since = 1.0
        tenure = scene.duty.act(0, OWN.peer_id)
        scene.feed(hello(post_name(OWN.peer_id.text, 0)))
        scene.feed(hello(post_name(came.peer_id.text, 0)))
        await trio.sleep(1.5)
        assert tenure.machine.phase is Phase.OPEN, "it waits neither for the one that is gone nor for the silent one"


async def test_what_a_keeper_has_that_can_be_reached_counts(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.directory.kept = {OTHER.peer_id: [Position(8, b"kept")], THIRD.peer_id: [Position(9, b"kept")]}
        scene.others.silent = {THIRD.peer_id}
        search = scene.duty.act(0, OWN.peer_id).machine.search
        await trio.sleep(3.0)
        assert (search.announced_step, search.kept_step) == (9, 0), "anybody may say that it keeps something"

    async with running() as scene:
        scene.directory.kept = {OTHER.peer_id: [Position(8, b"kept")], THIRD.peer_id: [Position(9, b"kept")]}
        scene.others.silent = {THIRD.peer_id}
        scene.proofs.trust([OTHER.peer_id.text, THIRD.peer_id.text])
        search = scene.duty.act(0, OWN.peer_id).machine.search
        await trio.sleep(3.0)
        assert (search.announced_step, search.kept_step) == (9, 8)


def record(keypair: Keypair, stage: int, step: int = 9, client: bool = False) -> tuple[Any, StagePeer]:
    progress = StageProgress(stage, 1.0, step, 0, 1.0, "cpu", "", "", [], client=client)
    return (keypair.peer_id, stage), StagePeer(keypair.peer_id, progress)


SURVIVOR, DEAD = record(THIRD, 1), record(OTHER, 0)


@pytest.mark.parametrize(
    ("records", "silent", "soon"),
    [
        pytest.param([SURVIVOR, DEAD], True, True, id="its peer does not answer"),
        pytest.param([SURVIVOR], True, True, id="its records have expired"),
        pytest.param([SURVIVOR, DEAD], False, False, id="its peer is there and has not found us yet"),
        pytest.param([SURVIVOR, record(OTHER, 0, client=True)], True, False, id="its peer can only dial"),
        pytest.param([], True, False, id="no record could be read"),
    ],
)
async def test_a_state_is_forsaken_soon_only_where_nobody_who_had_it_is_there(
    autojump_clock: MockClock, records: list[Any], silent: bool, soon: bool
) -> None:
    async with running(stages=2, first_save=4, forsake_s=3.0, forsake_unseen_s=20.0, forsake_most_s=600.0) as scene:
        scene.directory.announced = dict(records)
        scene.others.silent = scene.unreachable = {OTHER.peer_id} if silent else set()
        machine = scene.duty.act(0, OWN.peer_id).machine
        scene.feed(hello(post_name(OWN.peer_id.text, 0)))
        scene.feed(replace(hello(post_name(THIRD.peer_id.text, 1), Position(9, b"here"), stage=1), digest=b"mean"))
        await trio.sleep(12.0)
        assert (machine.phase is not Phase.GATHERING) is soon
        await trio.sleep(20.0)
        assert machine.phase is not Phase.GATHERING


async def test_strangers_with_newer_claims_leave_honest_members_a_turn_to_show_proofs(
    autojump_clock: MockClock,
) -> None:
    """They claim more positions than are asked for in many looks, and answer nothing."""
    strangers = [Keypair.from_seed(bytes([n, 1]) * 16).peer_id for n in range(30)]
    asked = list[Any]()
    async with running(stages=2, first_save=4) as scene:

        async def learn(peer: Any, position: Position, known: Any = None) -> bool:
            asked.append((peer, position))
            await trio.sleep(5.0)
            return False

        scene.proofs.learn = learn  # type: ignore[method-assign]
        scene.proofs.evidence.stepped(Position(3, b"real"), {post_name(OTHER.peer_id.text, 1): 1})
        scene.duty.act(0, OWN.peer_id)
        for n, stranger in enumerate(strangers):
            claims = tuple(Position(1000 * (n + 1) + k, b"made up") for k in range(64))
            scene.feed(hello(post_name(stranger.text, n % 2), claims[0], stage=n % 2, saved=claims))
        honest = Position(8, b"signed")
        scene.feed(hello(post_name(THIRD.peer_id.text, 1), stage=1, saved=(honest,)))
        await trio.sleep(20.0)
        assert (THIRD.peer_id, honest) in asked
        looks = scene.others.looks
        assert max(after - before for before, after in pairwise(looks)) < 8.0


async def test_rivals_that_show_no_proof_do_not_keep_it_from_weighing_the_others(autojump_clock: MockClock) -> None:
    silent = [Keypair.from_seed(bytes([n, 2]) * 16).peer_id for n in range(20)]
    async with running() as scene:

        async def conducting() -> dict[Any, Conducts]:
            await trio.lowlevel.checkpoint()
            made_up = {peer: Conducts(1, Position(100 + n, b"made up")) for n, peer in enumerate(silent)}
            return made_up | {OTHER.peer_id: Conducts(2)}

        async def learn(peer: Any, position: Position, known: Any = None) -> bool:
            await trio.sleep(5.0)
            return False

        scene.others.conducting = conducting  # type: ignore[method-assign]
        scene.proofs.learn = learn  # type: ignore[method-assign]
        scene.proofs.evidence.stepped(Position(3, b"real"), {post_name(THIRD.peer_id.text, 0): 0})
        scene.duty.act(0, OWN.peer_id)
        await trio.sleep(15.0)
        assert scene.driver.tenure is None
        assert scene.following.conductor == OTHER.peer_id


class Counts:
    """In place of `CountedRecord`: notes from whom each tenure's counts go on, and whether it lasts."""

    def __init__(self) -> None:
        self.tenures: list[tuple[CountedWork, list[PeerId], Callable[[], bool]]] = []

    async def keep(self, work: CountedWork, before: Iterable[PeerId], lasts: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        self.tenures.append((work, list(before), lasts))


async def test_each_tenure_goes_on_from_the_counts_of_the_conductors_before_it(autojump_clock: MockClock) -> None:
    async with running() as scene:
        scene.duty.counts = counts = Counts()  # type: ignore[assignment]
        for peer in (OTHER.peer_id, THIRD.peer_id, OTHER.peer_id):
            scene.following.followed[peer] = None
        tenure = scene.duty.act(0, OWN.peer_id)
        await trio.sleep(5)
        assert scene.duty.act(0, OWN.peer_id) is tenure
        [(work, before, lasts)] = counts.tenures
        assert work is tenure.machine.counted_work
        assert before == [OTHER.peer_id, THIRD.peer_id, OWN.peer_id]
        assert lasts()
        scene.driver.end()
        assert not lasts()
        again = scene.duty.act(0, OWN.peer_id)
        await trio.sleep(1)
        assert counts.tenures[1][0] is again.machine.counted_work
        assert not lasts(), "another tenure of the same peer"
