"""Frames come, and answers are taken, at a least rate: by members too, but for calls of the round under way."""

from __future__ import annotations

from dataclasses import replace

import trio

from peerd.core.limits import RPC_LEAST_BYTES_PER_S, RPC_MESSAGE_S, RPC_STALL_S, RPC_STEP_BYTES
from peerd.messages.encoding import Empty
from peerd.rpc.methods.declaration import Shows
from peerd.rpc.rpc import Answer, Incoming
from peerd.wire.budget.book import Resource
from tests.kit.declared import ANY
from tests.rpc.test_rpc_hostile import LARGE, MB, Clock, call, error_of, scene
from tests.worlds.machines.rpc_cases import BIG, Text, echo

GRANTED = replace(LARGE, shows=Shows.GRANT)


async def test_who_does_not_take_an_answers_frames_loses_its_stream_but_not_in_the_round_under_way(
    autojump_clock: Clock,
) -> None:
    """A member, too, unless its call has shown that it belongs to the round."""
    async with scene() as s:

        async def give(incoming: Incoming[Text]) -> Answer[Empty]:
            return Answer(Empty(), (BIG,))

        s.rpc.serve("t/1/give", Text, give, declared=ANY)
        s.book.members_by(lambda peer: peer == s.net.host("member").id.text)
        s.rpc.serve("t/1/granted", Text, give, declared=GRANTED, objection=lambda peer, body: None)
        streams = {name: await s.stream(name) for name in ("stranger", "member", "granted")}
        for name, stream in streams.items():
            await stream.send(call(1, "granted" if name == "granted" else "give"))
        await trio.sleep(RPC_MESSAGE_S + MB / RPC_LEAST_BYTES_PER_S + 1)
        closed = {name: stream.closed for name, stream in streams.items()}
        assert closed == {"stranger": True, "member": True, "granted": False}
        assert s.used() == {Resource.CALLS: 1}


async def test_frames_that_stall_are_given_up_long_before_their_deadline_but_not_in_the_round_under_way(
    autojump_clock: Clock,
) -> None:
    """A member's too, unless its call has shown that it belongs to the round."""
    async with scene() as s:
        s.rpc.serve("t/1/granted", Text, echo, declared=GRANTED, objection=lambda peer, body: None)
        s.book.members_by(lambda peer: peer == s.net.host("member").id.text)
        streams = {name: await s.stream(name) for name in ("member", "stranger", "slow", "granted")}
        for name, stream in streams.items():
            await stream.send(call(1, "granted" if name == "granted" else "echo", frames=1) + bytes(100))

        async def trickle() -> None:
            while True:
                await streams["slow"].send(bytes(RPC_LEAST_BYTES_PER_S))
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            await trio.sleep(RPC_STALL_S + RPC_STEP_BYTES / RPC_LEAST_BYTES_PER_S + 1)
            for name in ("stranger", "member"):
                call_id, why = await error_of(streams[name])
                assert (call_id, "too slowly" in why) == (1, True)
            await trio.sleep(200)
            assert s.used()[Resource.CALLS] == 2
            nursery.cancel_scope.cancel()
