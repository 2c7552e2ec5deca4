"""Members of one stage say equal digests of the sum that lies ready, however their gradients travelled."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerd.messages.swarm import Prepare
from peerd.pipeline.stage.orders import PostOrders
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import AveragingSection, OptimizerSection
from tests.kit.amount import thorough
from tests.kit.exact import run_file, write_texts
from tests.worlds.roles.training import all_finished, replicas, swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


@pytest.mark.parametrize(
    "averaging",
    [
        thorough(AveragingSection(), id="lossless"),
        pytest.param(AveragingSection(code="int8"), id="int8"),
        thorough(AveragingSection(code="powersgd", rank=2), id="powersgd"),
        thorough(AveragingSection(group_size=3), id="grid"),  # four make a grid of two by two
    ],
)
async def test_all_members_say_one_digest_of_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaging: AveragingSection
) -> None:
    said: dict[tuple[int, bytes], dict[str, bytes]] = defaultdict(dict)
    prepare = PostOrders.prepare

    async def noting(orders: PostOrders, call: Incoming[Prepare]) -> Answer[Any]:
        answer = await prepare(orders, call)
        if answer.body.ok:
            said[call.body.step, call.body.attempt][orders._ctx.host.id.text] = answer.body.digest
        return answer

    monkeypatch.setattr(PostOrders, "prepare", noting)
    run = run_file("adamw", "float32", write_texts(tmp_path), stages=1)
    optimizer: OptimizerSection = msgspec.structs.replace(run.optimizer, total_steps=4)
    run = msgspec.structs.replace(run, averaging=averaging, optimizer=optimizer)
    async with swarm(tmp_path / "peers") as s:
        await all_finished(s, await replicas(s, run, 4))
    shared = [found for found in said.values() if len(found) > 1]
    assert shared
    for found in shared:
        (one,) = set(found.values())
        assert len(one) == 32
    by_step = {step: next(iter(found.values())) for (step, _), found in said.items()}
    assert len(set(by_step.values())) == len(by_step) == 4  # each step has a sum of its own
