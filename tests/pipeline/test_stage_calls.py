"""Calls of a stage reach the post that they name, and nobody else's reach any."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import LocalError, Refused
from peerd.core.ids import PeerId
from peerd.messages.swarm import Commit, Mbs, Moved, Position, Prepare, Relocate, Restore, StageAnswer, StageForward
from peerd.pipeline.stage_calls import DECLARED, StageCalls, StageHandlers
from peerd.rpc.methods.declaration import Shows
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import PipelineSection, RunFile, fingerprint
from tests.worlds.machines.rpc_cases import Pair, fake_pair

RUN_FILE = RunFile(run="calls", pipeline=PipelineSection(stages=4, microbatch=2))
RUN = fingerprint(RUN_FILE)
FRAME = TensorFrame("uint8", (1, 2), memoryview(b"ab"))


class Conductor:
    """The peer that is obeyed."""

    peer: PeerId | None = None


def calls_of(pair: Pair, conductor: Conductor) -> StageCalls:
    conductor.peer = pair.a_host.id
    return StageCalls(pair.b, RUN_FILE, lambda: conductor.peer)


def post(name: str, *, works: bool = True) -> StageHandlers:
    """One that answers commits with its name for a lineage, and forward calls if it works."""

    async def moved(call: Incoming[Any]) -> Answer[Any]:
        return Answer(Moved(Position(0, name.encode())))

    async def forward(call: Incoming[Any]) -> Answer[Any]:
        return Answer(StageAnswer(1.5), call.frames)

    return StageHandlers(prepare=moved, commit=moved, forward=forward if works else None, samples_per_s=lambda: 3.0)


async def commit(pair: Pair, stage: int, run: bytes = RUN) -> bytes:
    body = Commit(run, 1, Position(1, b""), stage)
    answer = await pair.a.call(pair.b_host.id, "stage/6/commit", body, Moved, timeout_s=5)
    return answer.body.position.lineage


async def forward(pair: Pair, stage: int) -> float:
    body = StageForward(RUN, stage)
    found = await pair.a.call(pair.b_host.id, "stage/6/forward", body, StageAnswer, frames=[FRAME], timeout_s=5)
    return found.body.loss_sum


async def test_each_call_reaches_the_post_of_its_stage_as_long_as_that_is_there() -> None:
    async with fake_pair() as (pair, *_):
        calls = calls_of(pair, Conductor())
        with calls.serving(0, post("zero")):
            with calls.serving(3, post("three")):
                assert (await commit(pair, 0), await commit(pair, 3)) == (b"zero", b"three")
                assert (calls.stages, calls.samples_per_s(3), calls.samples_per_s(1)) == ([0, 3], 3.0, 0.0)
                with pytest.raises(LocalError, match="stage 3 is served"), calls.serving(3, post("again")):
                    pass
            with pytest.raises(Refused, match="this peer serves stage 0; the call is for stage 3"):
                await commit(pair, 3)
            assert await commit(pair, 0) == b"zero"
        with pytest.raises(Refused):
            await commit(pair, 0)
        with calls.serving(3, post("later")):
            assert await commit(pair, 3) == b"later"


async def test_orders_are_taken_of_the_conductor_alone_and_calls_of_this_run_alone() -> None:
    async with fake_pair() as (pair, *_):
        conductor = Conductor()
        with calls_of(pair, conductor).serving(0, post("zero")):
            with pytest.raises(Refused, match="your run file differs"):
                await commit(pair, 0, bytes(16))
            for other in (pair.b_host.id, None):
                conductor.peer = other
                with pytest.raises(Refused, match="does not follow you"):
                    await commit(pair, 0)
            assert await forward(pair, 0) == 1.5  # work may come from any trainer


async def test_a_peer_obeys_no_order_but_its_conductor_s() -> None:
    orders = {
        "prepare": Prepare(RUN, 1, 1, bytes(16), b"", [], Mbs(), 4, 60.0),
        "commit": Commit(RUN, 1, Position(1, b""), 0),
        "restore": Restore(RUN, 1, Position(1, b""), 0),
        "relocate": Relocate(RUN, 1, 0, 1, "balance"),
    }
    shown = {name for name, declared in DECLARED.items() if declared.shows is Shows.CONDUCTOR}
    assert shown == {f"stage/6/{name}" for name in orders}
    async with fake_pair() as (pair, *_):
        conductor = Conductor()
        with calls_of(pair, conductor).serving(0, post("zero")):
            conductor.peer = pair.b_host.id
            for name, body in orders.items():
                with pytest.raises(Refused, match="does not follow you"):
                    await pair.a.call(pair.b_host.id, f"stage/6/{name}", body, Moved, timeout_s=5)


async def test_what_a_post_does_not_answer_is_refused() -> None:
    async with fake_pair() as (pair, *_):
        with calls_of(pair, Conductor()).serving(0, post("zero", works=False)):
            with pytest.raises(Refused, match="the call is for stage 0"):
                await forward(pair, 0)
            assert await commit(pair, 0) == b"zero"


async def test_a_helper_gives_way_to_a_post_of_its_stage() -> None:
    async with fake_pair() as (pair, *_), trio.open_nursery() as nursery:
        calls, gone = calls_of(pair, Conductor()), trio.Event()

        async def help_out(*, task_status: trio.TaskStatus[None]) -> None:
            with calls.helping(1, post("helper")):
                task_status.started()
                await trio.sleep_forever()
            gone.set()

        await nursery.start(help_out)
        assert (await commit(pair, 1), calls.stages) == (b"helper", [])
        with calls.serving(1, post("member")):
            await gone.wait()
            assert (await commit(pair, 1), calls.stages) == (b"member", [1])
            with pytest.raises(LocalError, match="served or helped"), calls.helping(1, post("helper")):
                pass


async def test_who_waits_hears_of_each_post_that_begins_and_ends() -> None:
    async with fake_pair() as (pair, *_), trio.open_nursery() as nursery:
        calls, heard = calls_of(pair, Conductor()), list[list[int]]()

        async def listen() -> None:
            while True:
                await calls.changed()
                heard.append(calls.stages)

        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        with calls.serving(2, post("two")):
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [[2], []]
        nursery.cancel_scope.cancel()
