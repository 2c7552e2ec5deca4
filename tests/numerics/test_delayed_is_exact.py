"""A delayed run steps with the gradients as they were computed, of parameters that are one step old at most.

The oracle is plain torch, replaying what the peers' own books say: which microbatches a committed average was made of,
and which step's parameters each of them was computed with. Then with a conductor and a member that die while they hold
work for the next step.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peerd.messages.swarm import Mb, Prepare
from peerd.model.stage.served_stage import ServedStage
from peerd.pipeline.stage.orders import PostOrders
from peerd.run.runfile import RunFile
from tests.kit.amount import few
from tests.kit.exact import STEPS, Sample, differences, replayed, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.roles.training import Peer, all_finished, events, reaches, replicas, swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


class Books:
    """The samples in each step's average, by the peers of this process; `digests`: of all that made a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: dict[int, dict[Mb, Sample]] = {}
        self.digests: dict[int, set[bytes]] = {}
        self.faults: list[str] = []
        self._found = trio.Event()
        self._watched: list[ServedStage] = []
        self._since, self._holder = 0, None
        self._computed: dict[tuple[ServedStage, Mb], Sample] = {}
        self._parts: dict[bytes, dict[str, dict[Mb, Sample]]] = {}  # by attempt and member
        self._attempts: dict[ServedStage, tuple[bytes, list[str]]] = {}
        torch.set_num_threads(1)
        backward, commit, part_of = ServedStage.backward, ServedStage.commit, PostOrders._part_of

        def noting_backward(served: ServedStage, step: int, mb: Mb, tensors: Any, frames: Any, *more: Any) -> Any:
            new = mb not in (*served.held, *served.early)
            outcome = backward(served, step, mb, tensors, frames, *more)
            if new:
                tokens, targets = (tensor.long().clone() for tensor in tensors)
                self._computed[served, mb] = (tokens, targets, served.module.step)
            if served in self._watched and self._holder is None and step > served.module.step >= self._since:
                self._holder = served
                self._found.set()
            return outcome

        def noting_part(orders: PostOrders, order: Prepare) -> Any:
            found = part_of(orders, order)
            if not isinstance(found, list):
                part = {mb: self._computed[orders._state.served, mb] for mb in order.assigned}
                self._parts.setdefault(order.attempt, {})[orders._ctx.host.id.text] = part
                self._attempts[orders._state.served] = order.attempt, order.group
            return found

        def noting_commit(served: ServedStage, step: int, total: Any, samples: int) -> None:
            attempt, group = self._attempts[served]
            parts = [self._parts[attempt][peer] for peer in group]
            batch = {mb: sample for part in parts for mb, sample in part.items()}
            if sum(map(len, parts)) != len(batch) or self.batches.setdefault(step, batch).keys() != batch.keys():
                self.faults.append(f"step {step} was averaged of {sorted(batch)}")
            commit(served, step, total, samples)
            self.digests.setdefault(step, set()).add(served.module.digest())

        monkeypatch.setattr(ServedStage, "backward", noting_backward)
        monkeypatch.setattr(ServedStage, "commit", noting_commit)
        monkeypatch.setattr(PostOrders, "_part_of", noting_part)

    async def first_with_early_work(self, peers: list[Peer], since: int) -> Peer:
        """The first that computes something for a step after the one it stands at, which is `since` or a later one."""
        self._found, self._since, self._holder = trio.Event(), since, None
        self._watched = [peer.role.replica.post.state.model for peer in peers]
        await self._found.wait()
        assert self._holder.early
        return next(peer for peer in peers if peer.role.replica.post.state.model is self._holder)

    def ages(self) -> set[int]:
        """The ages, in steps, of the parameters that counted samples were computed with."""
        return {step - at for step, batch in self.batches.items() for _, _, at in batch.values()}

    def check(self) -> None:
        assert self.faults == []
        assert sorted(self.batches) == list(range(STEPS))
        assert {len(batch) for batch in self.batches.values()} == {8}
        counted = [mb for batch in self.batches.values() for mb in batch]
        assert len(counted) == len(set(counted))
        assert self.ages() == {0, 1}
        assert {step for step, found in self.digests.items() if len(found) != 1} == set()


def delayed(run: RunFile) -> RunFile:
    return changed(run, optimizer={"delayed": True})


async def compare(run: RunFile, books: Books, peers: list[Peer]) -> None:
    """All who made the last step have the parameters that the replay gives."""
    books.check()
    plain = replayed(run, books.batches, STEPS)
    modules = [peer.role.replica.post.served.module for peer in peers]
    done = [module for module in modules if module.step == STEPS]  # its end may overtake a slow peer's leaving
    assert done
    assert [difference for module in done for difference in differences(run, plain, [module])] == []


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    few(itertools.product(("sgd", "adamw", "lamb"), ("float32", "float64")), ("adamw", "float64")),
)
async def test_delayed_replicas_train_like_one_process_that_replays_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, dtype: str
) -> None:
    books = Books(monkeypatch)
    run = delayed(run_file(optimizer, dtype, write_texts(tmp_path), stages=1))
    async with swarm(tmp_path / "peers") as s:
        peers = await replicas(s, run, 3)
        await all_finished(s, peers)
        assert [peer.role.status()["microbatches"]["lost"] for peer in peers] == [0, 0, 0]
    await compare(run, books, peers)


async def test_a_conductor_and_a_member_die_with_early_work_and_the_others_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Books(monkeypatch)
    run = delayed(run_file("adamw", "float64", write_texts(tmp_path), stages=1))
    async with swarm(tmp_path / "peers") as s:
        living = await replicas(s, run, 4)
        for conducts, since in ((True, 2), (False, 5)):
            await reaches(s, living[0], since - 1)  # who conducts is settled by then
            with trio.move_on_after(200) as limit:
                acting = [peer for peer in living if peer.role.replica._services.conducting.acting]
                candidates = acting if conducts else [peer for peer in living if peer not in acting]
                victim = await books.first_with_early_work(candidates, since)
            assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))
            victim.kill()
            living.remove(victim)
        await all_finished(s, living)
        assert [peer.role.status()["microbatches"]["lost"] for peer in living] == [0, 0]
    await compare(run, books, living)
