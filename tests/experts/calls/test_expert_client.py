"""Calls to experts: who is chosen, what answers bring, one deadline for all, and a backward that counts once."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import trio

from peerd.core.errors import LocalError, Overloaded, Refused, TooFewExperts
from peerd.messages.experts import Backward, Gradient
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.expert_network import ExpertCall, ExpertReply, ServedBy
from peerd.run.grid import Uid
from tests.worlds.network.expertworld import (
    ExpertPeer,
    ExpertWorld,
    asks_for,
    experts_run,
    frame,
    in_expert_world,
    values_of,
)

A, B, C = Uid(0, (1, 2)), Uid(0, (1, 3)), Uid(0, (2, 0))


def scores(samples: int = 1, sides: tuple[int, ...] = (4, 4)) -> list[np.ndarray]:
    """Higher coordinates are better."""
    return [np.tile(np.arange(side, dtype=np.float32), (samples, 1)) for side in sides]


def given(reply: ExpertReply | None) -> ExpertReply:
    assert reply is not None
    return reply


def after(ask: ExpertCall, reply: ExpertReply | None, gradient: float = 1.0) -> ExpertCall:
    """The backward that belongs to a forward."""
    rows = len(ask.samples)
    return ExpertCall(ask.uid, ask.samples, (*ask.frames, frame(rows, gradient)), given(reply).served)


def failed(peer: ExpertPeer) -> dict[str, int]:
    return dict(peer.client.figures.failed)


@in_expert_world()
async def test_the_best_live_experts_are_chosen_wherever_they_live(scene: ExpertWorld) -> None:
    one, two, caller = scene.peers
    await one.host(A, C)
    await two.host(B)
    found = await caller.client.choose(0, scores(2), 4)
    assert found == [[B, A, C]] * 2
    began = trio.current_time()
    assert await caller.client.choose(0, scores(), 1) == [[C]]
    assert trio.current_time() == began, "warm look-ups ask nobody"
    with pytest.raises(LocalError):
        await caller.client.choose(0, scores(), 0)


@in_expert_world()
async def test_a_forward_and_its_backward_bring_outputs_gradients_and_one_update(scene: ExpertWorld) -> None:
    one, two, caller = scene.peers
    await one.host(A, generation=3)
    await two.host(C)
    await caller.client.choose(0, scores(), 4)
    asks = asks_for([A, C])
    replies = await caller.client.forward(asks, 2)
    assert [values_of(given(reply).frame) for reply in replies] == [[2.0], [2.0]]
    assert given(replies[0]).served == ServedBy(one.node.id.text, 3, 0)
    backs = await caller.client.backward([after(a, r, 5.0) for a, r in zip(asks, replies, strict=True)])
    assert [values_of(given(reply).frame) for reply in backs] == [[15.0], [15.0]]
    assert (one.updates, two.updates) == ({A: 1}, {C: 1})
    assert given(backs[0]).served == ServedBy(one.node.id.text, 3, 1)
    assert given(backs[0]).stale == 0
    status = caller.client.status()
    assert (status["forwards"], status["backwards"], status["failed"], status["stale"]) == (2, 2, {}, 0.0)


@in_expert_world(count=2)
async def test_a_forward_finds_experts_that_it_has_not_looked_up(scene: ExpertWorld) -> None:
    host, caller = scene.peers
    await host.host(A)
    assert await caller.client.forward(asks_for([A]), 2) != [None]
    assert [uid for uids in await host.client.choose(0, scores(), 4) for uid in uids] == [A]
    assert await host.client.forward(asks_for([A]), 2) != [None], "a host may call itself"


@in_expert_world()
async def test_updates_of_others_between_forward_and_backward_are_told_as_staleness(scene: ExpertWorld) -> None:
    host, caller, other = scene.peers
    await host.host(A)
    (ask,) = asks_for([A])
    (mine,) = await caller.client.forward([ask], 2)
    for _ in range(3):
        (reply,) = await other.client.forward([ask], 2)
        await other.client.backward([after(ask, reply)])
    (back,) = await caller.client.backward([after(ask, mine)])
    assert (given(back).stale, given(back).served.version) == (3, 4)
    assert (caller.client.status()["stale"], caller.client.status()["stale_most"]) == (3.0, 3)


@in_expert_world(experts_run(most_stale=3), count=2)
async def test_the_bound_on_staleness_and_the_version_of_the_forward_travel_with_a_backward(scene: ExpertWorld) -> None:
    host, caller = scene.peers
    await host.host(A, generation=2)

    async def too_stale(call: Incoming[Any]) -> Answer[Any]:
        raise Refused("4 updates since the forward; at most 3 are accepted")

    host.backward = too_stale
    (ask,) = asks_for([A])
    replies = await caller.client.forward([ask], 2)
    assert await caller.client.backward([after(ask, replies[0])]) == [None]
    body = host.seen[-1]
    assert (body.most_stale, body.generation, body.version, len(body.request)) == (3, 2, 0, 16)
    assert failed(caller) == {"refused": 1}
    assert await caller.client.forward([ask], 2) != [None], "the expert is as well as it was"


@in_expert_world(experts_run(grace_s=0.25))
async def test_once_every_sample_has_enough_the_others_have_the_grace_and_no_more(scene: ExpertWorld) -> None:
    quick, slow, caller = scene.peers
    await quick.host(A)
    await slow.host(B)
    slow.forward = functools.partial(later, slow, 3.0)
    await caller.client.choose(0, scores(), 4)
    began = trio.current_time()
    replies = await caller.client.forward(asks_for([B, A]), 2)
    assert [reply is None for reply in replies] == [True, False]
    assert 0.25 <= trio.current_time() - began < 1.0
    assert (caller.client.figures.late, failed(caller)) == (1, {})
    replies = await caller.client.forward(asks_for([B]), 2)
    assert replies != [None], "where nobody else is asked there is time until the deadline"


async def later(host: ExpertPeer, delay_s: float, call: Incoming[Any]) -> Answer[Any]:
    await trio.sleep(delay_s)
    return host.answer(call)


@in_expert_world(experts_run(timeout_s=2.0), count=2)
async def test_experts_on_slow_machines_are_slow_and_not_lost(scene: ExpertWorld) -> None:
    """With a fixed limit, no step is ever made if each call takes longer than that."""
    host, caller = scene.peers
    await host.host(A)
    slow_s, failures = 14.0, 0
    host.forward = functools.partial(later, host, slow_s)
    host.backward = functools.partial(later, host, slow_s)
    asks, replies = asks_for([A]), list[ExpertReply | None]()
    while not replies:
        try:
            replies = await caller.client.forward(asks, 2)
        except TooFewExperts:
            failures += 1
            await trio.sleep(20.0)  # the host rests,
            await host.host(A)  # and announces its expert again
    assert failures == 3, "2, 4 and 8 seconds were too few, 16 are enough"
    for _ in range(3):
        await host.host(A)
        assert await caller.client.forward(asks, 2) != [None]
    assert await caller.client.backward([after(asks[0], replies[0])]) != [None]
    assert caller.client.status()["limit_s"] == pytest.approx(4 * slow_s, rel=0.05)


@in_expert_world(count=2)
async def test_a_sample_with_too_few_answers_is_an_error_that_names_the_experts_and_their_hosts(
    scene: ExpertWorld,
) -> None:
    host, caller = scene.peers
    await host.host(A, B)
    await caller.client.choose(0, scores(), 4)
    host.experts.remove(B)
    asks = [*asks_for([A], 1), ExpertCall(B, (0, 1), (frame(2),))]
    with pytest.raises(TooFewExperts) as caught:
        await caller.client.forward(asks, 2)
    text = str(caught.value)
    assert "sample 1 has 0 of 1 answers: expert 0.1.3 was refused: expert 0.1.3 is not here" in text
    assert host.node.id.short in text
    assert caller.client.status()["short"] == 1
    with pytest.raises(TooFewExperts, match="no expert was asked"):
        await caller.client.forward([], 1)


@in_expert_world(count=2)
async def test_a_host_that_is_busy_is_asked_again_when_it_says_so(scene: ExpertWorld) -> None:
    host, caller = scene.peers
    await host.host(A)
    times = list[float]()

    async def busy(call: Incoming[Any]) -> Answer[Any]:
        times.append(trio.current_time())
        if len(times) < 3:
            raise Overloaded("the queue is full", 0.5)
        return host.answer(call)

    host.forward = busy
    assert await caller.client.forward(asks_for([A]), 2) != [None]
    assert [round(b - a, 1) for a, b in itertools.pairwise(times)] == [0.5, 0.5]
    assert (failed(caller), caller.client.figures.repeats) == ({"overloaded": 2}, 2)
    assert caller.directory.owner(A) is not None


@in_expert_world()
async def test_a_backward_whose_link_is_lost_is_repeated_under_the_same_id_at_the_same_host(scene: ExpertWorld) -> None:
    host, caller, other = scene.peers
    await host.host(A)
    await other.host(B)
    kept = dict[bytes, Answer[Any]]()

    async def lose_first(call: Incoming[Any]) -> Answer[Any]:
        again = call.body.request in kept
        if not again:
            kept[call.body.request] = host.answer(call)
            for link in host.node.host.links.to(caller.node.id):
                await link.close("lost")
            await trio.sleep_forever()
        return kept[call.body.request]

    host.backward = lose_first
    (ask,) = asks_for([A])
    (reply,) = await caller.client.forward([ask], 2)
    (back,) = await caller.client.backward([after(ask, reply)])
    assert given(back).served == ServedBy(host.node.id.text, 0, 1)
    assert (host.updates, len(kept), caller.client.figures.repeats) == ({A: 1}, 1, 1)
    assert other.seen == [], "no other host is asked"


@in_expert_world(experts_run(timeout_s=5.0))
async def test_a_backward_goes_where_the_forward_was_answered_and_to_nobody_else_when_that_host_is_gone(
    scene: ExpertWorld,
) -> None:
    dead, adopter, caller = scene.peers
    await dead.host(A)
    (ask,) = asks_for([A])
    (reply,) = await caller.client.forward([ask], 2)
    await scene.world.kill(dead.node)
    await adopter.host(A, generation=1)
    assert await caller.client.backward([after(ask, reply)]) == [None]
    assert adopter.seen == []


@in_expert_world()
async def test_updates_that_an_expert_lost_with_its_host_are_counted(scene: ExpertWorld) -> None:
    first, second, caller = scene.peers
    await first.host(A)
    first.updates[A] = 40
    (ask,) = asks_for([A])
    (reply,) = await caller.client.forward([ask], 2)
    await caller.client.backward([after(ask, reply)])
    await first.directory.withdraw()
    second.updates[A] = 30
    await second.host(A, generation=1)
    await caller.directory.read([A.prefix])
    for _ in range(2):
        (again,) = await caller.client.forward([ask], 2)
        assert given(again).served == ServedBy(second.node.id.text, 1, 30)
    assert caller.client.status()["lost_updates"] == 11


@in_expert_world()
async def test_an_expert_that_has_moved_is_asked_at_its_new_host_in_the_same_round(scene: ExpertWorld) -> None:
    first, second, caller = scene.peers
    await first.host(A)
    await caller.client.choose(0, scores(), 4)
    asks = asks_for([A])
    (before,) = await caller.client.forward(asks, 2)
    first.experts.remove(A)
    await second.host(A, generation=1)
    (reply,) = await caller.client.forward(asks, 2)
    assert given(reply).served.host == second.node.id.text
    (back,) = await caller.client.backward([after(asks[0], before)])  # its forward was at the first
    assert given(back).served.host == second.node.id.text
    assert second.updates == {A: 1}
    assert [body.request for body in first.seen if isinstance(body, Backward)] == [
        body.request for body in second.seen if isinstance(body, Backward)
    ]
    assert await caller.client.choose(0, scores(), 4) == [[A]]


@in_expert_world()
async def test_an_expert_that_is_refused_and_has_not_moved_is_a_failure_that_is_looked_up_once(
    scene: ExpertWorld,
) -> None:
    first, _, caller = scene.peers
    await first.host(A)
    await caller.client.choose(0, scores(), 4)
    first.experts.remove(A)  # and goes on announcing it
    asked = len(first.seen)
    with pytest.raises(TooFewExperts):
        await caller.client.forward(asks_for([A]), 2)
    assert len(first.seen) == asked + 1


@in_expert_world()
async def test_many_rounds_in_flight_do_not_disturb_each_other(scene: ExpertWorld) -> None:
    one, two, caller = scene.peers
    await one.host(A, B)
    await two.host(C)
    done = list[int]()

    async def batch(number: int) -> None:
        (uids,) = await caller.client.choose(0, scores(), 3)
        asks = [ExpertCall(uid, (0,), (frame(1, number),)) for uid in uids]
        replies = await caller.client.forward(asks, 1)
        backs = await caller.client.backward([after(a, r, number) for a, r in zip(asks, replies, strict=True)])
        assert [values_of(given(reply).frame) for reply in replies] == [[2.0 * number]] * 3
        assert [values_of(given(back).frame) for back in backs] == [[3.0 * number]] * 3
        done.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(batch, number)
    assert sorted(done) == list(range(12))
    assert one.updates == {A: 12, B: 12}


@in_expert_world(count=2)
async def test_calls_that_cannot_be_made_are_our_own_fault(scene: ExpertWorld) -> None:
    host, caller = scene.peers
    await host.host(A)
    client = caller.client
    for uid in (Uid(0, (9, 9)), Uid(1, (1, 2)), Uid(0, (1,)), Uid(0, (1, 2, 3))):
        with pytest.raises(LocalError, match="no expert of the grid"):
            await client.forward(asks_for([uid]), 2)
    with pytest.raises(LocalError, match=r"3 samples for expert 0\.1\.2"):
        await client.forward([ExpertCall(A, (0, 1, 2), (frame(2),))], 3)
    with pytest.raises(LocalError, match="sample 7 of 2"):
        await client.forward([ExpertCall(A, (7, 0), (frame(2),))], 2)
    with pytest.raises(LocalError, match="without the host that answered"):
        await client.backward([ExpertCall(A, (0, 1), (frame(2), frame(2)))])
    assert host.seen == []


@in_expert_world(count=2)
async def test_an_old_generation_that_answers_a_backward_does_not_count(scene: ExpertWorld) -> None:
    host, caller = scene.peers
    await host.host(A, generation=2)

    async def older(call: Incoming[Any]) -> Answer[Any]:
        return Answer(Gradient(1, 7), host.answer(call).frames)

    host.backward = older
    (ask,) = asks_for([A])
    (reply,) = await caller.client.forward([ask], 2)
    assert await caller.client.backward([after(ask, reply)]) == [None]
    assert failed(caller) == {"invalid": 1}
