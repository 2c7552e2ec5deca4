"""The stack of experts does what so many hosted ones do; trainers in simulated time end their batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peerd.compute.codec.frames import from_frame, to_frame
from peerd.compute.experts.hosted_expert import HostedExpert
from scripts.learning.expert_stack import ExpertStack, uids_of
from scripts.learning.trainers import Layers, Swarm, Weather
from scripts.learning.trunks import SmallTrunk
from tests.kit.expert_runs import WIDTH, expert_run, values

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("optimizer", [{}, {"clip_norm": 0.1}, {"name": "adamw", "lr": 0.01}])
@pytest.mark.parametrize("block", ["ffn", "ffn1"])
def test_a_stack_of_experts_does_what_hosted_ones_do(optimizer: dict[str, Any], block: str) -> None:
    run = expert_run(optimizer=optimizer, block=block, grid=[2, 3], layers=2)
    stack, hosted = ExpertStack(run, 1), [HostedExpert(run, uid) for uid in uids_of(run, 1)]
    for step in range(5):
        rows, slopes = values(20, WIDTH, seed=step), 0.1 * values(20, WIDTH, seed=step + 100)
        experts = torch.randint(5, (20,), generator=torch.Generator().manual_seed(step))  # the last one has no rows
        outputs = stack.forward(rows, experts)
        back = stack.backward(rows, experts, slopes)
        for number, expert in enumerate(hosted[:5]):
            mine = experts == number
            if mine.any():
                x, slope = to_frame(rows[mine]), to_frame(slopes[mine])
                assert torch.allclose(outputs[mine], from_frame(expert.forward([x])[0]), atol=1e-5)
                assert torch.allclose(back[mine], from_frame(expert.backward([(x, slope)])[0]), atol=1e-5)
        assert stack.updates.tolist() == [expert.version for expert in hosted]


def swarm(weather: Weather) -> Swarm:
    run = expert_run(grid=[2, 2], layers=2, input=[WIDTH], top_k=2)
    return Swarm(SmallTrunk.of_digits(run), Layers.of(run), weather, 1e-3, 0)


def batches() -> Any:
    number = 0
    while True:
        number += 1
        yield values(8, 64, seed=number), torch.arange(8)


def test_all_batches_end_in_the_time_that_delays_take() -> None:
    one = swarm(Weather(4, 1.0, 0.1))
    ends: list[int] = []
    one.train(batches(), 20, ends.append)
    assert ends == list(range(1, 21))
    assert 2 < one.now_s < 15  # four at once, a second each
    assert all(int(stack.updates.sum()) > 0 for stack in one.layers.stacks)


def test_where_every_request_fails_nothing_is_learnt() -> None:
    one = swarm(Weather(2, 1.0, 1.0))
    given = (next(batches()) for _ in range(10))
    with pytest.raises(StopIteration):  # there are no more batches to begin
        one.train(given, 1, lambda _: None)
    assert one.failed == 9
    assert not any(int(stack.updates.sum()) for stack in one.layers.stacks)


def test_one_trainer_without_delay_or_failure_learns_a_batch_by_heart() -> None:
    one = swarm(Weather(1, 0.0, 0.0))
    batch = (values(8, 64), torch.arange(8))
    before = one.loss(batch, one.trunk.loss)
    one.train(iter([batch] * 41), 40, lambda _: None)
    assert one.loss(batch, one.trunk.loss) < 0.7 * before
