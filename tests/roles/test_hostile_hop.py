"""Hostile trainers, hops and successors in hand-over: each is refused or survived, and named; nothing counts twice.

Real stage peers of three stages on a simulated network, with their models; what is hostile, the test says itself.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import trio
import trio.lowlevel

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, ProtocolViolation, Refused, RemoteError
from peerd.messages.handover import Broken, Hop, PassAnswer, PassRequest
from peerd.messages.proof import receipt
from peerd.messages.swarm import Mb
from peerd.rpc.inbound import Inbound
from peerd.rpc.rpc import Answer, Incoming
from peerd.wire.budget.book import BOUNDS, Bounds, Resource, shared_out
from tests.worlds.network.hosts import keypair
from tests.worlds.roles.handscene import MARK, HandScene, hidden, in_scene, text, tokens

pytestmark = pytest.mark.slow
ROUTE = ("a0", "a1", "a2")


def short(name: str) -> str:
    return f"…{text(name)[-8:]}"


@in_scene
async def test_what_its_trainer_did_not_sign_is_refused_before_its_frames_are_received(
    s: HandScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    frames = Inbound.frames

    async def noting(self: Inbound, message: Any, *rest: Any) -> Any:
        received.append(message.frame_bytes)
        return await frames(self, message, *rest)

    await s.join("trainer")
    await s.join("liar")
    monkeypatch.setattr(Inbound, "frames", noting)
    good = s.ticket("trainer", 5, *ROUTE)
    inputs = [tokens(5), tokens(1005)]
    forged: list[tuple[str, PassRequest, str]] = [
        ("trainer", s.body(0, "trainer", msgspec.structs.replace(good, signature=b"")), "not signed"),
        ("trainer", s.body(0, "trainer", s.ticket("trainer", 5, *ROUTE, by="liar")), "not signed"),
        ("trainer", s.body(0, "trainer", s.ticket("trainer", 5, *ROUTE, run=bytes(16))), "not signed"),
        ("trainer", s.body(0, "trainer", good, run=bytes(16)), "your run file differs"),
        ("trainer", s.body(0, "trainer", s.ticket("trainer", 5, *ROUTE, step=1)), "stage is at step 0"),
        ("trainer", s.body(0, "trainer", msgspec.structs.replace(good, seq=6)), "not signed"),
        ("trainer", s.body(0, "trainer", good, grant=None), "no grant"),
        ("trainer", s.body(0, "trainer", good, grant=s.granted("trainer", 6)), "does not name microbatch 5"),
        ("trainer", s.body(0, "trainer", good, grant=s.granted("trainer", step=1)), "for step 1"),
        ("trainer", s.body(0, "trainer", good, grant=s.granted("liar")), "not of a conductor"),
        ("trainer", s.body(0, "trainer", good, grant=s.granted("trainer", by="liar")), "not of a conductor"),
        ("trainer", s.body(0, "trainer", s.ticket("trainer", 5, "a1", "a1", "a2")), "names another peer"),
        ("trainer", s.body(0, "trainer", s.ticket("trainer", 5, "a0", high=0)), "lacks a stage"),
        ("trainer", s.body(0, "trainer", s.ticket("trainer", 5, *ROUTE, "a2", high=3)), "this run has 3 stages"),
        ("liar", s.body(0, "trainer", good), "only the trainer of a ticket"),  # shown by who is not it
        ("liar", s.body(0, "liar", good), "not signed"),
    ]
    for caller, body, why in forged:
        with pytest.raises((Refused, Overloaded), match=why) as caught:
            await s.call(caller, "a0", body, inputs)
        assert caught.value.peer == keypair("a0").peer_id
    for caller in ("liar", "a2"):  # neither serves the stage before
        with pytest.raises(Overloaded, match="not known to serve stage 0"):
            await s.call(caller, "a1", s.body(1, "trainer", good), [hidden(1), tokens(1005)])
    assert received == []
    assert s.held("a0") == s.held("a1") == s.held("b1") == []
    answer = await s.call("trainer", "a0", s.body(0, "trainer", good), inputs)
    assert [hop.peer for hop in answer.body.hops] == list(map(text, ROUTE))
    assert received
    assert [s.held(name) for name in ROUTE] == [[(text("trainer"), 5)]] * 3


@pytest.fixture
def few_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may have four proofs at a time that do not hold."""
    monkeypatch.setitem(cast(dict[Resource, Bounds], BOUNDS), Resource.UNPROVEN, shared_out(32, 4))


