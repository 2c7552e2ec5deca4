"""A trainer's ways through the stages: whom a microbatch is sent over, what is done again, when it is tried anew."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Overloaded, Refused, TooSlow, Unreachable
from peerd.messages.handover import Broken, PassAnswer, Ticket
from peerd.messages.proof import grant, is_ticket_of
from peerd.messages.swarm import Grant, GrantStatement, Receipt, Seqs
from peerd.pipeline.direct import DirectPipeline
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.next_stage import PASS
from peerd.pipeline.stage_client import TrainerCredentials
from peerd.rpc.rpc import Answer
from peerd.run.runfile import RunFile
from peerd.swarm.batch.trainer_ledger import Holding
from tests.kit.runs import changed
from tests.worlds.machines.handing import (
    GRADIENT,
    MARK,
    NAMES,
    OWN,
    RUN,
    SAMPLES,
    SEQ,
    STAGES,
    STEP,
    TOKENS,
    TRAINER,
    Asked,
    Peers,
    Ways,
    done,
    frame,
    hop,
    members,
    peer,
)
from tests.worlds.simulation.clock import SimClock

ALL = ("a0", "b0", "a1", "b1", "a2", "b2")


class Training:
    """A trainer, and the stages' peers as it meets them."""

    def __init__(self, *names: str, run: RunFile = RUN) -> None:
        self.peers = Peers()
        self.granted: Callable[[int], Grant | None] = lambda seq: None
        papers = TrainerCredentials(OWN, lambda seq: self.granted(seq), TRAINER.sign)
        self.pipeline = DirectPipeline(run, self.peers, SimClock(1, "t"), Ways(), papers)  # type: ignore[arg-type]
        self.pipeline.update(members(*(names or ALL)))
        self.load = Microbatch(frame(SAMPLES, TOKENS), frame(SAMPLES, TOKENS))

    async def train(self, seq: int = SEQ) -> list[str]:
        return names(await self.pipeline.train(STEP, seq, self.load))

    async def repeat(self, stage: int) -> str:
        return NAMES[(await self.pipeline.repeat(STEP, SEQ, stage, self.load)).peer]

    @property
    def tickets(self) -> list[Ticket]:
        return [one.body.ticket for one in self.peers.asked]

    def routes(self) -> list[tuple[int, int, list[str]]]:
        """The stages that were to be done, and the peers, of each attempt."""
        return [(one.low, one.high, [NAMES[name] for name in one.route]) for one in self.tickets]

    def held_by(self, *holders: str) -> None:
        """As if a microbatch had gone over these."""
        self.load.holdings = {int(n[-1]): Holding(peer(n), None) for n in holders}


def names(holdings: list[Holding]) -> list[str]:
    return [NAMES[holding.peer] for holding in holdings]


def broken(stage: int, reason: str = "it is gone") -> Any:
    return lambda asked: Answer(PassAnswer(broken=Broken(stage, "", reason)))


async def test_a_microbatch_goes_over_one_peer_of_each_stage_by_a_signed_ticket(autojump_clock: MockClock) -> None:
    one = Training()
    holders = await one.train()
    (asked,) = one.peers.asked
    shown = asked.body.ticket
    assert (asked.method, asked.name, asked.body.stage) == (PASS, holders[0], 0)
    assert [NAMES[name] for name in shown.route] == holders
    assert (shown.step, shown.seq, shown.attempt, shown.low, shown.high) == (STEP, SEQ, 0, 0, STAGES - 1)
    assert is_ticket_of(TRAINER.peer_id, MARK, shown)
    assert list(asked.frames) == [one.load.tokens, one.load.targets]
    assert (one.load.loss_sum, one.pipeline.retries) == (0.5, 0)
    assert not one.pipeline.relaying._open


async def test_all_peers_of_a_stage_have_their_share(autojump_clock: MockClock) -> None:
    one = Training()
    count = Counter[str]()
    for seq in range(40):
        count.update(await one.train(seq))
    assert all(10 <= count[name] <= 30 for name in ALL), count


