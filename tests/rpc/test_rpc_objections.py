"""Calls that their method itself objects to, by what their body says."""

from __future__ import annotations

from peerd.core.errors import Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.messages.encoding import encode
from tests.rpc.test_rpc_hostile import LARGE, SOME, Clock, call, error_of, scene
from tests.worlds.machines.rpc_cases import Text, echo


async def test_calls_that_a_method_objects_to_leave_nothing_in_the_book(autojump_clock: Clock) -> None:
    """Nor do those that are refused while nobody reads it."""
    async with scene() as s:

        def objection(peer: PeerId, body: Text) -> RemoteError | None:
            return Refused("not this one")

        s.rpc.serve("t/1/choosy", Text, echo, declared=LARGE, objection=objection)
        stream = await s.stream("stranger")
        for call_id in range(1, 101):
            await stream.send(call(call_id, "choosy", SOME if call_id % 2 else encode(Text("x"))))
            assert await error_of(stream) == (call_id, "not this one")
            assert s.used() == {}
        assert s.rpc.status()["running"] == 0
