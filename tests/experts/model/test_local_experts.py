"""Experts in this process, with which tests and benchmarks compare those of other peers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from peerd.core.errors import TooFewExperts
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.run.expert_network import ExpertCall, ExpertReply
from peerd.run.grid import Uid
from tests.kit.expert_runs import WIDTH, expert_run, frame
from tests.kit.local_experts import LocalExperts

UID = Uid(0, (1, 2))
ASK = ExpertCall(UID, (0, 1), (frame(2, WIDTH),))


def scores(sides: list[int], samples: int = 5) -> list[np.ndarray]:
    stream = np.random.default_rng(0)
    return [stream.normal(size=(samples, side)).astype(np.float32) for side in sides]


@pytest.mark.parametrize("sides", [[6], [4, 5], [3, 2, 4]])
def test_the_best_experts_of_each_sample_come_best_first(sides: list[int]) -> None:
    local = LocalExperts(expert_run(grid=sides, layers=2))
    given = scores(sides)
    chosen = local.choose(1, given, 4)
    for sample, uids in enumerate(chosen):
        every = [Uid(1, at) for at in itertools.product(*map(range, sides))]
        every.sort(key=lambda uid: -sum(float(part[sample, c]) for part, c in zip(given, uid.at, strict=True)))
        assert uids == every[:4]


def test_the_dead_are_never_chosen_and_few_may_live() -> None:
    local = LocalExperts(expert_run(grid=[3]))
    local.dead = {Uid(0, (0,)), Uid(0, (2,))}
    assert local.choose(0, scores([3]), 2) == [[Uid(0, (1,))]] * 5


def test_an_experts_answers_are_those_of_a_hosted_one() -> None:
    run = expert_run()
    local, expert = LocalExperts(run), HostedExpert(run, UID)
    (reply,) = local.forward([ASK], 2)
    assert reply is not None
    assert reply.frame == expert.forward(list(ASK.frames))[0]
    (slope,) = local.backward([ExpertCall(UID, (0, 1), (*ASK.frames, frame(2, WIDTH, seed=1)), reply.served)])
    assert slope is not None
    assert slope.frame == expert.backward([(ASK.frames[0], frame(2, WIDTH, seed=1))])[0]
    assert (slope.served.version, slope.stale) == (1, 0)


def backward(local: LocalExperts, reply: ExpertReply) -> ExpertReply | None:
    return local.backward([ExpertCall(UID, (0, 1), (*ASK.frames, frame(2, WIDTH)), reply.served)])[0]


def test_updates_of_others_since_the_forward_are_counted_and_may_be_too_many() -> None:
    local = LocalExperts(expert_run(most_stale=1))
    replies = [reply for _ in range(3) for reply in local.forward([ASK], 2) if reply is not None]
    found = [backward(local, reply) for reply in replies]
    assert [reply and reply.stale for reply in found] == [0, 1, None]
    assert local.expert(UID).version == 2


def test_a_sample_with_too_few_answers_is_an_error() -> None:
    local = LocalExperts(expert_run(), answers=lambda ask: False)
    with pytest.raises(TooFewExperts, match=r"0\.1\.2"):
        local.forward([ASK], 2)


def test_an_expert_outside_the_grid_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"0\.4\.0"):
        LocalExperts(expert_run()).expert(Uid(0, (4, 0)))
