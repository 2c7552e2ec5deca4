"""A hop's calls to the stage after it: who is asked, who takes another's place, what an answer has to have."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, ProtocolViolation, Refused, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.messages.handover import Broken, PassAnswer, PassRequest, Ticket
from peerd.messages.swarm import Receipt
from peerd.pipeline.next_stage import PASS, PASS_TIMEOUT_S, RELAY, HandOnResult, NextStage
from peerd.rpc.rpc import Answer
from tests.worlds.machines.handing import (
    GRADIENT,
    MARK,
    OWN,
    RUN,
    SAMPLES,
    TOKENS,
    WIDTH,
    Asked,
    Peers,
    Ways,
    done,
    frame,
    hop,
    members,
    peer,
    ticket,
)
from tests.worlds.simulation.clock import SimClock

WHOLE = ticket(0, 2, 0, "a0", "a1", "a2")
LOST = ticket(0, 0, 0, "a0", "a1")  # stage 0 is to be done again: a1 keeps its gradient


class Hopping:
    """A peer of stage 0 that hands on to those of stage 1."""

    def __init__(self, *names: str) -> None:
        self.peers, self.ways = Peers(), Ways()
        self.next = NextStage(RUN, 0, self.peers, SimClock(1, "t"), self.ways, lambda peer: "direct")  # type: ignore[arg-type]
        self.next.peers.update(members(*names))

    async def hand_on(self, shown: Ticket = WHOLE, within_s: float = PASS_TIMEOUT_S) -> HandOnResult:
        frames: Sequence[TensorFrame] = [frame(SAMPLES, TOKENS, WIDTH)] if shown.is_done_at(1) else []
        body = PassRequest(MARK, 0, OWN, shown, None)
        return await self.next.hand_on(body, frames, (SAMPLES, TOKENS), trio.current_time() + within_s)


def broken_of(onward: HandOnResult) -> Broken:
    assert onward.passed.broken is not None
    assert (onward.passed.hops, onward.gradient) == ([], None)
    return onward.passed.broken


async def test_the_tickets_peer_gets_it_and_what_it_answers_comes_back(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    onward = await one.hand_on()
    assert one.peers.names == ["a1"]
    assert (one.peers.asked[0].method, one.peers.asked[0].body.stage) == (PASS, 1)
    assert [each.peer for each in onward.passed.hops] == [peer("a1"), peer("a2")]
    assert (onward.gradient, onward.by, onward.way, onward.instead_of) == (GRADIENT, peer("a1"), "direct", "")
    assert one.next.in_flight == 0


@pytest.mark.parametrize("error", [Unreachable, TooSlow, Refused, ProtocolViolation])
async def test_a_mate_takes_it_where_the_tickets_peer_fails_and_the_answer_says_so(
    autojump_clock: MockClock, error: Any
) -> None:
    one = Hopping("a1", "b1")
    one.peers.doing["a1"] = lambda asked: error("no")
    onward = await one.hand_on()
    assert one.peers.names == ["a1", "b1"]
    assert (onward.by, onward.instead_of) == (peer("b1"), peer("a1"))
    assert onward.passed.hops[0].peer == peer("b1")


async def test_who_refuses_is_asked_for_the_next_one_and_who_fails_rests(autojump_clock: MockClock) -> None:
    """A hostile trainer's microbatches, which are refused, say nothing of whoever refuses them."""
    for error, again in ((Refused("targets of another model"), True), (Unreachable("gone"), False)):
        one = Hopping("a1", "b1")
        one.peers.doing["a1"] = lambda asked, error=error: error
        await one.hand_on()
        del one.peers.asked[:], one.peers.doing["a1"]
        await one.hand_on()
        assert (one.peers.names == ["a1"]) == again


