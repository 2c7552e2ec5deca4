"""Hostile callers over real sockets, against a real host with all its bounds: an honest one beside them is answered."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from peerd.codec.format.frame import TensorFrame, encode_header
from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.messages.encoding import encode
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.wire.budget.book import Resource
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.kit.declared import ANY, declared
from tests.worlds.machines.rpc_cases import BIG, Text, echo

pytestmark = [pytest.mark.socket, pytest.mark.slow]
HERE = parse_addr("/ip4/127.0.0.1/tcp/0")
LARGE = declared(body_bytes=1 << 20, frames=4, frame_bytes=256 << 20)


def announced(call_id: int) -> bytes:
    """A request with a frame of 256 MiB, of which nothing comes."""
    frame = TensorFrame("uint8", (256 << 20,), np.zeros(256 << 20, np.uint8).data)
    headers, body = encode_header(frame), encode(Text(""))
    return wire.encode_call(wire.REQUEST, call_id, b"echo", 3600.0, body, headers, 1)


async def test_strangers_that_announce_all_and_read_nothing_keep_nobody_else_out() -> None:
    async def large(call: Incoming[Text]) -> Answer[Text]:
        return Answer(Text("x" * 120_000))

    clock = RealClock(1)
    served, honest, *strangers = (Host(Keypair.generate(clock.secure_bytes), clock, [TcpTransport()]) for _ in range(4))
    rpc, caller = Rpc(served, clock), Rpc(honest, clock)
    rpc.serve("t/1/echo", Text, echo, declared=LARGE)
    rpc.serve("t/1/large", Text, large, declared=ANY)
    async with trio.open_nursery() as nursery:
        for each in (rpc, caller):
            await nursery.start(each.run)
        await nursery.start(served.run, [HERE])
        for host in (honest, *strangers):
            await nursery.start(host.run)
            host.learn(served.id, served.addrs())
        with trio.fail_after(30):
            for stranger in strangers:
                for _ in range(3):
                    stream = await stranger.open_stream(served.id, "/peerd/t/1")
                    await stream.send(announced(1))
                greedy = await stranger.open_stream(served.id, "/peerd/t/1")
                for number in range(1, 65):
                    body = encode(Text(""))
                    await greedy.send(wire.encode_call(wire.REQUEST, number, b"large", 3600.0, body))
            while served.book.used(Resource.RECEIVING) < 6 << 20 or not served.book.used(Resource.ANSWERS):
                await trio.lowlevel.checkpoint()
            answer = await caller.call(served.id, "t/1/echo", Text("hi"), Text, frames=(BIG,), timeout_s=10)
            assert (answer.body.text, bytes(answer.frames[0].payload)) == ("hi", BIG.payload)
            assert served.book.used(Resource.RECEIVING) <= 7 << 20  # the honest call's may not be given back yet
            assert served.book.used(Resource.ANSWERS) <= 2 * 64 * 125_000
            for link in list(served.links):
                if link.peer != honest.id:
                    link.abort("the test cut it")
            while any(served.book.used(means) for means in (Resource.RECEIVING, Resource.ANSWERS, Resource.CALLS)):
                await trio.lowlevel.checkpoint()
        assert served.faults.total == 0
        nursery.cancel_scope.cancel()
