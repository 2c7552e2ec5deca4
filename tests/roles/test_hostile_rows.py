"""Calls with microbatches that would cost a stage peer too much: many rows, no grant, floods, and no memory.

By the messages that trainers send, to real stage peers. What the conductor admits, the test signs with its key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, Refused, RemoteError
from peerd.messages.encoding import Message
from peerd.messages.proof import grant
from peerd.messages.swarm import Grant, GrantStatement, Seqs, StageAnswer, StageForward, StageLoss
from peerd.model.stage import footprint
from peerd.pipeline.stage_client import StageClient
from peerd.rpc import inbound
from peerd.rpc.inbound import Inbound
from peerd.run.runfile import RunFile
from tests.kit.runs import changed
from tests.worlds.roles.stagescene import Scene, microbatch
from tests.worlds.roles.training import Peer, Simulated, all_finished, pipeline, small_run, swarm
from tests.worlds.roles.virtualroles import PacedDevice

pytestmark = pytest.mark.usefixtures("autojump_clock")
T = TypeVar("T")
EVERY = 5  # steps
CALL_S = 0.05  # virtual seconds that the stage's device takes for any call


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run(tmp_path, evaluate={"every_steps": EVERY, "samples": 6})


def tokens(rows: int, length: int = 16) -> TensorFrame:
    return TensorFrame("uint8", (rows, length), bytes(rows * length))


class Calls(Scene):
    """A scene whose trainers evaluate as well."""

    def may_evaluate(self, trainer: Peer, step: int = 0, by: Any = None) -> Grant:
        return grant(by or self.stage.host.sign, GrantStatement(self.mark, 1, step, trainer.host.id.text, Seqs()))

    def forward(self, shown: Grant | None) -> StageForward:
        return StageForward(self.mark, 0, grant=shown)

    async def call(self, trainer: Peer, body: Message, *frames: TensorFrame, timeout_s: float = 10.0) -> StageAnswer:
        verb = "loss" if isinstance(body, StageLoss) else "forward"
        rpc, to = trainer.role._ctx.rpc, self.stage.host.id
        answer = await rpc.call(to, f"stage/6/{verb}", body, StageAnswer, frames=frames, timeout_s=timeout_s)
        return answer.body


# --- rows -----------------------------------------------------------------------------------------------------------
async def test_a_call_of_too_many_rows_is_refused_before_its_payload_is_received(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one whom the conductor lets evaluate and train: nothing is allocated, decoded or computed for such a call."""
    received, allocated, jobs = list[int](), list[int](), list[str]()
    frames, memory, work = Inbound.frames, inbound._memory, PacedDevice.run

    async def noting(self: Inbound, message: Any, *rest: Any) -> Any:
        received.append(message.frame_bytes)
        return await frames(self, message, *rest)

    async def noting_work(self: PacedDevice, job: Callable[[], T], *, name: str, **rest: Any) -> T:
        jobs.append(name)
        return await work(self, job, name=name, **rest)

    async with Calls.running(tmp_path, run, "liar") as (scene, liar):
        may, admitted = scene.may_evaluate(liar), scene.admitted(liar, 7)
        evaluate = scene.forward(may)
        await scene.call(liar, evaluate, tokens(2))  # connected, and all there is built
        with monkeypatch.context() as patch:
            patch.setattr(Inbound, "frames", noting)
            patch.setattr(inbound, "_memory", lambda size: (allocated.append(size), memory(size))[1])
            patch.setattr(PacedDevice, "run", noting_work)
            for body, frame in [
                (evaluate, tokens(6000, 64)),
                (evaluate, tokens(3)),
                (evaluate, tokens(1, 384_000)),
                (StageLoss(scene.mark, 0, may), tokens(6000, 64)),
            ]:
                with pytest.raises(Refused, match=r"samples|frames of 384000 bytes"):
                    await scene.call(liar, body, frame)
            with pytest.raises(Refused, match="samples"):
                await scene.backward(liar, 7, admitted, [tokens(6000), microbatch(1)[1]])
            assert (received, allocated, jobs) == ([], [], [])
        assert (await scene.call(liar, evaluate, tokens(2))).service_s >= 0
        assert (await scene.backward(liar, 7, admitted)).receipt is not None