async def test_three_peers_of_a_stage_are_tried_and_then_the_trainer_chooses(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1", "c1", "d1")
    for name in ("a1", "b1", "c1", "d1"):
        one.peers.doing[name] = lambda asked: Refused("not here")
    broken = broken_of(await one.hand_on())
    assert len(one.peers.names) == 3
    assert one.peers.names[0] == "a1"
    assert (broken.stage, broken.peer) == (1, peer("a1"))
    assert "not here" in broken.reason


async def test_what_cannot_be_reached_is_carried_by_the_trainer(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    for name in ("a1", "b1"):
        one.peers.doing[name] = lambda asked: Unreachable("no way")
    onward = await one.hand_on()
    assert one.peers.names == ["a1", "b1", "trainer"]
    carried = one.peers.asked[-1]
    assert (carried.method, carried.body.to, carried.body.passed.stage) == (RELAY, peer("a1"), 1)
    assert (onward.way, onward.by, onward.instead_of) == ("trainer", OWN, "")
    assert onward.gradient == GRADIENT


async def test_where_the_trainer_cannot_either_it_hears_why(autojump_clock: MockClock) -> None:
    one = Hopping("a1")
    one.peers.doing["a1"] = lambda asked: Unreachable("no way")
    one.peers.doing["trainer"] = lambda asked: Unreachable("nor here")
    broken = broken_of(await one.hand_on())
    assert one.peers.names == ["a1", "trainer"]
    assert "no way" in broken.reason
    assert "over the trainer: nor here" in broken.reason


async def test_whom_the_conductor_does_not_list_is_never_called(autojump_clock: MockClock) -> None:
    """A trainer may name anybody: a mate takes its place, else the trainer may carry the call itself."""
    for shown, asked in (
        (ticket(0, 2, 0, "a0", "stranger", "a2"), "b1"),
        (ticket(0, 0, 0, "a0", "stranger"), "trainer"),
    ):
        one = Hopping("b1")
        onward = await one.hand_on(shown)
        assert one.peers.names == [asked]
        assert one.next._arrival == {}
        assert onward.passed.broken is None


async def test_a_kept_gradient_is_asked_of_its_holder_alone(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    onward = await one.hand_on(LOST)
    assert (onward.gradient, onward.passed.hops, one.peers.asked[0].frames) == (GRADIENT, [], [])
    one.peers.doing["a1"] = lambda asked: Refused("the microbatch is not kept here")
    assert broken_of(await one.hand_on(LOST)).stage == 1
    assert one.peers.names == ["a1", "a1"]
    one.peers.doing["a1"] = lambda asked: ProtocolViolation("junk")  # it rests, and is asked all the same
    broken_of(await one.hand_on(LOST))
    del one.peers.doing["a1"]
    assert (await one.hand_on(LOST)).gradient == GRADIENT


async def test_who_has_no_room_is_waited_for_and_has_not_failed(autojump_clock: MockClock) -> None:
    one = Hopping("a1")
    answers = iter([Overloaded("full", 0.08), Overloaded("full", 0.08)])
    one.peers.doing["a1"] = lambda asked: next(answers, None) or done(asked)
    onward = await one.hand_on()
    assert (one.peers.names, onward.passed.broken) == (["a1"] * 3, None)
    assert 0.1 < onward.took_s < 1.0


async def test_microbatches_that_wait_for_room_together_all_get_it(autojump_clock: MockClock) -> None:
    """Each lets the peer rest a little longer, and none of them gives up for it."""
    one, since = Hopping("a1"), trio.current_time()
    one.peers.doing["a1"] = lambda asked: (
        done(asked) if trio.current_time() - since > 2.0 else Overloaded("full", 0.01 + trio.current_time() % 0.3)
    )
    found: list[HandOnResult] = []

    async def hand_on(after_s: float) -> None:
        await trio.sleep(after_s)
        found.append(await one.hand_on())

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(hand_on, number * 0.03)
    assert [each.passed.broken for each in found] == [None] * 10
    assert "trainer" not in {each.way for each in found}


@pytest.mark.parametrize("shown", [WHOLE, LOST])
@pytest.mark.parametrize("retry_after_s", [0.0, 0.08, 1e9, float("inf"), float("nan")])
async def test_patience_with_who_has_no_room_ends(
    autojump_clock: MockClock, shown: Ticket, retry_after_s: float
) -> None:
    one = Hopping("a1", "b1")
    for name in ("a1", "b1"):
        one.peers.doing[name] = lambda asked: Overloaded("full", retry_after_s)
    onward = await one.hand_on(shown)
    assert broken_of(onward).reason.startswith("full")
    assert 2.0 < onward.took_s < 6.0
    assert len(one.peers.names) < 200


@pytest.mark.parametrize("within_s", [PASS_TIMEOUT_S, 20.0, 1.0])
async def test_a_successor_that_never_answers_costs_one_call_and_the_caller_hears_of_it_in_time(
    autojump_clock: MockClock, within_s: float
) -> None:
    """Else the caller would take us for the one that does not answer."""
    one = Hopping("a1", "b1")
    for name in ("a1", "b1"):
        one.peers.doing[name] = lambda asked: 1e9
    with trio.fail_after(within_s):
        onward = await one.hand_on(within_s=within_s)
    assert broken_of(onward).peer == peer("a1")
    assert one.peers.names == ["a1"]
    assert one.peers.asked[0].timeout_s > 0.8 * within_s


async def test_a_call_ends_when_its_peer_leaves_and_a_mate_is_asked(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    one.peers.doing["a1"] = lambda asked: 100.0
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await trio.sleep(10)
            assert one.ways.doubted == {"a1"}
            one.next.peers.update(members("b1"))

        nursery.start_soon(one.next.peers.run)
        nursery.start_soon(leave)
        onward = await one.hand_on()
        nursery.cancel_scope.cancel()
    assert (onward.by, 10 <= onward.took_s < 11) == (peer("b1"), True)


async def test_a_call_ends_when_its_peer_falls_silent_and_that_is_asked_again_once_a_probe_gets_through(
    autojump_clock: MockClock,
) -> None:
    one = Hopping("a1", "b1")
    one.peers.doing["a1"] = lambda asked: 100.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.next.peers.run)
        one.ways.silent_since["a1"] = trio.current_time()
        onward = await one.hand_on()
        assert (onward.by, 5 <= onward.took_s < 6) == (peer("b1"), True)
        del one.peers.doing["a1"]
        assert (await one.hand_on()).by == peer("b1")
        one.ways.silent_since.clear()
        while one.next.peers.is_cut_off(peer("a1")):
            await one.next.peers._changed.wait()
        assert (await one.hand_on()).by == peer("a1")
        nursery.cancel_scope.cancel()


async def test_silence_before_a_call_is_not_held_against_its_peer(autojump_clock: MockClock) -> None:
    """The link was quiet between two steps; asked for a sign of life, the peer gives one."""
    one = Hopping("a1", "b1")
    one.peers.doing["a1"] = lambda asked: 8.0
    one.ways.silent_since["a1"] = trio.current_time()
    await trio.sleep(60.0)
    async with trio.open_nursery() as nursery:

        async def speak() -> None:
            await trio.sleep(3.0)
            assert one.ways.doubted == {"a1"}
            one.ways.silent_since.clear()

        nursery.start_soon(one.next.peers.run)
        nursery.start_soon(speak)
        onward = await one.hand_on()
        nursery.cancel_scope.cancel()
    assert (onward.by, onward.took_s) == (peer("a1"), pytest.approx(8.0))


async def test_a_peer_that_takes_long_and_gives_signs_of_life_is_waited_for(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    one.peers.doing["a1"] = lambda asked: 100.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.next.peers.run)
        onward = await one.hand_on()
        nursery.cancel_scope.cancel()
    assert (onward.by, onward.took_s) == (peer("a1"), pytest.approx(100.0))


# --- answers ----------------------------------------------------------------------------------------------------------
def _other_receipt(asked: Asked) -> Answer[PassAnswer]:
    mine = hop("a1", asked.body)
    return done(asked, msgspec.structs.replace(mine, receipt=hop("b1", asked.body).receipt))


BAD: dict[str, Any] = {
    "no gradient": lambda asked: Answer(done(asked).body),
    "two": lambda asked: Answer(done(asked).body, (GRADIENT, GRADIENT)),
    "another shape": lambda asked: Answer(done(asked).body, (frame(SAMPLES, TOKENS, WIDTH + 1),)),
    "fewer samples": lambda asked: Answer(done(asked).body, (frame(1, TOKENS, WIDTH),)),
    "another dtype": lambda asked: Answer(done(asked).body, (frame(SAMPLES, TOKENS, WIDTH, dtype="float64"),)),
    "no hops": lambda asked: Answer(PassAnswer(), (GRADIENT,)),
    "a hop too few": lambda asked: Answer(PassAnswer([hop("a1", asked.body)]), (GRADIENT,)),
    "a hop too many": lambda asked: done(asked, *[hop(name, asked.body) for name in ("a1", "a2", "a2")]),
    "another's hop": lambda asked: done(asked, hop("b1", asked.body)),
    "another's receipt": _other_receipt,
    "no receipt": lambda asked: done(asked, hop("a1", asked.body, receipt=Receipt(3, b""))),
    "no receipt of the last": lambda asked: done(
        asked, hop("a1", asked.body), hop("a2", asked.body, receipt=Receipt(3, bytes(64)))
    ),
    "of another microbatch": lambda asked: done(
        asked, hop("a1", msgspec.structs.replace(asked.body, ticket=msgspec.structs.replace(WHOLE, seq=6)))
    ),
    "of another run": lambda asked: done(asked, hop("a1", msgspec.structs.replace(asked.body, run=bytes(16)))),
    "no peer": lambda asked: done(asked, hop("a1", asked.body), hop("a2", asked.body, peer="x")),
    "no text": lambda asked: done(asked, hop("a1", asked.body), hop("a2", asked.body, peer="\0" * 52)),
    "broken with hops": lambda asked: done(asked, broken=Broken(2, "", "")),
    "broken with a gradient": lambda asked: Answer(PassAnswer(broken=Broken(2, "", "")), (GRADIENT,)),
    "broken at itself": lambda asked: Answer(PassAnswer(broken=Broken(1, "", ""))),
    "broken before it": lambda asked: Answer(PassAnswer(broken=Broken(0, "", ""))),
    "broken beyond the route": lambda asked: Answer(PassAnswer(broken=Broken(3, "", ""))),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_answer_is_its_givers_fault_and_a_mate_is_asked(
    autojump_clock: MockClock, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = Hopping("a1", "b1")
    one.peers.doing["a1"] = BAD[bad]
    onward = await one.hand_on()
    assert one.peers.names == ["a1", "b1"]
    assert [each.peer for each in onward.passed.hops] == [peer("b1"), peer("a2")]
    (line,) = caplog.messages
    assert f"…{peer('a1')[-8:]} of stage 1" in line
    assert one.next.peers.wiring(1).rests(peer("a1"), trio.current_time())


async def test_what_the_trainer_carries_wrongly_is_no_peers_fault(autojump_clock: MockClock) -> None:
    one = Hopping()
    one.peers.doing["trainer"] = lambda asked: Answer(PassAnswer(), (GRADIENT,))
    reason = broken_of(await one.hand_on(ticket(0, 2, 0, "a0", "a1", "a2"))).reason
    assert PeerId.parse(OWN).short in reason


async def test_a_way_that_broke_further_on_is_passed_on_as_it_is(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    told = Broken(2, peer("a2"), "it is gone")
    one.peers.doing["a1"] = lambda asked: Answer(PassAnswer(broken=told))
    assert broken_of(await one.hand_on()) == told
    assert one.peers.names == ["a1"]


async def test_who_gave_a_gradient_of_no_use_is_named(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = Hopping("a1")
    onward = await one.hand_on()
    passed = one.next.spoilt(onward, ProtocolViolation("it has values that are not finite"))
    assert passed.broken == Broken(1, peer("a1"), "it has values that are not finite")
    assert f"…{peer('a1')[-8:]} of stage 1 is unusable" in caplog.messages[-1]


async def test_lines_are_known_of_those_that_serve(autojump_clock: MockClock) -> None:
    one = Hopping("a1", "b1")
    for name, rate in (("a1", 5e6), ("b1", 3e6)):
        one.peers.doing[name] = lambda asked, rate=rate: done(asked, arrival_bytes_per_s=rate)
        await one.hand_on(ticket(0, 2, 0, "a0", name, "a2"))
    assert one.next.line_bytes_per_s == 3e6
    one.next.forget_gone([peer("a1")])
    assert one.next.line_bytes_per_s == 5e6
