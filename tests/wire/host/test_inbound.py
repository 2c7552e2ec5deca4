"""Those who connect and have proven nothing yet: a bounded number of places, which no household can take for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr
from peerd.wire.host.inbound import InboundGate
from peerd.wire.transport import RawLink

pytestmark = pytest.mark.usefixtures("autojump_clock")
PLACES = 8


class Silent:
    """A connection on which nothing comes."""

    def __init__(self, host: str) -> None:
        self.remote = tcp_addr(host, 7)
        self.closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.sleep_forever()
        return b""

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


class Door:
    """A Listener whose visitors are named by the test."""

    def __init__(self) -> None:
        self.addrs: list[Multiaddr] = []
        self.visit, self._visitors = trio.open_memory_channel[Silent](1000)

    async def accept(self) -> RawLink:
        try:
            return await self._visitors.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    async def aclose(self) -> None:
        await self.visit.aclose()


async def wait(raw: RawLink) -> None:
    await raw.receive_some(1)


@asynccontextmanager
async def reception(within_s: float) -> AsyncIterator[Door]:
    door = Door()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(InboundGate(PLACES, within_s, wait).serve, door)
        yield door
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "crowd",
    ["45.6.7.8", "2a00:1:2:3::{:x}", "45.6.7.{}", "2a00:1:2:{:x}::1"],
    ids=["one address", "one IPv6 network", "many addresses of one region", "many IPv6 networks of one region"],
)
async def test_a_crowd_from_one_household_pushes_out_its_own(crowd: str) -> None:
    async with reception(60.0) as door:
        guest = Silent("81.2.3.4")
        door.visit.send_nowait(guest)
        strangers = [Silent(crowd.format(number)) for number in range(1, 100)]
        for stranger in strangers:
            door.visit.send_nowait(stranger)
        await trio.sleep(1)
        assert not guest.closed
        assert sum(not stranger.closed for stranger in strangers) == PLACES - 1


async def test_who_proves_nothing_in_time_has_to_leave() -> None:
    async with reception(5.0) as door:
        guest = Silent("81.2.3.4")
        door.visit.send_nowait(guest)
        await trio.sleep(4.9)
        assert not guest.closed
        await trio.sleep(0.2)
        assert guest.closed
