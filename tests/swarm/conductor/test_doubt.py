"""A call that is not answered in time makes its link ask whether the peer is there at all."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import TooSlow
from peerd.messages.encoding import Empty
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.wire.host.host import PeerDown
from tests.kit.declared import declared
from tests.worlds.network.hosts import running_hosts
from tests.worlds.simulation.clock import SimClock

CALL_S = 10.0
FRAME = TensorFrame("uint8", (4,), memoryview(b"four"))


@pytest.mark.parametrize("frames", [(), (FRAME,)], ids=["on the shared stream", "with frames"])
@pytest.mark.parametrize("dead", [True, False], ids=["its line is dead", "it only computes for long"])
async def test_a_peer_that_says_nothing_at_all_is_lost_soon_after_the_first_call(
    autojump_clock: trio.testing.MockClock, frames: tuple[TensorFrame, ...], dead: bool
) -> None:
    async def never(_: Incoming[Empty]) -> Answer[Empty]:
        await trio.sleep_forever()
        raise AssertionError

    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        a, b = await hosts.start("a"), await hosts.start("b")
        rpcs = [Rpc(host, SimClock(1, name)) for name, host in (("a", a), ("b", b))]
        for rpc in rpcs:
            await nursery.start(rpc.run)
        rpcs[1].serve("late/1/answer", Empty, never, declared=declared(frames=1, frame_bytes=64))
        await a.connect(b.id, [hosts.addr("b")])
        with a.watch() as events:
            if dead:
                hosts.net.kill("b", silent=True)
            began = trio.current_time()
            with pytest.raises(TooSlow):
                await rpcs[0].call(b.id, "late/1/answer", Empty(), Empty, frames=frames, timeout_s=CALL_S)
            with trio.move_on_after(8.0):
                event = await events.receive()
                assert isinstance(event, PeerDown)
                assert trio.current_time() - began == pytest.approx(CALL_S + 5.0)
        assert (b.id in a.connected()) is not dead
        nursery.cancel_scope.cancel()