# --- grants ---------------------------------------------------------------------------------------------------------
async def test_nothing_is_computed_for_whom_no_conductor_lets(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = list[int]()
    frames = Inbound.frames

    async def noting(self: Inbound, message: Any, *rest: Any) -> Any:
        received.append(message.frame_bytes)
        return await frames(self, message, *rest)

    async with Calls.running(tmp_path, run, "trainer", "other") as (scene, trainer, other):
        may, admitted = scene.may_evaluate(trainer), scene.admitted(trainer, 7)
        monkeypatch.setattr(Inbound, "frames", noting)
        at_a_step: Any = 99
        refused: list[tuple[StageForward | StageLoss, type[RemoteError], str]] = [
            (scene.forward(None), Refused, "no grant"),
            (scene.forward(admitted), Refused, "not for an evaluation"),
            (scene.forward(scene.may_evaluate(trainer, by=other.host.sign)), Overloaded, "not of a conductor"),
            (scene.forward(scene.may_evaluate(other)), Overloaded, "not of a conductor"),
            (StageLoss(scene.mark, 0), Refused, "no grant"),
            (StageLoss(scene.mark, 0, admitted), Refused, "not for an evaluation"),
            (StageForward(b"x" * 16, 0, grant=may), Refused, "your run file differs"),
            (StageForward(scene.mark, 1, grant=may), Refused, "the call is for stage 1"),
            (StageForward(scene.mark, 0, at_a_step, grant=may), RemoteError, "the peer reset the stream"),
        ]
        for body, error, why in refused:
            with pytest.raises(error, match=why):
                await scene.call(trainer, body, *microbatch(1)[:1])
        assert received == []
        await scene.call(trainer, scene.forward(may), tokens(1))
        scene.stage.role.post.state.position = msgspec.structs.replace(scene.stage.role.position, step=EVERY + 1)
        with pytest.raises(Overloaded, match="the grant to evaluate is of step 0"):
            await scene.call(trainer, scene.forward(may), tokens(1))


@pytest.mark.slow
async def test_honest_trainers_evaluate_with_the_conductors_grant(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two, as often as the run says, by calls of no more samples than a microbatch has."""
    rows = Counter[tuple[str, int]]()
    ask = StageClient._ask

    async def noting(self: StageClient, call: Any, name: str) -> Any:
        if call.verb == "loss":
            rows[self._papers.own, call.frames[0].shape[0]] += 1
        return await ask(self, call, name)

    monkeypatch.setattr(StageClient, "_ask", noting)
    run = changed(run, optimizer={"total_steps": 2 * EVERY})
    async with swarm(tmp_path / "peers") as s:
        _, trainers = await pipeline(s, run, 2, trainers=2)
        await all_finished(s, trainers)
        one, other = sorted(trainers, key=lambda peer: peer.host.id.text)
        found = one.role.status()["evaluations"]
        assert [each["step"] for each in found] == [0, EVERY, 2 * EVERY]
        assert all(np.isfinite(each["loss"]) for each in found)
        assert other.role.status()["evaluations"] == []
        assert {own for own, _ in rows} == {one.host.id.text}
        assert {count for _, count in rows} == {2}


# --- floods ---------------------------------------------------------------------------------------------------------
class Flood:
    """Eight identities in one network whose calls never end, and an honest trainer in another one."""

    LIARS = tuple(f"liar{i}" for i in range(8))

    def __init__(self, s: Any, scene: Calls) -> None:
        self.s, self.scene = s, scene
        self.made = 0  # of the honest trainer's microbatches

    async def start(self) -> None:
        network = self.s.network
        assert isinstance(network, Simulated)
        network.ips |= {name: f"45.1.1.{number}" for number, name in enumerate(self.LIARS, 1)} | {"honest": "46.2.2.2"}
        await self.scene.start("honest", *self.LIARS)

    async def train(self) -> None:
        """One microbatch after the other."""
        honest, scene = self.s.peers["honest"], self.scene
        shown = scene.admitted(honest, *range(2000))
        while True:
            try:
                await scene.backward(honest, self.made, shown, timeout_s=30)
            except Overloaded as error:
                await trio.sleep(error.retry_after_s)
                continue
            self.made += 1

    async def flood(self, name: str, number: int, evaluates: bool) -> None:
        """One of 64 calls of a liar that are always under way."""
        liar, scene = self.s.peers[name], self.scene
        may = scene.may_evaluate(liar)
        for seq in count(number, 64):
            try:
                if evaluates:
                    await scene.call(liar, scene.forward(may), tokens(2), timeout_s=600)
                else:
                    await scene.backward(liar, seq, scene.admitted(liar, seq), timeout_s=600)
            except RemoteError:
                await trio.sleep(0.05)

    async def made_in(self, seconds: float, liars: int, evaluates: bool = False) -> int:
        async with trio.open_nursery() as nursery:
            for name in self.LIARS[:liars]:
                for number in range(64):
                    nursery.start_soon(self.flood, name, number, evaluates)
            await trio.sleep(1.0)
            before = self.made
            nursery.start_soon(self.train)
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        return self.made - before


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [False, True])
async def test_eight_identities_that_flood_leave_an_honest_trainer_its_share(
    tmp_path: Path, run: RunFile, evaluates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them with a grant, and 64 calls always open. Of one network, they have half of the stage together; where
    they evaluate, a ninth.
    """
    work = PacedDevice.run

    async def paced(self: PacedDevice, job: Callable[[], T], *, name: str, **rest: Any) -> T:
        rest["cost_s"] = CALL_S if name == "forward" else rest.get("cost_s", 0.0)
        self.microbatch_s = CALL_S
        return await work(self, job, name=name, **rest)

    monkeypatch.setattr(PacedDevice, "run", paced)
    async with swarm(tmp_path / "peers") as s:
        flood = Flood(s, Calls(s, run))
        await flood.start()
        alone = await flood.made_in(3.0, liars=0)
        beside = await flood.made_in(3.0, liars=8, evaluates=evaluates)
        told = f"{alone} microbatches alone, {beside} beside the flood"
        assert alone >= 20, told
        # Only one of its calls waits at a time, behind the four that have their tensors decoded already.
        assert beside >= alone // 6, told


# --- memory ---------------------------------------------------------------------------------------------------------
async def test_a_microbatch_that_does_not_fit_into_memory_now_is_refused_with_the_reason(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [1_000_000_000]
    monkeypatch.setattr(footprint, "_held_bytes", lambda: held[0])
    async with Calls.running(tmp_path, changed(run, limits={"memory_gb": 1.5}), "trainer") as (scene, trainer):
        shown = scene.admitted(trainer, *range(10))
        await scene.backward(trainer, 1, shown)
        jobs = list[str]()
        work = PacedDevice.run

        async def noting(self: PacedDevice, job: Callable[[], T], *, name: str, **rest: Any) -> T:
            jobs.append(name)
            return await work(self, job, name=name, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(PacedDevice, "run", noting)
            held[0] = 1_575_000_000
            for call in (
                partial(scene.backward, trainer, 2, shown),
                partial(scene.call, trainer, scene.forward(scene.may_evaluate(trainer)), tokens(2)),
            ):
                with pytest.raises(Overloaded, match=r"no memory is left .*limits\.memory_gb allows 1\.5 GB"):
                    await call()
            assert jobs == []
        assert any(event["name"] == "stage.no_memory" for event in scene.stage.log.recent(50))
        held[0] = 1_000_000_000
        assert (await scene.backward(trainer, 2, shown)).receipt is not None
