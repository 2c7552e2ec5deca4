"""Expert hosts that lie, drip, keep silent or claim what they have not: each costs one call, is named, and rests."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import TooFewExperts
from peerd.messages.experts import Output
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.expert_network import ExpertCall
from peerd.run.grid import Uid
from tests.worlds.network.expertworld import (
    ExpertPeer,
    ExpertWorld,
    announcements,
    asks_for,
    experts_run,
    frame,
    in_expert_world,
    values_of,
)

A, B, C = Uid(0, (1, 2)), Uid(0, (1, 3)), Uid(0, (2, 0))


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "peerd.experts.calls")


async def scored(caller: ExpertPeer, k: int = 4) -> list[Uid]:
    """Experts for one sample, by scores that rise with the coordinates."""
    import numpy as np

    scores = [np.arange(side, dtype=np.float32)[None, :] for side in caller.directory.grid.sides]
    (uids,) = await caller.client.choose(0, scores, k)
    return uids


def named(caplog: pytest.LogCaptureFixture, host: ExpertPeer) -> list[str]:
    """Log lines about calls that name this peer."""
    calls = [r.getMessage() for r in caplog.records if r.name.endswith("expert_client")]
    return [line for line in calls if host.node.id.short in line]


def with_frames(*frames: TensorFrame, **numbers: Any) -> Callable[[Incoming[Any]], Any]:
    """A host that answers with these."""

    async def answer(call: Incoming[Any]) -> Answer[Any]:
        await trio.lowlevel.checkpoint()
        return Answer(Output(**{"generation": 0, "version": 0, **numbers}), frames)

    return answer


GOOD = frame(2)
ANSWERS: dict[str, tuple[tuple[TensorFrame, ...], str]] = {
    "other rows": ((frame(3),), "frames of 36 bytes; allowed: 32"),
    "fewer rows": ((frame(1),), "an answer of float32 [1, 3]; expected float32 [2, 3]"),
    "another width": ((frame(2, width=2),), "an answer of float32 [2, 2]"),
    "a flat shape": ((TensorFrame("float32", (6,), bytes(24)),), "an answer of float32 [6]"),
    "another dtype": ((TensorFrame("int32", (2, 3), bytes(24)),), "an answer of int32 [2, 3]"),
    "half the precision": ((TensorFrame("float16", (2, 3), bytes(12)),), "an answer of float16 [2, 3]"),
    "another code": ((TensorFrame("float32", (2, 3), bytes(12), "bf16"),), "an answer in code bf16"),
    "NaN": ((frame(2, math.nan),), "NaN or infinity"),
    "infinity": ((frame(2, -math.inf),), "NaN or infinity"),
    "no frame": ((), "an answer with 0 frames"),
    "two frames": ((TensorFrame("uint8", (1,), b"1"), TensorFrame("uint8", (1,), b"1")), "an answer with 2 frames"),
    "a hundred times the bytes": ((frame(200),), "frames of 2400 bytes; allowed: 32"),
}


@pytest.mark.parametrize("name", list(ANSWERS))
@in_expert_world()
async def test_an_answer_other_than_asked_leaves_the_average_and_its_host_is_named(
    scene: ExpertWorld, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    frames, why = ANSWERS[name]
    liar, honest, caller = scene.peers
    await liar.host(A, C)
    await honest.host(B)
    liar.forward = with_frames(*frames)
    assert await scored(caller) == [B, A, C]
    replies = await caller.client.forward(asks_for([A, B]), 2)
    assert [reply is None for reply in replies] == [True, False]
    (line,) = named(caplog, liar)
    assert why in line
    assert named(caplog, honest) == []
    assert dict(caller.client.figures.failed) == {"invalid": 1}
    assert await scored(caller) == [B], "the liar rests with all that it claims"
    liar.forward = None
    await trio.sleep(2.1)
    assert await scored(caller) == [B, A, C]
    assert await caller.client.forward(asks_for([A]), 2) != [None]


@in_expert_world(count=2)
async def test_an_older_generation_than_claimed_is_no_answer(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    liar, caller = scene.peers
    await liar.host(A, generation=8)
    liar.forward = with_frames(GOOD, generation=7)
    with pytest.raises(TooFewExperts, match="generation 7 of 8 that it claims"):
        await caller.client.forward(asks_for([A]), 2)
    assert len(named(caplog, liar)) == 1


@pytest.mark.parametrize("gradient", [frame(3), frame(2, math.nan), frame(2, width=5)], ids=["rows", "nan", "width"])
@in_expert_world(count=2)
async def test_a_gradient_other_than_asked_counts_as_a_constant(
    scene: ExpertWorld, gradient: TensorFrame, caplog: pytest.LogCaptureFixture
) -> None:
    liar, caller = scene.peers
    await liar.host(A)

    async def lie(call: Incoming[Any]) -> Answer[Any]:
        await trio.lowlevel.checkpoint()
        return Answer(liar.answer(call).body, (gradient,))

    liar.backward = lie
    (ask,) = asks_for([A])
    (reply,) = await caller.client.forward([ask], 2)
    assert reply is not None
    back = ExpertCall(A, ask.samples, (*ask.frames, frame(2)), reply.served)
    assert await caller.client.backward([back]) == [None]
    assert len(named(caplog, liar)) == 1
    assert liar.updates == {A: 1}, "a lie is not asked for again"


@in_expert_world(experts_run(timeout_s=3.0))
async def test_a_silent_host_costs_the_deadline_once_and_is_named(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    silent, honest, caller = scene.peers
    await silent.host(A, C)
    await honest.host(B)
    silent.forward = never
    await scored(caller)
    asks = [ExpertCall(A, (0,), (frame(1),)), ExpertCall(B, (1,), (frame(1),))]
    began = trio.current_time()
    with pytest.raises(TooFewExperts, match=r"sample 0 has 0 of 1 answers: expert 0\.1\.2 .*"):
        await caller.client.forward(asks, 2)
    assert trio.current_time() - began == pytest.approx(3.0)
    (line,) = named(caplog, silent)
    assert "expert 0.1.2 slow" in line
    assert await scored(caller) == [B]


async def never(call: Incoming[Any]) -> Answer[Any]:
    await trio.sleep_forever()
    raise AssertionError


@in_expert_world()
async def test_a_host_that_the_grace_cuts_off_again_and_again_is_chosen_no_more(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    silent, honest, caller = scene.peers
    await silent.host(A)
    await honest.host(B)
    silent.forward = never
    for number in range(4):
        assert await scored(caller) == [B, A], f"round {number}"
        began = trio.current_time()
        replies = await caller.client.forward(asks_for([B, A]), 2)
        assert [reply is None for reply in replies] == [False, True]
        assert trio.current_time() - began < 1.0
    (line,) = named(caplog, silent)
    assert "4 answers in a row came late or never" in line
    assert await scored(caller) == [B]


class Drops:
    """A payload of which one byte more is ready every second."""

    def __init__(self) -> None:
        self.began = trio.current_time()

    @property
    def ready_bytes(self) -> int:
        return int(trio.current_time() - self.began)

    async def more(self, than_bytes: int) -> int:
        await trio.sleep_until(self.began + than_bytes + 1)
        return self.ready_bytes


@in_expert_world(experts_run(timeout_s=3.0))
async def test_an_answer_that_drips_is_cut_off_at_the_deadline_and_its_host_named(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    dripping, honest, caller = scene.peers
    await dripping.host(A)
    await honest.host(B)

    async def drip(call: Incoming[Any]) -> Answer[Any]:
        await trio.lowlevel.checkpoint()
        return Answer(Output(0, 0), (dataclasses.replace(GOOD, ready=Drops()),))

    dripping.forward = drip
    began = trio.current_time()
    with pytest.raises(TooFewExperts):
        await caller.client.forward(asks_for([A]), 2)
    assert trio.current_time() - began < 3.5
    assert len(named(caplog, dripping)) == 1
    began = trio.current_time()
    replies = await caller.client.forward(asks_for([B]), 2)
    assert replies != [None]
    assert trio.current_time() - began < 1.0


@in_expert_world()
async def test_experts_that_a_host_announces_and_does_not_serve_are_passed_over(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest, caller = scene.peers
    everything = [Uid(0, (a, b)) for a in (1, 2) for b in range(4)]
    await honest.host(A, B)
    liar.serve()
    await liar.directory.announce(announcements(caller.directory.grid, everything, generation=1))
    answered, rounds = list[Uid](), 0
    while sorted(answered) != [A, B]:
        rounds += 1
        uids = await scored(caller, 8)
        try:
            replies = await caller.client.forward(asks_for(uids), 2)
        except TooFewExperts:
            continue
        answered = [uid for uid, reply in zip(uids, replies, strict=True) if reply is not None]
    assert rounds <= 4
    assert len(named(caplog, liar)) == 8
    assert all("is not here" in line for line in named(caplog, liar))


@in_expert_world()
async def test_a_host_that_announces_and_speaks_no_such_protocol_is_passed_over(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest, caller = scene.peers
    await honest.host(B)
    await liar.directory.announce(announcements(caller.directory.grid, [A]))
    assert await scored(caller) == [B, A]
    replies = await caller.client.forward(asks_for([B, A]), 2)
    assert [reply is None for reply in replies] == [False, True]
    assert len(named(caplog, liar)) == 1
    assert await scored(caller) == [B]


@in_expert_world()
async def test_where_two_hosts_claim_one_expert_and_the_winner_fails_the_other_is_asked(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest, caller = scene.peers
    await honest.host(A)
    await liar.host(A, generation=1 << 50)
    liar.forward = with_frames(frame(2, math.nan), generation=1 << 50)
    with pytest.raises(TooFewExperts):
        await caller.client.forward(asks_for([A]), 2)
    assert honest.seen == [], "one call does not go to two hosts"
    assert len(named(caplog, liar)) == 1
    (reply,) = await caller.client.forward(asks_for([A]), 2)
    assert reply is not None
    assert (reply.served.host, values_of(reply.frame)) == (honest.node.id.text, [2.0])


@in_expert_world()
async def test_while_all_experts_of_a_prefix_are_dead_those_of_others_are_chosen(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    dead, honest, caller = scene.peers
    await dead.host(Uid(0, (3, 0)), Uid(0, (3, 3)))
    await honest.host(A, B)
    assert await scored(caller, 2) == [Uid(0, (3, 3)), B]
    await scene.world.kill(dead.node)
    with pytest.raises(TooFewExperts, match="unreachable") as caught:
        await caller.client.forward(asks_for([Uid(0, (3, 3)), Uid(0, (3, 0))]), 2)
    assert dead.node.id.short in str(caught.value)
    assert len(named(caplog, dead)) == 1
    assert await scored(caller, 2) == [B, A]
    replies = await caller.client.forward(asks_for([A, B]), 2)
    assert None not in replies
