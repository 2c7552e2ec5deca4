"""Memory of experts, and how many fit."""

from __future__ import annotations

from typing import Any

import msgspec
import psutil
import pytest
import torch

from peerd.experts.model import memory
from peerd.experts.model.blocks import block_outline, build_block
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.experts.model.memory import expert_footprint, experts_that_fit, kept_for_backward
from peerd.run.grid import Uid
from peerd.run.runfile import LimitsSection, RunFile
from tests.kit.expert_runs import WIDTH, expert_run

UID = Uid(0, (0, 0))


def limited(run: RunFile, **limits: Any) -> RunFile:
    return msgspec.structs.replace(run, limits=LimitsSection(**limits))


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.5}, {"name": "adamw"}])
def test_an_expert_holds_what_its_footprint_says(optimizer: dict[str, Any]) -> None:
    run = expert_run(optimizer=optimizer)
    assert expert_footprint(run).held_bytes == HostedExpert(run, UID).nbytes


def test_the_footprint_of_a_huge_expert_takes_no_memory() -> None:
    taken = expert_footprint(expert_run(hidden=1 << 17))
    assert taken.held_bytes > 60e9
    assert taken.job_bytes > 3 * taken.held_bytes


@pytest.mark.parametrize(("block", "sample"), [("ffn", [WIDTH]), ("ffn1", [WIDTH]), ("transformer", [4, WIDTH])])
def test_what_a_backward_keeps_is_the_same_by_shapes_as_by_values(block: str, sample: list[int]) -> None:
    run = expert_run(block=block, input=sample, heads=2)
    by_shapes = kept_for_backward(run, block_outline(run))
    assert by_shapes == pytest.approx(kept_for_backward(run, build_block(run, UID)), rel=0.3)
    least = 4 * torch.Size(sample).numel() // WIDTH * 16  # the hidden units alone
    assert least < by_shapes < 40 * least


def test_limits_experts_decides_alone() -> None:
    run = limited(expert_run(), experts=5, memory_gb=0.001)
    assert experts_that_fit(run) == 5
    assert experts_that_fit(run, hosted=3) == 2
    assert experts_that_fit(run, hosted=9) == 0


def test_never_more_than_the_grid_has() -> None:
    assert experts_that_fit(limited(expert_run(), experts=1000)) == 16
    assert experts_that_fit(expert_run(layers=2), hosted=30) <= 2


def test_memory_gb_counts_what_the_process_holds_already() -> None:
    run = expert_run(hidden=1024, grid=[100], max_batch=1)
    taken = expert_footprint(run)
    held = psutil.Process().memory_info().rss
    room = held + taken.job_bytes + taken.snapshot_bytes + 10.5 * taken.held_bytes
    assert 9 <= experts_that_fit(limited(run, memory_gb=room / 1e9)) <= 10  # the process itself may grow meanwhile
    assert experts_that_fit(limited(run, memory_gb=held / 2e9)) == 0


def test_without_a_limit_a_share_of_what_is_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = expert_run(hidden=1024, grid=[100], max_batch=1)
    taken = expert_footprint(run)

    class Free:
        available = (taken.job_bytes + taken.snapshot_bytes + 7.5 * taken.held_bytes) / memory.FREE_SHARE

    monkeypatch.setattr(memory.psutil, "virtual_memory", Free)
    assert experts_that_fit(run) == 7
