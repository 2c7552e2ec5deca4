"""Membership is earned: who has helped to make a step is a member for all others, a grant alone makes nobody one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.limits import RPC_LEAST_BYTES_PER_S, RPC_STALL_S, RPC_STEP_BYTES
from peerd.messages.encoding import encode
from peerd.messages.swarm import Seqs, TrainerAnswer, TrainerSync
from peerd.rpc.methods import message_codec as wire
from peerd.run.runfile import RunFile, fingerprint
from peerd.wire.budget.book import Resource
from roles.backbone import BackboneRole
from tests.kit.declared import declared
from tests.worlds.machines.rpc_cases import Text, echo
from tests.worlds.roles.stagescene import Scene
from tests.worlds.roles.training import Peer, Swarm, pipeline, reaches, swarm

pytestmark = pytest.mark.usefixtures("autojump_clock")


def knows(one: Peer, other: Peer) -> bool:
    return one.host.book.is_member(other.host.id.text)


async def test_a_grant_makes_nobody_a_member_and_one_that_says_so_does(tmp_path: Path, run: RunFile) -> None:
    async with Scene.running(tmp_path, run, "wisher", "helper") as (scene, wisher, helper):
        await scene.backward(wisher, 7, scene.admitted(wisher, 7))
        assert not knows(scene.stage, wisher)
        await scene.backward(helper, 8, scene.admitted(helper, 8, helped=True))
        assert knows(scene.stage, helper)


async def test_unfinished_messages_of_a_member_are_given_up_like_anyones(tmp_path: Path, run: RunFile) -> None:
    async with Scene.running(tmp_path, run, "member") as (scene, member):
        await scene.backward(member, 8, scene.admitted(member, 8, helped=True))
        book = scene.stage.host.book
        large = TensorFrame("uint8", (16 << 20,), bytes(16 << 20))
        scene.stage.role._ctx.rpc.serve("t/1/large", Text, echo, declared=declared(frames=1, frame_bytes=16 << 20))
        for _ in range(3):
            stream = await member.host.open_stream(scene.stage.host.id, "/peerd/t/1")
            message = wire.encode_call(
                wire.REQUEST, 1, b"large", 3600.0, encode(Text("")), wire.encode_header(large), 1
            )
            await stream.send(message + bytes(1 << 20))
        await trio.sleep(5)
        assert book.used(Resource.RECEIVING) >= 3 << 20
        await trio.sleep(RPC_STALL_S + 2 * RPC_STEP_BYTES / RPC_LEAST_BYTES_PER_S)
        assert book.used(Resource.RECEIVING) == 0


@pytest.mark.slow
async def test_who_helped_to_make_a_step_is_a_member_and_who_only_wishes_is_not(tmp_path: Path, run: RunFile) -> None:
    async with swarm(tmp_path / "peers") as s:
        stages, (trainer,) = await pipeline(s, run, 2)
        await reaches(s, stages[0], 3)
        await reaches(s, stages[1], 3)
        assert [knows(stage, trainer) for stage in stages] == [True, True]
        assert [knows(stages[0], stages[1]), knows(stages[1], stages[0])] == [True, True]
        wisher = await s.start("wisher", BackboneRole, None)
        grants = await _wishes(s, wisher, stages[0], run)
        assert grants
        assert not any(helped for helped in grants)
        assert not any(knows(stage, wisher) for stage in stages)


async def _wishes(s: Swarm, wisher: Peer, conductor: Peer, run: RunFile) -> list[bool]:
    """What the grants say that a trainer gets which only wishes."""
    rpc = wisher.role._ctx.rpc
    wisher.host.learn(conductor.host.id, conductor.host.addrs())
    sync = TrainerSync(
        run=fingerprint(run), term=0, step=0, open=Seqs.of(range(4)), done=[], seen=0, seen_members=0, wait_s=0.0
    )
    found: list[bool] = []
    with trio.move_on_after(60):
        while not found:
            told = (await rpc.call(conductor.host.id, "swarm/6/trainer", sync, TrainerAnswer, timeout_s=10)).body
            found += [told.grant.helped] if told.grant is not None else []
            sync = msgspec.structs.replace(sync, step=told.step)
            await trio.sleep(0.05)
    return found
