"""Compliance suite of every transport, as one class of tests: subclass it and give `ends`.

Not collected by itself. The same tests run over TCP and over the simulated network: one may stand for the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core.addr import parse_addr
from peerd.core.errors import ConfigError, Unreachable
from peerd.wire.transport import Listener, RawLink, Transport

LOOPBACK = parse_addr("/ip4/127.0.0.1/tcp/0")


@dataclass(frozen=True)
class Ends:
    """Two sides of one transport kind and a link between them."""

    dialer: Transport
    answerer: Transport
    listener: Listener
    near: RawLink  # the dialer's end
    far: RawLink


@asynccontextmanager
async def on_loopback(dialer: Transport, answerer: Transport) -> AsyncIterator[Ends]:
    """A connection over real sockets, closed whatever happens."""
    listener = await answerer.listen(LOOPBACK)
    near = await dialer.dial(listener.addrs[0])
    far = await listener.accept()
    try:
        yield Ends(dialer, answerer, listener, near, far)
    finally:
        with trio.CancelScope(shield=True):
            for end in (near, far, listener):
                await end.aclose()


async def read_exactly(link: RawLink, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = await link.receive_some(count - len(data))
        assert part, "the link ended early"
        data += part
    return bytes(data)


class TransportCompliance:
    """Subclasses give `ends`."""

    @abstractmethod
    def ends(self) -> AbstractAsyncContextManager[Ends]: ...

    async def test_bytes_go_both_ways_in_order(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            await ends.near.send_all(b"hello ")
            await ends.near.send_all(bytearray(b"there"))
            assert await read_exactly(ends.far, 11) == b"hello there"
            await ends.far.send_all(memoryview(b"back"))
            assert await read_exactly(ends.near, 4) == b"back"

    async def test_a_reader_gets_no_more_than_it_asked_for(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            await ends.near.send_all(b"0123456789")
            assert len(await ends.far.receive_some(3)) <= 3

    async def test_megabytes_cross_while_both_sides_send(self, autojump_clock: trio.testing.MockClock) -> None:
        data = bytes(range(256)) * 8192
        async with self.ends() as ends, trio.open_nursery() as nursery:
            nursery.start_soon(ends.near.send_all, data)
            nursery.start_soon(ends.far.send_all, data[::-1])
            assert await read_exactly(ends.far, len(data)) == data
            assert await read_exactly(ends.near, len(data)) == data[::-1]

    async def test_the_end_is_seen_after_the_last_byte(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            await ends.near.send_all(b"last")
            await ends.near.aclose()
            assert await read_exactly(ends.far, 4) == b"last"
            assert await ends.far.receive_some(10) == b""

    async def test_a_closed_link_says_so(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            await ends.near.aclose()
            await ends.near.aclose()
            with pytest.raises(trio.ClosedResourceError):
                await ends.near.send_all(b"x")
            with pytest.raises(trio.ClosedResourceError):
                await ends.near.receive_some(1)

    async def test_closing_ends_those_who_wait(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends, trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
                    await ends.near.receive_some(1)

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await ends.near.aclose()

    async def test_a_cancelled_reader_loses_nothing(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            for _ in range(3):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await ends.far.receive_some(5)
            await ends.near.send_all(b"12345")
            assert await read_exactly(ends.far, 5) == b"12345"

    async def test_a_writer_waits_for_a_reader_that_does_not_read(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends, trio.open_nursery() as nursery:
            written = 0

            async def write() -> None:
                nonlocal written
                while True:
                    await ends.near.send_all(bytes(1 << 20))
                    written += 1 << 20

            nursery.start_soon(write)
            await self.settle()
            assert written <= 64 << 20
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        """Wait until nothing moves."""
        await trio.testing.wait_all_tasks_blocked(0.05)

    async def test_a_listener_names_where_it_can_be_dialed(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            for addr in ends.listener.addrs:
                assert ends.dialer.can_dial(addr)
            link = await ends.dialer.dial(ends.listener.addrs[0])
            other = await ends.listener.accept()
            assert isinstance(other.remote, Multiaddr)
            assert link.remote == ends.listener.addrs[0]
            await link.aclose()
            assert await other.receive_some(1) == b""
            await other.aclose()

    async def test_an_address_in_use_is_named(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            with pytest.raises(ConfigError) as caught:
                await ends.answerer.listen(ends.listener.addrs[0])
            assert str(ends.listener.addrs[0]) in str(caught.value)

    async def test_nobody_is_reached_where_nobody_listens(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends:
            await ends.listener.aclose()
            with pytest.raises(Unreachable):
                await ends.dialer.dial(ends.listener.addrs[0])

    async def test_a_closed_listener_ends_its_acceptor(self, autojump_clock: trio.testing.MockClock) -> None:
        async with self.ends() as ends, trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await ends.listener.accept()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await ends.listener.aclose()
