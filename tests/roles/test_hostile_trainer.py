"""A hostile trainer at a stage peer: work that nobody admitted, gradients that ruin a sum, more than its share.

By the messages that trainers send. The conductor is the stage peer itself; what it admits, the test signs with its
key, and orders to average come from its own address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, Refused, RemoteError
from peerd.core.keys import Keypair
from peerd.core.limits import HELD_BATCHES, HELD_BATCHES_PER_TRAINER
from peerd.messages.proof import has_received
from peerd.messages.swarm import Commit, Mb, Moved, Position
from peerd.rpc.inbound import Inbound
from peerd.run.runfile import RunFile
from tests.worlds.roles.stagescene import BATCH, Scene, digest, microbatch
from tests.worlds.roles.training import swarm

pytestmark = pytest.mark.usefixtures("autojump_clock")
STRANGER = Keypair.from_seed(b"not the conductor".ljust(32, b"."))


async def test_what_no_conductor_admitted_is_refused_before_its_frames_are_received(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    frames = Inbound.frames

    async def noting(self: Inbound, message: Any, *rest: Any) -> Any:
        received.append(message.frame_bytes)
        return await frames(self, message, *rest)

    async with Scene.running(tmp_path, run, "trainer", "other") as (scene, trainer, other):
        monkeypatch.setattr(Inbound, "frames", noting)
        good = scene.admitted(trainer, 7, 8)
        for seq, shown, why in [
            (7, None, "shows no grant"),
            (9, good, "does not name microbatch 9"),
            (7, scene.admitted(trainer, 7, step=1), "for step 1"),
        ]:
            with pytest.raises(Refused, match=why):
                await scene.backward(trainer, seq, shown)
        for shown in (scene.admitted(other, 7), scene.admitted(trainer, 7, by=STRANGER.sign)):
            with pytest.raises(Overloaded, match="not of a conductor that this peer follows") as caught:
                await scene.backward(trainer, 7, shown)
            assert caught.value.retry_after_s < 1.0  # who follows another conductor hears of the right one soon
        assert received == []
        assert scene.stage.role.post.state.model.held == []
        answer = await scene.backward(trainer, 7, good)
        assert scene.stage.role.post.state.model.held == [Mb(trainer.host.id.text, 7)]
        assert received
        shown_receipt = answer.receipt
        assert shown_receipt is not None
        assert shown_receipt.session == scene.stage.role.post.session.id
        mb = Mb(trainer.host.id.text, 7)
        assert has_received(scene.stage.host.id, scene.mark, 0, 0, mb, shown_receipt)
        assert not has_received(scene.stage.host.id, scene.mark, 0, 0, Mb(mb.trainer, 8), shown_receipt)


async def test_a_gradient_of_1e12_that_is_taken_out_leaves_the_sum_as_if_it_had_never_come(
    tmp_path: Path, run: RunFile
) -> None:
    async with Scene.running(tmp_path, run, "honest", "liar") as (scene, honest, liar):
        ours, theirs = scene.admitted(honest, *range(BATCH)), scene.admitted(liar, 50)
        await scene.backward(honest, 0, ours)
        await scene.backward(liar, 50, theirs, microbatch(50, 1e12))
        for seq in range(1, BATCH):
            await scene.backward(honest, seq, ours)
        prepared = await scene.prepare(*(Mb(honest.host.id.text, seq) for seq in range(BATCH)))
        assert prepared.ok
        assert prepared.digest == digest(scene.honest(*range(BATCH)))


@pytest.mark.parametrize("size", [1e20, 1e36])
async def test_a_gradient_that_no_batch_can_bear_is_refused_and_what_lies_ready_can_be_committed(
    tmp_path: Path, run: RunFile, size: float
) -> None:
    async with Scene.running(tmp_path, run, "honest", "liar") as (scene, honest, liar):
        ours, theirs = scene.admitted(honest, *range(BATCH)), scene.admitted(liar, 50)
        await scene.backward(honest, 0, ours)
        with pytest.raises(RemoteError, match=r"cannot be summed|not finite"):
            await scene.backward(liar, 50, theirs, microbatch(50, size))
        for seq in range(1, BATCH):
            await scene.backward(honest, seq, ours)
        prepared = await scene.prepare(*(Mb(honest.host.id.text, seq) for seq in range(BATCH)))
        assert prepared.ok
        assert prepared.digest == digest(scene.honest(*range(BATCH)))
        own, target = scene.stage.host.id, Position(1, b"next")
        moved = await scene.stage.role._ctx.rpc.call(
            own, "stage/6/commit", Commit(scene.mark, 1, target, 0), Moved, timeout_s=10
        )
        assert moved.body.position == target
        assert all(bool(t.isfinite().all()) for t in scene.stage.role.post.state.model.state().values())


async def test_a_sum_that_a_machine_has_spoilt_is_made_anew_or_its_microbatches_are_named(
    tmp_path: Path, run: RunFile
) -> None:
    async with Scene.running(tmp_path, run, "honest") as (scene, honest):
        ours = scene.admitted(honest, *range(BATCH))
        for seq in range(BATCH):
            await scene.backward(honest, seq, ours)
        module = scene.stage.role.post.served.module
        module._sums.due[3] = float("inf")  # bad memory
        mbs = [Mb(honest.host.id.text, seq) for seq in range(BATCH)]
        prepared = await scene.prepare(*mbs)
        assert prepared.ok
        assert prepared.digest == digest(scene.honest(*range(BATCH)))
        module._sums.due[3] = float("inf")
        module.sum_is_finite = lambda: False  # and it stays bad
        prepared = await scene.prepare(*mbs)
        assert (prepared.ok, list(prepared.refused), list(prepared.missing)) == (False, mbs, [])


def framed(array: Any) -> TensorFrame:
    return TensorFrame(array.dtype.name, array.shape, array.data.cast("B"))


async def test_frames_other_than_a_microbatchs_are_refused_and_change_nothing(tmp_path: Path, run: RunFile) -> None:
    tokens, gradient = np.zeros((2, 16), "uint8"), np.zeros((2, 16, 16), "float32")
    many = np.zeros((4, 16), "uint8"), np.zeros((4, 16, 16), "float32")
    async with Scene.running(tmp_path, run, "liar") as (scene, liar):
        state = scene.stage.role.post.state.model
        before, shown = state.vector().copy(), scene.admitted(liar, 1)
        for arrays, why in (
            (many, "2 samples"),
            ((tokens, np.full_like(gradient, np.nan)), "not finite"),
            ((tokens, np.zeros((2, 16, 8), "float32")), "answered with"),
            ((tokens, gradient.astype("float64")), "answered with"),
            ((np.full((2, 16), 256, "int64"), gradient), "token 256"),
            ((np.full((2, 16), -1, "int64"), gradient), "token -1"),
            ((tokens, tokens, gradient), "frames"),
            ((gradient,), "frames"),
        ):
            with pytest.raises(RemoteError, match=why):
                await scene.backward(liar, 1, shown, list(map(framed, arrays)))
        assert state.held == []
        assert (state.vector() == before).all()


@pytest.mark.slow
async def test_nobody_fills_a_stage_peer_with_what_it_does_not_finish(tmp_path: Path, run: RunFile) -> None:
    """Trainers are admitted, compute, and vanish, each under one name after the other: the honest one's place stays."""
    async with swarm(tmp_path / "peers") as s:
        scene = Scene(s, run)
        names = [f"liar{i}" for i in range(HELD_BATCHES)]
        await scene.start("honest", *names)
        honest, served = s.peers["honest"], scene.stage.role.post.state.model
        for number, name in enumerate(names):
            liar = s.peers[name]
            for seq in range(3 * BATCH):
                await scene.backward(liar, seq, scene.admitted(liar, seq))
                held = [mb for mb in served.held if mb.trainer == liar.host.id.text]
                assert len(held) <= HELD_BATCHES_PER_TRAINER * BATCH
            await scene.backward(honest, number, scene.admitted(honest, *range(BATCH)))
            assert len(served.held) <= HELD_BATCHES * BATCH
        mbs = [Mb(honest.host.id.text, seq) for seq in range(BATCH)]
        assert set(mbs) <= set(served.held)
        prepared = await scene.prepare(*mbs)
        assert prepared.ok
        assert prepared.digest == digest(scene.honest(*range(BATCH)))
