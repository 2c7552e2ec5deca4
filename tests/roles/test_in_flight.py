"""Open microbatches of a replica: enough for the time until the next answer, and no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from peerd.run.runfile import BatchSection, LimitsSection, OptimizerSection, PipelineSection, RunFile
from roles import trainer
from roles.trainer import TrainerRole


def role(
    answer_s: float = 0.1, *, delayed: bool = True, target: int = 1024, wanted: int = 0, rate: float = 100.0
) -> TrainerRole:
    """A trainer of its own replica, by what `in_flight` looks at: microbatches of 4 samples, `rate` samples/s."""
    found = TrainerRole.__new__(TrainerRole)
    found._run = RunFile(
        run="test",
        pipeline=PipelineSection(microbatch=4),
        optimizer=OptimizerSection(delayed=delayed),
        batch=BatchSection(target_samples=target),
        limits=LimitsSection(microbatches_in_flight=wanted),
    )
    found._pipeline = SimpleNamespace(peers=lambda: 1)  # type: ignore[assignment]
    found._is_replica = True
    found._flights = None
    found._services = SimpleNamespace(calls=SimpleNamespace(samples_per_s=lambda stage: rate))  # type: ignore[assignment]
    found._contributor = SimpleNamespace(answer_s=answer_s)  # type: ignore[assignment]
    return found


def test_a_synchronous_replica_has_few_open_however_long_answers_take() -> None:
    assert role(10.0, delayed=False).in_flight() == trainer._REPLICA_IN_FLIGHT


@pytest.mark.parametrize(("answer_s", "count"), [(0.1, 8), (0.41, 24), (0.2, 13)])
def test_a_delayed_replica_has_as_many_open_as_it_computes_in_two_answers_and_tells_together(
    answer_s: float, count: int
) -> None:
    assert role(answer_s).told_together() == 3  # 40 ms each
    assert role(answer_s).in_flight() == count


def test_what_takes_long_is_told_by_itself() -> None:
    assert role(rate=10.0).told_together() == 1
    assert role(0.1, rate=10.0).in_flight() == 2


def test_whoever_has_others_wait_for_it_tells_each_by_itself() -> None:
    assert role(delayed=False).told_together() == 1
    assert role(wanted=8).told_together() == 1
    of_a_pipeline = role()
    of_a_pipeline._is_replica = False
    assert of_a_pipeline.told_together() == 1


def test_a_small_batch_is_not_told_half_at_a_time() -> None:
    assert role(rate=1e6).told_together() == trainer._DELAYED_IN_FLIGHT // 2
    assert role(rate=1e6, target=32).told_together() == 2
    assert role(rate=1e6, target=8).told_together() == 1


def test_it_is_never_more_than_half_of_the_batch_nor_than_may_be_open_at_all() -> None:
    assert role(60.0, target=64).in_flight() == max(trainer._REPLICA_IN_FLIGHT, 64 // 4 // 2)
    assert role(60.0, target=1 << 20).in_flight() == trainer._DELAYED_IN_FLIGHT


def test_before_its_rate_is_known_a_replica_asks_for_little() -> None:
    assert role(0.1, rate=0.0).in_flight() == trainer._REPLICA_IN_FLIGHT


def test_what_the_run_file_says_counts() -> None:
    assert role(60.0, wanted=3).in_flight() == 3


def test_a_replica_that_takes_the_state_over_has_nothing_open() -> None:
    newcomer = role()
    newcomer._pipeline = SimpleNamespace(peers=lambda: 0)  # type: ignore[assignment]
    assert newcomer.in_flight() == 0
