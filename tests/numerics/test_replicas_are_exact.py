"""Data parallel training by unequal, unreliable peers gives the parameters that one plain torch process gives.

Four replicas over TCP, of which one takes twice and one five times as long for a microbatch; then with a peer that
dies in every step and another that takes its place.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.compute.model.served_stage import ServedStage
from peerd.core.messages.swarm import Mb
from peerd.core.run.runfile import RunFile
from roles.backbone import BackboneRole
from roles.trainer import TrainerRole
from tests.kit.amount import few
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.kit.training import Peer, all_finished, events, swarm

SLOWER = {"replica2": 2, "replica3": 5}  # times as much work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.no_watchdog("several peers and the threads of their workers share one interpreter"),
]


def slow_down(peers: dict[str, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some replicas compute each microbatch several times over."""
    original = ServedStage.backward
    names = {peer.role.replica: name for name, peer in peers.items()}

    def backward(self: ServedStage, step: int, mb: Mb, tensors: Any, frames: Any, *more: Any) -> Any:
        name = next(
            (name for member, name in names.items() if member.post is not None and member.post.served is self), ""
        )
        for _ in range(SLOWER.get(name, 1) - 1):
            self.module.loss(*(tensor.long() for tensor in tensors))
        return original(self, step, mb, tensors, frames, *more)

    monkeypatch.setattr(ServedStage, "backward", backward)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    few(itertools.product(("sgd", "adamw", "lamb"), ("float32", "float64")), ("adamw", "float32"), ("lamb", "float64")),
)
async def test_unequal_replicas_train_like_one_process(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch, optimizer: str, dtype: str
) -> None:
    run = run_file(optimizer, dtype, write_texts(tmp_path), stages=1)
    async with swarm(tmp_path / "peers") as s:
        await s.start("backbone", BackboneRole, None)
        peers = [await s.start(f"replica{i}", TrainerRole, run) for i in range(4)]
        slow_down({peer.name: peer for peer in peers}, monkeypatch)
        await all_finished(s, peers)
        replicas = [peer.role.replica.post.served.module for peer in peers]
    assert batches.faults(per_step=8) == []
    assert sum(len(mbs) for mbs in batches.inputs.values()) == 8 * STEPS
    plain = await trio.to_thread.run_sync(plain_torch, run, batches)
    done = [replica for replica in replicas if replica.step == STEPS]  # its end may overtake a slow peer's leaving
    assert done
    for replica in done:
        assert differences(run, plain, [replica]) == []


async def test_survivors_agree_bit_for_bit_though_a_peer_dies_in_every_step(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=1)
    deaths = Deaths(monkeypatch)
    async with swarm(tmp_path / "peers") as s:
        await s.start("backbone", BackboneRole, None)
        living = [await s.start(f"replica{i}", TrainerRole, run) for i in range(STEPS + 2)]
        for step in range(STEPS):
            with trio.move_on_after(200) as limit:
                victim = await deaths.first_to_hold_something(living, step)
            assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))
            victim.kill()
            living.remove(victim)
        await all_finished(s, living)
        modules = [peer.role.replica.post.served.module for peer in living]
    assert batches.faults(per_step=8) == []
    plain = await trio.to_thread.run_sync(plain_torch, run, batches)
    assert len(modules) == 2
    done = [module for module in modules if module.step == STEPS]
    assert done
    for module in done:
        assert differences(run, plain, [module]) == []


class Deaths:
    """Tells which peer has accumulated something of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._since, self._holder, self._found = 0, None, trio.Event()
        original = ServedStage.backward
        token = trio.lowlevel.current_trio_token()

        def backward(served: ServedStage, step: int, mb: Mb, tensors: Any, frames: Any, *more: Any) -> Any:
            outcome = original(served, step, mb, tensors, frames, *more)
            with self._lock:
                if step >= self._since and self._holder is None:
                    self._holder = served
                    token.run_sync_soon(self._found.set)
            return outcome

        monkeypatch.setattr(ServedStage, "backward", backward)

    async def first_to_hold_something(self, living: list[Peer], step: int) -> Peer:
        """A living peer that holds a microbatch of `step`, or of a later one."""
        while True:
            with self._lock:
                self._since, self._holder, self._found = step, None, trio.Event()
            await self._found.wait()
            for peer in living:
                if peer.role.replica.post.state.model is self._holder:
                    return peer


def test_a_run_without_a_pipeline_has_one_stage() -> None:
    assert RunFile(run="x").pipeline.stages == 1
