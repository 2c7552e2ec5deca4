"""Rounds of calls to hosts that fail in every way at random: each ends in time, what comes back is right, and nobody is
asked twice for an update.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio

from peerd.core.errors import Overloaded, Refused, TooFewExperts
from peerd.messages.experts import Output
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.expert_network import ExpertCall
from peerd.run.grid import Uid
from tests.worlds.network.expertworld import ExpertPeer, ExpertWorld, experts_run, frame, in_expert_world, values_of

TIMEOUT_S, SAMPLES = 4.0, 6


async def moody(host: ExpertPeer, rng: random.Random, updates: Counter[bytes], call: Incoming[Any]) -> Answer[Any]:
    """A host that fails now and then, and may be late with an answer."""
    await trio.sleep(rng.expovariate(8.0))
    mood = rng.random()
    if mood < 0.04:
        await trio.sleep_forever()
    if mood < 0.08:
        raise Refused("not today")
    if mood < 0.14:
        raise Overloaded("later", rng.random())
    answer = host.answer(call)
    if hasattr(call.body, "request"):
        updates[call.body.request] += 1
    if mood < 0.18:
        return Answer(answer.body, (frame(len(call.frames[0].payload), 1.0),))
    if mood < 0.22 and isinstance(answer.body, Output):
        return Answer(answer.body, (frame(call.frames[0].shape[0], float("nan")),))
    return answer


async def one_round(caller: ExpertPeer, scores: np.random.Generator) -> str:
    chosen = await caller.client.choose(0, [scores.standard_normal((SAMPLES, 4), np.float32) for _ in range(2)], 3)
    rows = dict[Uid, list[int]]()
    for sample, uids in enumerate(chosen):
        for uid in uids:
            rows.setdefault(uid, []).append(sample)
    asks = [ExpertCall(uid, tuple(samples), (frame(len(samples), 7.0),)) for uid, samples in rows.items()]
    began = trio.current_time()
    try:
        replies = await caller.client.forward(asks, SAMPLES)
    except TooFewExperts:
        return "too few"
    finally:
        assert trio.current_time() - began <= TIMEOUT_S + 0.01
    answered = [(ask, reply) for ask, reply in zip(asks, replies, strict=True) if reply is not None]
    assert {sample for ask, _ in answered for sample in ask.samples} == set(range(SAMPLES))
    assert all(values_of(reply.frame) == [14.0] for _, reply in answered)
    backs = [ExpertCall(a.uid, a.samples, (*a.frames, frame(len(a.samples), 2.0)), r.served) for a, r in answered]
    began = trio.current_time()
    gradients = await caller.client.backward(backs)
    assert trio.current_time() - began <= TIMEOUT_S + 0.01
    assert all(values_of(reply.frame) == [6.0] for reply in gradients if reply is not None)
    return "whole" if None not in gradients else "in part"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@in_expert_world(experts_run(timeout_s=TIMEOUT_S, announce_s=600.0), count=5)
async def test_whatever_hosts_do_each_round_ends_in_time_and_what_comes_back_is_right(
    scene: ExpertWorld, seed: int
) -> None:
    outcomes, updates = Counter[str](), Counter[bytes]()
    *hosts, caller = scene.peers
    grid = [Uid(0, (a, b)) for a in range(4) for b in range(4)]
    for number, host in enumerate(hosts):
        host.forward = host.backward = functools.partial(moody, host, random.Random(seed + number), updates)
        await host.host(*grid[number :: len(hosts)])

    async def trainer(number: int) -> None:
        scores = np.random.default_rng([seed, number])
        for _ in range(6):
            outcomes[await one_round(caller, scores)] += 1

    async with trio.open_nursery() as nursery:
        await nursery.start(caller.directory.run)
        async with trio.open_nursery() as trainers:
            for number in range(6):
                trainers.start_soon(trainer, number)
        nursery.cancel_scope.cancel()
    assert sum(outcomes.values()) == 36, f"seed {seed}"
    assert outcomes["whole"] + outcomes["in part"] >= 18, f"seed {seed}: {outcomes}"
    assert set(updates.values()) <= {1}, "a request is made once, unless its link was lost"