@pytest.mark.usefixtures("few_unproven")
@in_scene
async def test_a_forged_grant_beside_a_good_ticket_counts_against_who_shows_it(s: HandScene) -> None:
    await s.join("trainer")
    await s.join("liar")
    inputs = [tokens(5), tokens(1005)]

    async def shown(number: int) -> str:
        body = s.body(0, "liar", s.ticket("liar", 5, *ROUTE), grant=s.granted("liar", 5, 100 + number, by="liar"))
        with pytest.raises(Overloaded) as caught:
            await s.call("liar", "a0", body, inputs)
        return str(caught.value.args[0])

    book = s.peers["a0"].host.book
    for number in (0, 0, 0, 1, 2, 3):  # one that is shown again is known, and costs nothing
        assert "not of a conductor" in await shown(number)
    assert book.used(Resource.UNPROVEN) == 4
    assert "had an invalid proof: this peer has 4" in await shown(4)
    assert book.used(Resource.UNPROVEN) == 4
    answer = await s.call("trainer", "a0", s.body(0, "trainer", s.ticket("trainer", 5, *ROUTE)), inputs)
    assert [hop.peer for hop in answer.body.hops] == list(map(text, ROUTE))


@in_scene
async def test_a_ticket_that_is_shown_again_counts_nothing_twice(s: HandScene) -> None:
    """By its trainer, by a hop of it with other tensors, by a mate of that hop, and with every attempt before."""
    await s.join("trainer")
    shown = s.ticket("trainer", 5, *ROUTE, attempt=3)
    inputs = [tokens(5), tokens(1005)]
    first = await s.call("trainer", "a0", s.body(0, "trainer", shown), inputs)
    before = {name: (s.held(name), s.sum_of(name)) for name in ROUTE}
    again = await s.call("trainer", "a0", s.body(0, "trainer", shown), [tokens(9), tokens(1005)])
    assert again.body.loss_sum == first.body.loss_sum
    kept = await s.call("a0", "a1", s.body(1, "trainer", shown), [hidden(3), tokens(7)])
    other = await s.call("a0", "a1", s.body(1, "trainer", shown), [hidden(4), tokens(8)])
    assert bytes(kept.frames[0].payload) == bytes(other.frames[0].payload)
    await s.call("b1", "a2", s.body(2, "trainer", shown), [hidden(3), tokens(7)])
    for attempt in range(3):
        old = s.ticket("trainer", 5, *ROUTE, attempt=attempt)
        with pytest.raises(Refused, match="a later attempt"):
            await s.call("a0", "a1", s.body(1, "trainer", old), [hidden(3), tokens(7)])
    assert {name: (s.held(name), s.sum_of(name)) for name in ROUTE} == before
    assert s.held("b1") == []


