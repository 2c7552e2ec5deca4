"""Faults of the `experts` section: each names its key, what was found and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from peerd.run.check import check
from peerd.run.runfile import (
    ExpertOptimizerSection,
    ExpertsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
    fingerprint,
    shared_text,
)


def told(run: RunFile) -> list[str]:
    return [f"{path} {message}" for path, message in check(run)]


def test_the_defaults_and_usual_values_are_right() -> None:
    assert told(RunFile(run="r", experts=ExpertsSection())) == []
    assert (
        told(RunFile(run="r", experts=ExpertsSection(block="mine.py:expert", input=[3, 4], output=[5], grid=[8]))) == []
    )
    assert told(RunFile(run="r", experts=ExpertsSection(block="transformer", grid=[4, 4, 4], dtype="bfloat16"))) == []


@pytest.mark.parametrize(
    ("values", "key", "part"),
    [
        ({"block": "ff"}, "block", "allowed: ffn, ffn1, transformer, or module:function"),
        ({"block_digest": "0" * 64}, "block_digest", "is of a function's source"),
        ({"block_digest": "x"}, "block_digest", "is not a SHA-256"),
        ({"hidden": -1}, "hidden", "allowed: 0"),
        ({"heads": 0}, "heads", "allowed: 1"),
        ({"layers": -1}, "layers", "allowed: 0"),
        ({"grid": []}, "grid", "allowed: 1 to 3 numbers"),
        ({"grid": [1]}, "grid", "allowed: 1 to 3 numbers from 2"),
        ({"grid": [2, 2, 2, 2]}, "grid", "allowed: 1 to 3 numbers"),
        ({"grid": [1024, 1024, 1024], "layers": 2}, "grid", "allowed: up to"),
        ({"top_k": 0}, "top_k", "allowed: 1 to 64"),
        ({"top_k": 5, "grid": [4]}, "top_k", "allowed: 1 to 4"),
        ({"input": [0]}, "input", "allowed: up to 6 numbers"),
        ({"input": [4], "output": [5]}, "output", "leave it out"),
        ({"block": "transformer", "input": [4]}, "input", "[tokens, width]"),
        ({"k_min": 5}, "k_min", "allowed: 1 to top_k (4)"),
        ({"most_stale": -2}, "most_stale", "allowed: -1"),
        ({"max_batch": 0}, "max_batch", "allowed: 1"),
        ({"max_batch": 1 << 20, "input": [1024]}, "max_batch", "bytes together"),
        ({"dtype": "bfloat16", "code": "int8"}, "code", "allowed for samples in bfloat16: none, bf16"),
        ({"balance": -1.0}, "balance", "allowed: 0"),
        ({"timeout_s": 0.0}, "timeout_s", "allowed: 0.1"),
        ({"grace_s": 11.0}, "grace_s", "allowed: 0 to timeout_s (10.0)"),
        ({"announce_s": 0.1}, "announce_s", "allowed: 0.5"),
        ({"checkpoint_s": 0.0}, "checkpoint_s", "allowed: 0.1"),
        ({"checkpoint_updates": 0}, "checkpoint_updates", "allowed: 1"),
        ({"copies": 17}, "copies", "allowed: 0 to 16"),
        ({"optimizer": ExpertOptimizerSection(lr=0.0)}, "optimizer.lr", "must be above 0"),
        ({"optimizer": ExpertOptimizerSection(name="adamw", momentum=0.5)}, "optimizer.momentum", "leave it out"),
        ({"optimizer": ExpertOptimizerSection(decay="cosine")}, "optimizer.decay", "needs total_updates"),
    ],
)
def test_a_senseless_value_is_named(values: dict[str, Any], key: str, part: str) -> None:
    found = [one for one in told(RunFile(run="r", experts=ExpertsSection(**values))) if part in one]
    assert found, told(RunFile(run="r", experts=ExpertsSection(**values)))
    assert found[0].startswith(f"experts.{key} ")


def test_experts_go_with_one_stage_and_with_layers_of_their_own() -> None:
    staged = RunFile(run="r", experts=ExpertsSection(), pipeline=PipelineSection(stages=2))
    assert any("a run with experts has 1" in one for one in told(staged))
    shared = RunFile(run="r", experts=ExpertsSection(), model=ModelSection(share_layers=True))
    assert any("model.share_layers is true" in one for one in told(shared))


def with_trunk(*, experts: bool = True, **keys: Any) -> RunFile:
    return RunFile(run="r", optimizer=OptimizerSection(**keys), experts=ExpertsSection() if experts else None)


def test_an_asynchronous_trunk_is_for_runs_with_experts_and_bounds_how_old_gradients_are() -> None:
    assert told(with_trunk(trunk="asynchronous")) == []
    assert told(with_trunk(trunk="asynchronous", most_stale=1)) == []
    assert told(with_trunk(trunk="asynchronous", experts=False)) == [
        "optimizer.trunk is asynchronous, but the run has no experts, and so no trunk; allowed: synchronous"
    ]
    assert told(with_trunk(trunk="asynchronous", delayed=True)) == [
        "optimizer.delayed is true, but an asynchronous trunk does not wait for averaging in any case; leave it out"
    ]
    assert told(with_trunk(trunk="asynchronous", most_stale=0)) == [
        "optimizer.most_stale is 0; allowed: 1 to 65536 steps"
    ]
    assert told(with_trunk(most_stale=8)) == [
        "optimizer.most_stale is 8, but optimizer.trunk is synchronous: no gradient is that old; leave it out"
    ]


def test_the_trunk_is_a_part_of_the_fingerprint_where_it_is_asynchronous() -> None:
    runs = [with_trunk(), with_trunk(trunk="asynchronous"), with_trunk(trunk="asynchronous", most_stale=8)]
    assert len({fingerprint(run) for run in runs}) == 3
    assert b"trunk" not in shared_text(runs[0])
    assert b"most_stale" not in shared_text(with_trunk(experts=False))