async def test_a_peer_that_leaves_while_another_stage_is_waited_for_is_not_sent_over(autojump_clock: MockClock) -> None:
    one = Training("a0", "a1", "b1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.train)
        await trio.testing.wait_all_tasks_blocked()  # stage 2 has nobody yet
        one.pipeline.update(members("b0", "a1", "b1"))
        await trio.testing.wait_all_tasks_blocked()
        one.pipeline.update(members("b0", "b1", "a2"))
    assert one.routes() == [(0, STAGES - 1, ["b0", "b1", "a2"])]


# --- ways that fail ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [Unreachable("gone"), Refused("no"), TooSlow("nothing came")])
async def test_another_first_peer_is_asked_and_the_rest_of_the_way_stays(autojump_clock: MockClock, error: Any) -> None:
    one = Training()
    bad = {"a0": lambda asked: error}
    one.peers.doing = bad
    for seq in range(4):
        assert (await one.train(seq))[0] == "b0"
    first, second = one.routes()[:2]
    if first[2][0] == "a0":
        assert first[2][1:] == second[2][1:]
    assert [one.attempt for one in one.tickets if one.seq == 0] == list(
        range(len([t for t in one.tickets if t.seq == 0]))
    )


def over(shown: Ticket, stage: int) -> str:
    return NAMES[shown.peer_of(stage) or ""]


async def test_a_way_that_broke_is_tried_with_another_peer_there(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody is sent over the two for a while."""
    caplog.set_level(logging.INFO)
    one = Training("a0", "a1", "a2", "b2")
    one.peers.doing = {"a0": lambda asked: (broken(2) if over(asked.body.ticket, 2) == "a2" else done)(asked)}
    for seq in range(20):
        assert await one.train(seq) == ["a0", "a1", "b2"]
    assert sum(over(shown, 2) == "a2" for shown in one.tickets) == 1
    assert f"from …{peer('a1')[-8:]} to …{peer('a2')[-8:]} failed: it is gone" in caplog.text
    await trio.sleep(31)
    for seq in range(20):
        await one.train(seq)
    assert sum(over(shown, 2) == "a2" for shown in one.tickets) == 2


async def test_two_that_found_no_way_to_each_other_are_left_apart_for_a_while(autojump_clock: MockClock) -> None:
    def first(asked: Asked) -> Answer[PassAnswer]:
        took = [hop("a0", asked.body, instead_of=peer("a1")), hop("b1", asked.body)]
        return done(asked, *took) if over(asked.body.ticket, 1) == "a1" else done(asked)

    one = Training("a0", "a1", "b1", "a2")
    assert {(await one.train(seq))[1] for seq in range(4)} == {"a1", "b1"}  # both are as fast
    del one.peers.asked[:]
    one.peers.doing = {"a0": first}
    for seq in range(20):
        assert (await one.train(seq))[1] == "b1"
    assert sum(over(shown, 1) == "a1" for shown in one.tickets) == 1
    assert one.pipeline.retries == 0


async def test_what_is_said_of_a_broken_way_does_nothing_to_a_terminal(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = Training("a0", "b0", "a1", "a2")
    one.peers.doing = {"a0": broken(1, "\x1b[2J\r\n\x07gone")}
    for seq in range(3):
        await one.train(seq)
    assert "?[2J???gone" in caplog.text
    assert not any(char in line for line in caplog.messages for char in "\x1b\r\x07")


async def test_who_says_again_and_again_that_ways_break_is_avoided_itself(autojump_clock: MockClock) -> None:
    """Of any stage that it claims: an honest one is not long without its microbatch."""
    for stage in (1, 2):
        for liar in ("a0", "b0"):
            one = Training()
            one.peers.doing = {liar: broken(stage)}
            for seq in range(3):
                with trio.fail_after(5):
                    holders = await one.train(seq)
                assert holders[0] != liar
            assert len(one.peers.asked) <= 3 * 4


async def test_who_in_the_middle_says_that_ways_break_is_avoided_itself(autojump_clock: MockClock) -> None:
    def first(asked: Asked) -> Answer[PassAnswer]:
        return broken(2)(asked) if NAMES[asked.body.ticket.peer_of(1)] == "a1" else done(asked)

    for _ in range(4):
        one = Training()
        one.peers.doing = {"a0": first, "b0": first}
        with trio.fail_after(5):
            assert (await one.train())[1] == "b1"


def _holders_receipt(asked: Asked) -> Answer[PassAnswer]:
    mine = [hop(name, asked.body) for name in ("a0", "a1", "a2")]
    return done(asked, *mine[:2], msgspec.structs.replace(mine[2], receipt=mine[1].receipt))


@pytest.mark.parametrize(
    "bad",
    [
        broken(0),
        broken(3),
        broken(1023),
        lambda asked: Answer(PassAnswer()),
        lambda asked: Answer(PassAnswer([hop("a0", asked.body)])),
        lambda asked: Answer(done(asked).body, (GRADIENT,)),
        lambda asked: done(asked, hop("a0", asked.body, receipt=Receipt(3, b"x" * 64))),
        lambda asked: done(asked, hop("a0", asked.body, peer="no peer at all")),
        lambda asked: done(asked, hop("a0", asked.body, peer=peer("a0") + " ")),
        lambda asked: done(asked, hop("a0", msgspec.structs.replace(asked.body, trainer=peer("stranger")))),
        _holders_receipt,
    ],
)
async def test_an_answer_that_is_not_in_order_does_not_count_and_its_giver_rests(
    autojump_clock: MockClock, bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = Training("a0", "b0", "a1", "a2")
    one.peers.doing = {"a0": bad}
    for seq in range(3):
        assert await one.train(seq) == ["b0", "a1", "a2"]
    assert one.peers.names.count("a0") == 1
    assert f"failed at …{peer('a0')[-8:]}" in caplog.text


async def test_a_first_peer_without_room_is_not_asked_over_and_over(autojump_clock: MockClock) -> None:
    one, since = Training(), trio.current_time()
    one.peers.doing = {"a0": lambda asked: Overloaded("full", 0.08)}
    for seq in range(4):
        assert (await one.train(seq))[0] == "b0"
    one.peers.doing["b0"] = one.peers.doing["a0"]
    del one.peers.asked[:]
    with trio.move_on_after(10):
        await one.train()
    assert trio.current_time() - since > 9
    assert len(one.peers.asked) < 2 * 10 / 0.08 + 2
    del one.peers.doing["a0"]
    assert (await one.train())[0] == "a0"
    assert one.pipeline.retries == 0  # it has not failed


async def test_a_peer_that_follows_another_conductor_is_asked_again_soon_with_the_newest_grant(
    autojump_clock: MockClock,
) -> None:
    """A change of conductor costs moments, not the rest that failures bring."""
    one, began = Training("a0", "a1", "a2"), trio.current_time()

    def newest(seq: int) -> Grant:
        term = 1 if trio.current_time() < began + 2.0 else 2
        return grant(TRAINER.sign, GrantStatement(MARK, term, STEP, OWN, Seqs.of([seq])))

    def until_the_second_term(asked: Asked) -> Any:
        return done(asked) if asked.body.grant.term == 2 else Overloaded("the grant is not of a conductor", 0.3)

    one.granted, one.peers.doing = newest, {"a0": until_the_second_term}
    assert await one.train() == ["a0", "a1", "a2"]
    assert trio.current_time() - began < 2.5
    assert [asked.body.grant.term for asked in one.peers.asked] == [1] * 7 + [2]


async def test_a_way_that_stays_broken_is_tried_ever_more_rarely_until_the_microbatch_is_dropped(
    autojump_clock: MockClock,
) -> None:
    one = Training()
    one.peers.doing = {"a0": broken(1), "b0": broken(1)}
    with trio.move_on_after(100) as dropped:
        await one.train()
    assert dropped.cancelled_caught
    assert 30 < len(one.peers.asked) < 200
    assert [shown.attempt for shown in one.tickets] == list(range(len(one.tickets)))
    assert not one.pipeline.relaying._open
    del one.peers.doing["a0"], one.peers.doing["b0"]
    assert len(await one.train()) == STAGES


async def test_a_call_ends_when_its_peer_leaves(autojump_clock: MockClock) -> None:
    one, stay = Training("a0", "b0", "a1", "a2"), list[str]()
    one.peers.doing = {"a0": lambda asked: 100.0, "b0": lambda asked: 100.0}
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await trio.sleep(10)
            stay.extend(name for name in ("a0", "b0") if name not in one.peers.names)
            one.peers.doing.clear()
            one.pipeline.update(members(*stay, "a1", "a2"))

        nursery.start_soon(leave)
        with trio.fail_after(15):
            assert await one.train() == [*stay, "a1", "a2"]


async def test_nobody_in_a_stage_is_told_and_waited_for(autojump_clock: MockClock) -> None:
    one = Training("a0", "a1")
    with trio.move_on_after(10) as waiting:
        await one.train()
    assert waiting.cancelled_caught
    assert one.pipeline.waits_for == "stage 2 has no peers"
    assert one.peers.asked == []


# --- what is done again -----------------------------------------------------------------------------------------------
async def test_a_lost_stage_is_done_again_between_the_holders_beside_it(autojump_clock: MockClock) -> None:
    for stage, route in ((0, ["b0", "a1"]), (1, ["a0", "b1", "a2"]), (2, ["a1", "b2"])):
        one = Training("a0", "a1", "a2", f"b{stage}")
        one.held_by("a0", "a1", "a2")
        one.pipeline.update(members(*(f"{'b' if s == stage else 'a'}{s}" for s in range(STAGES))))
        assert await one.repeat(stage) == f"b{stage}"
        assert one.routes() == [(stage, stage, route)]
        asked = one.peers.asked[0]
        assert list(asked.frames) == ([one.load.tokens] if stage == 0 else [one.load.targets] if stage == 2 else [])
        assert [NAMES[one.load.holdings[s].peer] for s in range(STAGES)] == [
            f"{'b' if s == stage else 'a'}{s}" for s in range(STAGES)
        ]


@pytest.mark.parametrize("gone", [Unreachable("gone"), Refused("the microbatch is not kept here")])
async def test_where_the_holder_before_is_gone_its_stage_is_done_again_too(
    autojump_clock: MockClock, gone: Any
) -> None:
    one = Training("b0", "b1", "b2")
    one.held_by("a0", "a1", "a2")
    one.peers.doing = {"a0": lambda asked: gone, "a1": lambda asked: gone}
    assert await one.repeat(2) == "b2"
    assert one.routes() == [(2, 2, ["a1", "b2"]), (1, 2, ["a0", "b1", "b2"]), (0, 2, ["b0", "b1", "b2"])]
    assert [NAMES[one.load.holdings[s].peer] for s in range(STAGES)] == ["b0", "b1", "b2"]
    assert one.load.lost == set()


async def test_where_the_holder_after_is_gone_its_stage_is_done_again_too(autojump_clock: MockClock) -> None:
    one = Training("b0", "b1", "b2")
    one.held_by("a0", "a1", "a2")

    def first(asked: Asked) -> Answer[PassAnswer]:
        last = asked.body.ticket.last
        return broken(last)(asked) if NAMES[asked.body.ticket.peer_of(last)][0] == "a" else done(asked)

    one.peers.doing = {"b0": first}
    assert await one.repeat(0) == "b0"
    assert one.routes() == [(0, 0, ["b0", "a1"]), (0, 1, ["b0", "b1", "a2"]), (0, 2, ["b0", "b1", "b2"])]


async def test_holders_on_both_sides_may_be_gone(autojump_clock: MockClock) -> None:
    one = Training("b0", "b1", "b2")
    one.held_by("a0", "a1", "a2")
    one.peers.doing = {
        "a0": lambda asked: (
            broken(2)(asked) if len(asked.body.ticket.route) == 3 and asked.body.ticket.high == 1 else Refused("gone")
        ),
    }
    assert await one.repeat(1) == "b1"
    assert one.routes() == [(1, 1, ["a0", "b1", "a2"]), (1, 2, ["a0", "b1", "b2"]), (0, 2, ["b0", "b1", "b2"])]


@pytest.mark.parametrize(
    "bad", [Overloaded("full", 0.08), Overloaded("full", 1e9), "broken before", "broken beyond", "broken for ever"]
)
async def test_a_holder_that_gives_nothing_is_not_waited_for_long(autojump_clock: MockClock, bad: Any) -> None:
    one = Training("b0", "b1", "b2")
    one.held_by("a0", "a1", "a2")
    said = {"broken before": broken(0), "broken beyond": broken(3), "broken for ever": broken(1)}
    one.peers.doing = {"a0": said.get(bad, lambda asked: bad)}
    with trio.fail_after(15):
        assert await one.repeat(1) == "b1"
    assert one.routes()[-1][2][0] == "b0"
    assert len(one.peers.asked) < 60


async def test_stages_that_are_lost_together_are_done_again_in_one_go(autojump_clock: MockClock) -> None:
    """They were lost while another one was being done."""
    one = Training("b0", "b1", "b2")
    one.held_by("a0", "a1", "a2")
    one.peers.doing = {"b0": lambda asked: 5.0}
    found = dict[int, str]()

    async def repeat(stage: int) -> None:
        found[stage] = await one.repeat(stage)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repeat, 0)
        await trio.sleep(1)
        nursery.start_soon(repeat, 1)
        nursery.start_soon(repeat, 2)
    assert found == {0: "b0", 1: "b1", 2: "b2"}
    assert one.routes() == [(0, 0, ["b0", "a1"]), (1, 2, ["b0", "b1", "b2"])]
    assert one.load.lost == set()


async def test_a_repeat_that_is_dropped_lets_the_next_one_go_on(autojump_clock: MockClock) -> None:
    one = Training("b0", "b1", "b2")
    one.held_by("a0", "a1", "a2")
    one.peers.doing = {"a0": lambda asked: 100.0}
    with trio.move_on_after(5) as dropped:
        await one.repeat(1)
    assert dropped.cancelled_caught
    del one.peers.doing["a0"]
    assert await one.repeat(2) == "b2"
    assert one.routes()[-1] == (1, 2, ["a0", "b1", "b2"])


async def test_what_a_hop_says_of_others_changes_the_choice_of_peers_alone(autojump_clock: MockClock) -> None:
    """Nor that, where it says it of peers that its way does not lead over."""
    one = Training("a0", "a1", "a2", "b2")

    def first(asked: Asked) -> Answer[PassAnswer]:
        return done(
            asked, *(hop(n, asked.body, instead_of=peer("stranger"), way="trainer") for n in ("a0", "a1", "a2"))
        )

    one.peers.doing = {"a0": first}
    for seq in range(10):
        await one.train(seq)
    assert not one.pipeline._cuts
    assert one.pipeline.retries == 0


async def test_one_stage_is_a_route_of_one_peer_which_may_be_full_or_refuse_before_it_answers(
    autojump_clock: MockClock,
) -> None:
    run = changed(RUN, pipeline={"stages": 1})
    one = Training("a0", run=run)
    answers = iter([Overloaded("full", 0.1), Refused("this stage is averaging")])
    usual = one.peers.doing.get("a0", done)
    one.peers.doing["a0"] = lambda asked: next(answers, None) or usual(asked)
    assert await one.train() == ["a0"]
    assert one.load.loss_sum == 0.5
    assert one.routes() == [(0, 0, ["a0"])] * 3
    assert await one.repeat(0) == "a0"
