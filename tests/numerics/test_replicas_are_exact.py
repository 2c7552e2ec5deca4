"""Data parallel training by unequal, unreliable peers gives the parameters that one plain torch process gives.

Four replicas, of which one takes twice and one five times as long for a microbatch; then with a peer that dies in
every step and another that takes its place. In virtual time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.messages.swarm import Mb
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import RunFile
from tests.kit.amount import few
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.roles.training import Peer, all_finished, events, replicas, swarm

SLOWER = {2: 2, 3: 5}  # times as long for a microbatch, by replica

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    few(itertools.product(("sgd", "adamw", "lamb"), ("float32", "float64")), ("adamw", "float32"), ("lamb", "float64")),
)
async def test_unequal_replicas_train_like_one_process(
    tmp_path: Path, batches: Batches, optimizer: str, dtype: str
) -> None:
    run = run_file(optimizer, dtype, write_texts(tmp_path), stages=1)
    async with swarm(tmp_path / "peers") as s:
        peers = await replicas(s, run, 4)
        for number, factor in SLOWER.items():
            peers[number].role._ctx.worker("cpu").microbatch_s *= factor
        await all_finished(s, peers)
        modules = [peer.role.replica.post.served.module for peer in peers]
    assert batches.faults(per_step=8) == []
    done_by = Counter(mb.trainer for mbs in batches.inputs.values() for mb in mbs)
    assert done_by.total() == 8 * STEPS
    assert done_by[peers[3].host.id.text] < done_by[peers[0].host.id.text], "the slowest computes fewer"
    plain = plain_torch(run, batches)
    done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


async def test_survivors_agree_bit_for_bit_though_a_peer_dies_in_every_step(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=1)
    deaths = Deaths(monkeypatch)
    async with swarm(tmp_path / "peers") as s:
        living = await replicas(s, run, STEPS + 2)
        for step in range(STEPS):
            with trio.move_on_after(200) as limit:
                victim = await deaths.first_to_hold_something(living, step)
            assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))
            victim.kill()
            living.remove(victim)
        await all_finished(s, living)
        modules = [peer.role.replica.post.served.module for peer in living]
    assert batches.faults(per_step=8) == []
    plain = plain_torch(run, batches)
    assert len(modules) == 2
    done = [module for module in modules if module.step == STEPS]
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


class Deaths:
    """Tells which peer has accumulated something of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._since, self._holder, self._found = 0, None, trio.Event()
        original = ServedStage.backward

        def backward(served: ServedStage, step: int, mb: Mb, tensors: Any, frames: Any, *more: Any) -> Any:
            outcome = original(served, step, mb, tensors, frames, *more)
            if step >= self._since and self._holder is None:
                self._holder = served
                self._found.set()
            return outcome

        monkeypatch.setattr(ServedStage, "backward", backward)

    async def first_to_hold_something(self, living: list[Peer], step: int) -> Peer:
        """A living peer that holds a microbatch of `step`, or of a later one."""
        while True:
            self._since, self._holder, self._found = step, None, trio.Event()
            await self._found.wait()
            for peer in living:
                if peer.role.replica.post.state.model is self._holder:
                    assert self._holder.held
                    return peer


def test_a_run_without_a_pipeline_has_one_stage() -> None:
    assert RunFile(run="x").pipeline.stages == 1
