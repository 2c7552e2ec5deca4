"""The places of a method, over simulated lines: strangers of one address hold a quarter of them, and lose what they
hold in vain as soon as others want it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import LocalError, Overloaded, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LEAST_BYTES_PER_S, RPC_MESSAGE_S, RPC_STALL_S
from peerd.messages.encoding import Empty, encode
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Answer, Incoming
from peerd.wire.budget.book import BOUNDS, Bounds, Resource, shared_out
from tests.kit.declared import ANY, declared
from tests.worlds.machines.rpc_cases import Text, echo
from tests.worlds.network.hosts import keypair
from tests.worlds.network.virtual import addr_of, running_net
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimNet

PLACES = 8
PIECE = TensorFrame("uint8", (1 << 20,), bytes(1 << 20))


@dataclass
class Scene:
    """One that serves, and callers, several at one address."""

    net: SimNet
    nursery: trio.Nursery
    served: PeerStack
    transports: dict[str, MemoryTransport] = field(default_factory=dict)
    failed: list[RemoteError] = field(default_factory=list)

    async def caller(self, name: str, address: str) -> PeerStack:
        """One more identity on the machine with this address."""
        if address not in self.transports:
            self.transports[address] = MemoryTransport(self.net, self.net.add_node(address, ip=address))
        stack = peer_stack(keypair(name), SimClock(1, name), [self.transports[address]])
        await self.nursery.start(stack.run)
        stack.host.learn(self.served.host.id, self.served.host.addrs())
        return stack

    async def ask(self, stack: PeerStack, name: str) -> None:
        await stack.rpc.call(self.served.host.id, f"t/1/{name}", Text("hi"), Empty, timeout_s=3600)

    async def hold(self, stack: PeerStack, name: str) -> None:
        """A call that runs as long as it is let."""

        async def call() -> None:
            try:
                await self.ask(stack, name)
            except RemoteError as error:
                self.failed.append(error)

        self.nursery.start_soon(call)
        await trio.sleep(1)

    @property
    def held(self) -> int:
        return int(self.served.rpc.status()["running"])


@asynccontextmanager
async def scene(declaration: Declaration) -> AsyncIterator[Scene]:
    """`t/1/fetch` asks its caller for something, without end; `t/1/work` takes as long as its caller likes."""
    async with running_net() as net, trio.open_nursery() as nursery:
        transport = MemoryTransport(net, net.add_node("served", ip="198.51.100.1"))
        served = peer_stack(keypair("served"), SimClock(1, "served"), [transport])

        async def fetch(call: Incoming[Text]) -> Answer[Empty]:
            while True:
                await served.rpc.call(call.peer, "u/1/piece", Text(""), Empty, timeout_s=3600)

        async def work(call: Incoming[Text]) -> Answer[Empty]:
            await trio.sleep_forever()
            raise AssertionError

        served.rpc.serve("t/1/fetch", Text, fetch, declared=declaration)
        served.rpc.serve("t/1/work", Text, work, declared=declaration)
        await nursery.start(served.run, [addr_of(net, "served")])
        yield Scene(net, nursery, served)
        nursery.cancel_scope.cancel()


async def never(call: Incoming[Text]) -> Answer[Empty]:
    await trio.sleep_forever()
    raise AssertionError


def gives(bytes_per_s: int) -> Callable[[Incoming[Text]], object]:
    async def piece(call: Incoming[Text]) -> Answer[Empty]:
        await trio.sleep(1)
        return Answer(Empty(), (TensorFrame("uint8", (bytes_per_s,), bytes(bytes_per_s)),))

    return piece


async def test_strangers_of_one_address_hold_a_quarter_and_of_one_network_half(autojump_clock: MockClock) -> None:
    async with scene(declared(calls=PLACES)) as s:
        for number in range(5):
            await s.hold(await s.caller(f"stranger {number}", "203.0.113.5"), "work")
        assert (s.held, len(s.failed)) == (PLACES // 4, 3)
        for number in range(3):
            await s.hold(await s.caller(f"neighbour {number}", f"203.0.113.{number + 6}"), "work")
        assert s.held == PLACES // 2
        for number in range(3):
            await s.hold(await s.caller(f"elsewhere {number}", f"192.0.2.{number + 1}"), "work")
        assert s.held == PLACES * 3 // 4
        member = await s.caller("member", "203.0.113.5")
        s.served.host.book.members_by(lambda peer: peer == member.host.id.text)
        await s.hold(member, "work")
        assert s.held == PLACES * 3 // 4 + 1
        assert all(isinstance(error, Overloaded) for error in s.failed)


async def test_who_holds_a_place_and_gives_nothing_loses_it_when_another_waits(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "peerd.rpc")
    async with scene(declared(calls=PLACES, fetches=True)) as s:
        for number in range(2):
            silent = await s.caller(f"silent {number}", "203.0.113.5")
            silent.rpc.serve("u/1/piece", Text, never, declared=ANY)
            await s.hold(silent, "fetch")
        await trio.sleep(300)
        assert s.held == 2  # nobody waits
        honest = await s.caller("honest", "203.0.113.5")
        honest.rpc.serve("u/1/piece", Text, gives(2 * RPC_LEAST_BYTES_PER_S), declared=declared(frames=1))
        began = trio.current_time()
        while s.held == 2 and not s.served.rpc.status()["served"]["t/1/fetch"]["gave_way"]:
            await s.hold(honest, "fetch")
        assert RPC_STALL_S <= trio.current_time() - began < RPC_STALL_S + 5
        assert "its caller has made no progress" in caplog.text
        await s.hold(honest, "fetch")
        await trio.sleep(60)
        assert s.held == 2
        for _ in range(30):  # the other silent one goes, the honest one moves and stays
            await s.hold(await s.caller(f"late {_}", "203.0.113.5"), "fetch")
        assert s.served.rpc.status()["served"]["t/1/fetch"]["gave_way"] >= 2
        assert not any(error.peer == honest.host.id for error in s.failed)


async def test_a_call_that_waits_for_this_machine_gives_way_to_nobody(autojump_clock: MockClock) -> None:
    async with scene(declared(calls=PLACES)) as s:
        for number in range(2):
            await s.hold(await s.caller(f"patient {number}", "203.0.113.5"), "work")
        for number in range(40):
            await s.hold(await s.caller(f"other {number}", "203.0.113.5"), "work")
        assert s.held == 2
        assert s.served.rpc.status()["served"]["t/1/work"]["gave_way"] == 0


async def test_who_does_not_read_its_answer_gives_way_before_its_time_is_over(autojump_clock: MockClock) -> None:
    async def piece(call: Incoming[Text]) -> Answer[Empty]:
        return Answer(Empty(), (PIECE,))

    async with scene(declared(calls=PLACES)) as s:
        s.served.rpc.serve("t/1/piece", Text, piece, declared=declared(calls=PLACES))
        began = trio.current_time()
        for number in range(2):
            deaf = await s.caller(f"deaf {number}", "203.0.113.5")
            stream = await deaf.host.open_stream(s.served.host.id, "/peerd/t/1")
            await stream.send(_request(b"piece"))
        await trio.sleep(1)
        assert s.held == 2
        honest = await s.caller("honest", "203.0.113.5")
        while True:
            try:
                await s.ask(honest, "piece")
                break
            except Overloaded:
                await trio.sleep(1)
        assert RPC_STALL_S <= trio.current_time() - began < RPC_MESSAGE_S


def _request(name: bytes) -> bytes:
    return wire.encode_call(wire.REQUEST, 1, name, 3600.0, encode(Text("")))


async def test_a_method_for_members_refuses_others_before_their_frames_come(autojump_clock: MockClock) -> None:
    async with scene(declared(calls=PLACES)) as s:
        members = declared(shows=Shows.MEMBERSHIP, frames=1, frame_bytes=1 << 20)
        s.served.rpc.serve("t/1/members", Text, echo, declared=members)
        stranger, member = await s.caller("stranger", "203.0.113.5"), await s.caller("member", "203.0.113.6")
        s.served.host.book.members_by(lambda peer: peer == member.host.id.text)
        with pytest.raises(Refused, match="for members"):
            await s.ask(stranger, "members")
        assert (await member.rpc.call(s.served.host.id, "t/1/members", Text("hi"), Text, timeout_s=9)).body.text == "hi"


async def test_what_callers_must_show_is_looked_at_or_not_served(autojump_clock: MockClock) -> None:
    async with scene(declared(calls=PLACES)) as s:
        for shows in (Shows.GRANT, Shows.TICKET, Shows.CONDUCTOR):
            with pytest.raises(LocalError, match="nothing checks it"):
                s.served.rpc.serve("t/1/checked", Text, echo, declared=declared(shows=shows))


async def test_too_many_rows_are_refused_by_the_frames_header(autojump_clock: MockClock) -> None:
    async with scene(declared(calls=PLACES)) as s:
        s.served.rpc.serve("t/1/rows", Text, echo, declared=declared(rows=4, frames=1, frame_bytes=1 << 20))
        caller = await s.caller("caller", "203.0.113.5")
        for rows in (4, 5):
            frame = TensorFrame("uint8", (rows, 8), bytes(rows * 8))
            call = caller.rpc.call(s.served.host.id, "t/1/rows", Text("hi"), Text, frames=(frame,), timeout_s=9)
            if rows == 4:
                await call
            else:
                with pytest.raises(Refused, match="a frame of 5 samples; allowed: 4"):
                    await call


async def test_calls_whose_proofs_do_not_hold_count_against_who_makes_them(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(cast(dict[Resource, Bounds], BOUNDS), Resource.UNPROVEN, shared_out(32, 4))
    looked_at = 0

    def objection(peer: PeerId, body: Text) -> RemoteError | None:
        nonlocal looked_at
        looked_at += 1
        return Refused("it is not signed").as_unproven() if body.text == "forged" else None

    async with scene(declared(calls=PLACES)) as s:
        s.served.rpc.serve("t/1/proven", Text, echo, declared=declared(shows=Shows.GRANT), objection=objection)

        async def failure(stack: PeerStack, text: str = "forged") -> str:
            try:
                await stack.rpc.call(s.served.host.id, "t/1/proven", Text(text), Text, timeout_s=9)
            except RemoteError as error:
                return type(error).__name__
            return ""

        forgers = [await s.caller(f"forger {number}", "203.0.113.5") for number in range(3)]
        assert [await failure(forgers[0]) for _ in range(8)] == ["Refused"] * 4 + ["Overloaded"] * 4
        assert [await failure(forgers[1]) for _ in range(8)] == ["Refused"] * 4 + ["Overloaded"] * 4
        assert [await failure(forgers[2]) for _ in range(8)] == ["Overloaded"] * 8  # of this address enough have come
        assert looked_at == 8
        assert await failure(await s.caller("honest", "192.0.2.1"), "good") == ""
        assert caplog.text.count("sends invalid proofs") == 2
        await trio.sleep(61)
        assert await failure(forgers[0], "good") == ""
        s.served.host.book.check()
