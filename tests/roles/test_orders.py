"""A stage peer and orders to average that come to nothing: it goes on at once with those that come after."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peerd.core.errors import Refused
from peerd.core.ids import PeerId
from peerd.messages.swarm import AverageAlive, AverageKey, Mb, Position, Prepared
from peerd.rpc.rpc import Answer
from peerd.run.runfile import RunFile
from tests.kit.declared import ANY, declared
from tests.worlds.roles.stagescene import BATCH, Scene, digest
from tests.worlds.roles.training import Peer

pytestmark = pytest.mark.usefixtures("autojump_clock")


def hangs(peer: Peer) -> trio.Event:
    """A stage-mate that lives, takes parts and never gives any; set once it was sent some."""
    met = trio.Event()

    async def alive(call: Any) -> Answer[AverageAlive]:
        await trio.lowlevel.checkpoint()
        return Answer(AverageAlive(coming=True))

    async def parts(call: Any, stream: Any) -> None:
        met.set()
        await trio.sleep_forever()

    rpc = peer.role._ctx.rpc
    rpc.serve("average/2/alive", AverageKey, alive, declared=ANY)
    limits = declared(frames=1, frame_bytes=8 << 20)
    rpc.serve_stream("average/2/parts", AverageKey, parts, declared=limits)
    return met


async def held_up(scene: Scene, nursery: trio.Nursery) -> tuple[list[Mb], list[str], trio.Event]:
    """The stage peer averages with a stage-mate that hangs; what became of that order, once it ends."""
    trainer, mate = scene.s.peers["trainer"], scene.s.peers["mate"]
    shown, said, over = scene.admitted(trainer, *range(BATCH)), list[str](), trio.Event()
    for seq in range(BATCH):
        await scene.backward(trainer, seq, shown)
    mbs = [Mb(trainer.host.id.text, seq) for seq in range(BATCH)]
    scene.stage.host.learn(mate.host.id, mate.host.addrs())
    met = hangs(mate)

    async def order() -> None:
        try:
            said.append(str(await scene.prepare(*mbs, attempt=b"1" * 16, beside=[mate])))
        except Refused as error:
            said.append(str(error))
        over.set()

    nursery.start_soon(order)
    with trio.fail_after(20):
        await met.wait()
    assert scene.stage.role.post.serving.closing
    return mbs, said, over


async def test_a_later_order_takes_the_place_of_one_that_hangs(tmp_path: Path, run: RunFile) -> None:
    async with Scene.running(tmp_path, run, "trainer", "mate") as (scene, *_), trio.open_nursery() as nursery:
        mbs, said, over = await held_up(scene, nursery)
        with trio.fail_after(5):
            prepared: Prepared = await scene.prepare(*mbs, attempt=b"2" * 16)
            await over.wait()
        assert prepared.ok
        assert prepared.digest == digest(scene.honest(*range(BATCH)))
        (why,) = said
        assert "cancelled" in why


async def test_an_order_of_a_conductor_that_is_followed_no_more_is_called_off(tmp_path: Path, run: RunFile) -> None:
    async with Scene.running(tmp_path, run, "trainer", "mate") as (scene, *_), trio.open_nursery() as nursery:
        _, said, over = await held_up(scene, nursery)
        following, own = scene.stage.role._services.following, scene.stage.host.id
        ask = following.rpc.call

        async def answered_by_another(peer: PeerId, method: str, *rest: Any, **more: Any) -> Any:
            return await ask(own if method == "swarm/6/member" else peer, method, *rest, **more)

        following.rpc.call = answered_by_another
        following.conductor = scene.s.peers["mate"].host.id  # the one before is gone without a word
        with trio.fail_after(20):
            await over.wait()
        assert not scene.stage.role.post.serving.closing
        assert "cancelled" in said[0]


async def test_an_order_that_waits_while_the_peer_moves_is_not_obeyed_at_another_step(
    tmp_path: Path, run: RunFile
) -> None:
    async with Scene.running(tmp_path, run, "trainer", "mate") as (scene, *_), trio.open_nursery() as nursery:
        state, said = scene.stage.role.post.state, list[Prepared]()

        over = trio.Event()

        async def order() -> None:
            said.append(await scene.prepare(attempt=b"1" * 16))
            over.set()

        async with state.moving:
            nursery.start_soon(order)
            await trio.sleep(5.0)
            assert state.moving.statistics().tasks_waiting == 1
            state.position = Position(state.position.step + 1, b"elsewhere")
        with trio.fail_after(20):
            await over.wait()
        assert not said[0].ok
        assert scene.stage.role.post.orders.prepared is None


async def test_a_member_helps_several_groups_at_once_and_averages_beside_that(tmp_path: Path, run: RunFile) -> None:
    async with Scene.running(tmp_path, run, "trainer", "mate") as (scene, trainer, mate):
        said = list[str]()
        hangs(mate)
        shown = scene.admitted(trainer, 0)
        await scene.backward(trainer, 0, shown)

        async def help_with(attempt: bytes) -> None:
            try:
                said.append(str(await scene.help(mate, attempt)))
            except Refused as error:
                said.append(str(error))

        rounds = scene.stage.role.post._rounds
        with trio.fail_after(20):
            async with trio.open_nursery() as helping:
                for attempt in (b"1" * 16, b"2" * 16):
                    helping.start_soon(help_with, attempt)
                    await trio.sleep(1.0)
                prepared: Prepared = await scene.prepare(Mb(trainer.host.id.text, 0), attempt=b"3" * 16)
                assert prepared.ok
                assert said == []
                rounds.call_off_unless_of(None)
        assert len(said) == 2
        assert all("cancelled" in why for why in said)


async def test_a_copy_that_is_called_off_leaves_the_sum_that_it_was_of(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Scene.running(tmp_path, run, "trainer", "mate") as (scene, trainer, mate),
        trio.open_nursery() as nursery,
    ):
        shown = scene.admitted(trainer, *range(BATCH))
        for seq in range(BATCH):
            await scene.backward(trainer, seq, shown)
        assert (await scene.prepare(*(Mb(trainer.host.id.text, seq) for seq in range(BATCH)), attempt=b"1" * 16)).ok
        orders, hangs_now = scene.stage.role.post.orders, trio.Event()

        async def summed(plan: Any, vector: Any, *rest: Any) -> Any:
            if plan.attempt == b"3" * 16:
                hangs_now.set()
                await trio.sleep_forever()
            await trio.lowlevel.checkpoint()
            return vector

        monkeypatch.setattr(orders._rounds._averaging, "sum", summed)

        async def copy(attempt: bytes) -> None:
            with contextlib.suppress(Refused):
                assert (await scene.copy(mate, b"1" * 16, attempt)).ok

        await copy(b"2" * 16)
        nursery.start_soon(copy, b"3" * 16)
        await hangs_now.wait()
        orders._rounds.call_off_for(b"4" * 16)
        await trio.testing.wait_all_tasks_blocked()
        assert orders.prepared == Position(1, b"next")