@in_scene
async def test_who_shows_a_ticket_of_one_under_way_ends_nobodys_work(s: HandScene) -> None:
    """A member of the stage before that has seen it, as often as it likes, while the honest call waits."""
    await s.join("trainer")
    release = trio.Event()
    onward = s.peers["a1"].role.post.handover.next
    ask = onward._ask

    async def slowly(name: str, task: Any) -> Any:
        await release.wait()
        return await ask(name, task)

    onward._ask = slowly
    shown = s.ticket("trainer", 5, *ROUTE)
    answers: list[Answer[PassAnswer]] = []

    async def honest() -> None:
        answers.append(await s.call("trainer", "a0", s.body(0, "trainer", shown), [tokens(5), tokens(1005)]))

    async def replay() -> None:
        await s.call("a0", "a1", s.body(1, "trainer", shown), [hidden(3), tokens(7)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(honest)
        await trio.sleep(2)
        for _ in range(20):
            nursery.start_soon(replay)
        await trio.sleep(2)
        assert s.peers["a1"].role.post.handover.in_flight == 1
        release.set()
    assert [hop.peer for hop in answers[0].body.hops] == list(map(text, ROUTE))
    assert s.held("a1") == [(text("trainer"), 5)]
    assert s.held("b1") == []


@in_scene
async def test_an_attempt_whose_frames_come_late_ends_none_that_is_later(s: HandScene) -> None:
    await s.join("trainer")
    handover = s.peers["a0"].role.post.handover
    early, late = (s.ticket("trainer", 5, *ROUTE, attempt=attempt) for attempt in (0, 1))
    inputs = (tokens(5), tokens(1005))
    bodies = [s.body(0, "trainer", shown) for shown in (early, late)]
    peer = keypair("trainer").peer_id
    assert [handover.objection(peer, body) for body in bodies] == [None, None]
    found: list[Answer[PassAnswer]] = []

    async def do(body: PassRequest) -> None:
        found.append(await handover.passes(Incoming(peer, body, inputs, trio.current_time() + 100)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(do, bodies[1])
        while not handover.in_flight:
            await trio.lowlevel.checkpoint()
        with pytest.raises(Refused, match="a later attempt"):
            await handover.passes(Incoming(peer, bodies[0], inputs, trio.current_time() + 100))
    assert len(found[0].body.hops) == 3


@in_scene
async def test_a_route_through_a_peer_of_another_stage_leads_over_one_of_that_stage(s: HandScene) -> None:
    await s.join("trainer")
    for seq, between in ((5, "a2"), (6, "trainer")):
        shown = s.ticket("trainer", seq, "a0", between, "a2")
        answer = await s.call("trainer", "a0", s.body(0, "trainer", shown), [tokens(seq), tokens(1005)])
        first, second, _ = answer.body.hops
        assert second.peer in (text("a1"), text("b1"))
        assert first.instead_of == text(between)
    assert len(s.held("a2")) == 2
    assert len(s.held("a1")) + len(s.held("b1")) == 2


# --- tensors that are not in order ------------------------------------------------------------------------------------
def _as(dtype: str, shape: tuple[int, ...], value: float) -> TensorFrame:
    return TensorFrame(dtype, shape, np.full(shape, value, dtype).data.cast("B"))


@in_scene
async def test_a_trainers_bad_tensors_are_its_own_fault_and_go_no_further(s: HandScene) -> None:
    """The hops after the first one hear nothing of them, so that none of them takes another for hostile."""
    await s.join("trainer")
    asked: list[str] = []
    onward = s.peers["a0"].role.post.handover.next
    ask = onward._ask

    async def noting(name: str, task: Any) -> Any:
        asked.append(name)
        return await ask(name, task)

    onward._ask = noting
    good, targets = tokens(5), tokens(1005)
    bad: list[tuple[list[TensorFrame], str]] = [
        ([_as("uint8", (4, 16), 1), _as("uint8", (4, 16), 1)], "2 samples"),
        ([good, _as("uint8", (4, 16), 1)], "2 samples"),
        ([_as("uint8", (2, 17), 1), targets], "up to 16 tokens"),
        ([good, _as("uint8", (2, 17), 1)], "up to 16 tokens"),
        ([_as("int64", (2, 16), 256), targets], "token 256"),
        ([good, _as("int64", (2, 16), 256)], "token 256"),
        ([good, _as("int64", (2, 16), -1)], "token -1"),
        ([good, _as("float32", (2, 16), 0)], "expected"),
        ([good, hidden(1)], r"\[samples, tokens\]"),
        ([good], "1 frames; expected 2"),
        ([good, targets, targets], "frames"),
    ]
    for seq, (frames, why) in enumerate(bad):
        shown = s.ticket("trainer", seq, *ROUTE)
        with pytest.raises(RemoteError, match=why):
            await s.call("trainer", "a0", s.body(0, "trainer", shown), frames)
    assert asked == []
    assert s.held("a0") == []
    for seq, (frame, why) in enumerate(
        [
            (hidden(1, samples=4), "2 samples"),
            (hidden(1, size=float("inf")), "not finite"),
            (_as("float64", (2, 16, 16), 1), "expected"),
            (tokens(1), "takes"),
        ],
        20,
    ):
        shown = s.ticket("trainer", seq, *ROUTE)
        with pytest.raises(RemoteError, match=why):
            await s.call("a0", "a1", s.body(1, "trainer", shown), [frame, targets])
    assert s.held("a1") == s.held("a2") == []


def _answers(name: str) -> dict[str, Any]:
    """What a hostile peer of stage 1 answers, by what is wrong with it."""

    def hops(call: Incoming[PassRequest], *names: str) -> list[Hop]:
        mb = Mb(call.body.trainer, call.body.ticket.seq)
        return [Hop(text(n), receipt(keypair(n).sign, MARK, 5, stage, 0, mb)) for stage, n in enumerate(names, 1)]

    return {
        "another's shape": lambda call: Answer(PassAnswer(hops(call, name, "a2")), (hidden(1, samples=4),)),
        "tokens": lambda call: Answer(PassAnswer(hops(call, name, "a2")), (tokens(1),)),
        "no gradient": lambda call: Answer(PassAnswer(hops(call, name, "a2"))),
        "no receipts": lambda call: Answer(PassAnswer(), (hidden(1),)),
        "another's receipt": lambda call: Answer(PassAnswer(hops(call, "b1", "a2")), (hidden(1),)),
        "one receipt": lambda call: Answer(PassAnswer(hops(call, name)), (hidden(1),)),
        "not finite": lambda call: Answer(PassAnswer(hops(call, name, "a2")), (hidden(1, float("nan")),)),
        "too large": lambda call: Answer(PassAnswer(hops(call, name, "a2")), (hidden(1, 1e30),)),
        "broken elsewhere": lambda call: Answer(PassAnswer(broken=Broken(0, "", "x"))),
        "broken again and again": lambda call: Answer(PassAnswer(broken=Broken(2, text("a2"), "it is gone"))),
        "refuses": Refused("no"),
        "full for ever": Overloaded("full", 0.08),
    }


@pytest.mark.parametrize("bad", _answers("l1"))
@in_scene
async def test_a_successor_that_answers_wrongly_is_named_and_the_microbatch_goes_another_way(
    s: HandScene, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "peerd.pipeline")
    asked: list[int] = []

    async def answer(call: Incoming[PassRequest]) -> Any:
        asked.append(call.body.ticket.seq)
        await trio.lowlevel.checkpoint()
        given = _answers("l1")[bad]
        if isinstance(given, RemoteError):
            raise given
        return given(call)

    await s.join("trainer")
    await s.join_stage("l1", answer)
    pipeline = s.pipeline("trainer")
    for seq in range(8):
        with trio.fail_after(60):
            holdings = await pipeline.train(0, seq, s.load(seq))
        assert holdings[1].peer != text("l1")
        assert holdings[1].receipt is not None
    assert asked
    done = [(text("trainer"), seq) for seq in range(8)]
    assert sorted(s.held("a0")) == sorted(s.held("a2")) == done or bad == "broken again and again"
    counted = set(s.held("a1")) | set(s.held("b1"))
    assert sorted(counted) == done
    if bad != "full for ever":
        assert short("l1") in caplog.text


@pytest.mark.parametrize("line", [{}, {"down_bytes_per_s": 10.0}])
@in_scene
async def test_a_successor_that_never_answers_or_reads_slowly_costs_one_call_and_is_named(
    s: HandScene, line: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "peerd.pipeline")

    async def never(call: Incoming[PassRequest]) -> Any:
        await trio.sleep_forever()

    await s.join("trainer")
    await s.join_stage("l1", never)
    shown = s.ticket("trainer", 5, "a0", "l1", "a2")
    since = trio.current_time()
    answer = await s.call("trainer", "a0", s.body(0, "trainer", shown), [tokens(5), tokens(1005)], timeout_s=60.0)
    assert answer.body.broken is not None
    assert (answer.body.broken.stage, answer.body.broken.peer) == (1, text("l1"))
    assert trio.current_time() - since < 60.0
    assert short("l1") in caplog.text
    assert s.peers["a0"].role.post.handover.bytes == 0
    shown = s.ticket("trainer", 6, "a0", "l1", "a2")  # it rests: the next one goes to another at once
    since = trio.current_time()
    answer = await s.call("trainer", "a0", s.body(0, "trainer", shown), [tokens(6), tokens(1006)])
    assert answer.body.hops[0].instead_of == text("l1")
    assert trio.current_time() - since < 5.0


# --- floods -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("together", [False, True])
@in_scene
async def test_a_predecessor_that_floods_fills_the_room_and_no_more(s: HandScene, together: bool) -> None:
    await s.join("trainer")
    handover = s.peers["a1"].role.post.handover
    handover.room_bytes = 10 * 2 * len(hidden(1).payload)
    told: dict[int, str] = {}
    held: list[int] = []  # bytes, whenever a microbatch is taken, and after all that come one by one
    do = handover._do

    async def noting(*args: Any) -> Any:
        held.append(handover.bytes)
        return await do(*args)

    handover._do = noting

    async def flood(seq: int) -> None:
        shown = s.ticket("trainer", seq, *ROUTE)
        try:
            await s.call("a0", "a1", s.body(1, "trainer", shown), [hidden(seq), tokens(seq)], timeout_s=20)
            told[seq] = ""
        except Overloaded as error:
            told[seq] = str(error)

    async with trio.open_nursery() as nursery:
        for seq in range(60):
            if together:
                nursery.start_soon(flood, seq)
            else:
                await flood(seq)
                held.append(handover.bytes)
    assert max(held) <= handover.room_bytes + 3 * len(hidden(1).payload)
    assert {why for why in told.values() if why and "no room" not in why} == set()
    taken = sorted(seq for seq, why in told.items() if not why)
    assert 3 <= len(taken) <= 12
    assert sorted(s.held("a1")) == [(text("trainer"), seq) for seq in taken]
    assert handover.refused_full == 60 - len(taken)
    # What is known is answered all the same, and counts once.
    await flood(taken[0])
    assert told[taken[0]] == ""
    assert len(s.held("a1")) == len(taken)


@in_scene
async def test_a_flood_of_the_same_calls_makes_one_microbatch_and_leaves_nothing_behind(s: HandScene) -> None:
    await s.join("trainer")
    errors: list[RemoteError] = []

    async def flood(attempt: int) -> None:
        shown = s.ticket("trainer", 5, *ROUTE, attempt=attempt)
        try:
            await s.call("trainer", "a0", s.body(0, "trainer", shown), [tokens(5), tokens(1005)], timeout_s=30)
        except RemoteError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(flood, number % 7)
    assert all(isinstance(error, Refused | Overloaded) for error in errors)
    assert [s.held(name) for name in ("a0", "a1", "a2")] == [[(text("trainer"), 5)]] * 3
    assert s.held("b1") == []
    for name in ROUTE:
        handover = s.peers[name].role.post.handover
        assert (handover.in_flight, len(handover._tickets._newest)) == (0, 1)


@in_scene
async def test_a_protocol_violation_of_a_hop_names_it(s: HandScene) -> None:
    """At the peer that found it, in what it raises."""
    await s.join("trainer")
    handover = s.peers["a1"].role.post.handover
    body = s.body(1, "trainer", s.ticket("trainer", 5, *ROUTE))
    for frames in ((), (hidden(1, samples=4), tokens(1))):
        with pytest.raises(ProtocolViolation) as caught:
            await handover.passes(Incoming(keypair("a0").peer_id, body, frames, trio.current_time() + 9))
        assert caught.value.peer == keypair("a0").peer_id
