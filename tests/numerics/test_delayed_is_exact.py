"""A delayed run steps with the gradients as they were computed, of parameters that are one step old at most.

The oracle is plain torch, replaying what the peers' own books say of every microbatch that a commit counted: which
parameters were there when each stage went forward, and when it went back. In one stage both are the same.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import trio

from peerd.compute.model import whole_model
from peerd.compute.served import ServedStage
from peerd.core.runfile import RunFile
from peerd.core.training import Mb
from roles.backbone import BackboneRole
from roles.trainer import TrainerRole
from tests.kit.exact import STEPS, Batches, differences, run_file, stepping, write_texts
from tests.kit.training import Peer, Swarm, events, swarm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.no_watchdog("several peers and the threads of their workers share one interpreter"),
]


class Ages(Batches):
    """Also with which step's parameters each microbatch was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[int, dict[Mb, int]] = {}

    def _record(self, served: ServedStage, step: int) -> None:
        super()._record(served, step)
        for mb, kept in served._held.items():
            self.at.setdefault(step, {})[mb] = kept.at

    def ages(self) -> set[int]:
        return {step - at for step, book in self.at.items() for at in book.values()}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Ages:
    book = Ages()
    book.watch(monkeypatch)
    torch.set_num_threads(1)
    return book


def delayed(run: RunFile) -> RunFile:
    return msgspec.structs.replace(run, optimizer=msgspec.structs.replace(run.optimizer, delayed=True))


def replayed(run: RunFile, batches: Ages) -> torch.nn.Module:
    """The same steps in one process."""
    model = whole_model(run)
    parameters = list(model.parameters())
    make_step = stepping(parameters, run.optimizer)
    past = [[p.detach().clone() for p in parameters]]  # before each step
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in parameters]
        order, samples = sorted(batches.inputs[step]), 0
        for mb in order:
            tokens, targets = batches.inputs[step][mb], batches.targets[step][mb]
            with torch.no_grad():
                for p, value in zip(parameters, past[batches.at[step][mb]], strict=True):
                    p.copy_(value)
            model.zero_grad()
            logits = model(tokens)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            for total, p in zip(sums, parameters, strict=True):
                total += p.grad * len(tokens)
            samples += len(tokens)
        with torch.no_grad():
            for p, value, total in zip(parameters, past[step], sums, strict=True):
                p.copy_(value)
                p.grad = total / samples
        make_step()
        past.append([p.detach().clone() for p in parameters])
    return model


async def finished(s: Swarm, peers: list[Peer]) -> None:
    with trio.move_on_after(60) as limit:
        for peer in peers:
            await peer.finished.wait()
    assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
async def test_delayed_replicas_train_like_one_process_that_replays_them(
    tmp_path: Path, batches: Ages, optimizer: str, dtype: str
) -> None:
    run = delayed(run_file(optimizer, dtype, write_texts(tmp_path), stages=1))
    async with swarm(tmp_path / "peers") as s:
        await s.start("backbone", BackboneRole, None)
        peers = [await s.start(f"replica{i}", TrainerRole, run) for i in range(3)]
        await finished(s, peers)
        replicas = [peer.role._replica._served.module for peer in peers]
        losts = [peer.role.status()["microbatches"]["lost"] for peer in peers]
    assert batches.faults(per_step=8) == []
    assert batches.ages() == {0, 1}
    assert losts == [0, 0, 0]
    plain = await trio.to_thread.run_sync(replayed, run, batches)
    done = [replica for replica in replicas if replica.step == STEPS]
    assert done
    for replica in done:
        assert differences(run, plain, [replica]) == []
