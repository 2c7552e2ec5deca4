"""Hosts without sockets, encryption or a wire: streams in memory that behave like those of `wire.host.host`.

For tests of services. Streams have bounded buffers with back-pressure, resets and ends; links between two hosts can
be cut and healed. The tests in tests/rpc/test_rpc.py run over these and over real hosts alike: what they rely
on holds for both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from peerd.core.errors import Refused, Unreachable
from peerd.core.ids import PeerId
from peerd.rpc.loopback import LoopbackStream, local_pair
from peerd.rpc.rpc_types import RpcStream
from peerd.wire.budget.book import Book

Handler = Callable[[RpcStream], Awaitable[None]]


class TrioClock:
    """Time as trio has it, wall time that starts at a fixed day, and random streams that are always the same."""

    def now(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return 1_700_000_000.0 + trio.current_time()

    def secure_bytes(self, count: int) -> bytes:
        return self.rng("secure").randbytes(count)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(purpose)


class FakeHost:
    """One host of a FakeNet."""

    def __init__(self, net: FakeNet, name: str) -> None:
        self.id = PeerId.from_public_key(hashlib.sha256(name.encode()).digest())
        self.crashes: list[tuple[str, BaseException]] = []  # what the supervisor caught, and about what
        self.opened: list[str] = []  # protocols of the streams that this host opened
        self.book = Book()
        self._net = net
        self._handlers: dict[str, Handler] = {}

    def when_moved(self, told: Callable[[PeerId], None]) -> None:
        """There is one way to each peer."""

    def handle(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler

    async def open_stream(self, peer: PeerId, protocol: str) -> LoopbackStream:
        await trio.lowlevel.checkpoint()
        other = self._net.reachable(self.id, peer)
        self.opened.append(protocol)
        ours, theirs = local_pair(self.id, peer, protocol)
        self._net.streams.append((frozenset((self.id, peer)), ours))
        self._net.nursery.start_soon(other._accept, theirs)
        return ours

    async def _accept(self, stream: LoopbackStream) -> None:
        handler = self._handlers.get(stream.protocol)
        if handler is None:
            stream.lose(Refused(f"it does not speak {stream.protocol}"))
        elif not await self.supervise(lambda: handler(stream), lambda: stream.protocol):
            stream.reset()

    async def supervise(self, work: Callable[[], Awaitable[None]], about: Callable[[], str]) -> bool:
        try:
            await work()
        except Exception as error:
            self.crashes += [(about(), each) for each in leaves(error)]
            return False
        return True


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group of groups, each by itself, as real hosts note them."""
    if isinstance(error, BaseExceptionGroup):
        return [each for member in error.exceptions for each in leaves(member)]
    return [error]


class FakeNet:
    """All hosts, and which of them reach each other."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.streams: list[tuple[frozenset[PeerId], LoopbackStream]] = []
        self._hosts: dict[PeerId, FakeHost] = {}
        self._cut: set[frozenset[PeerId]] = set()

    def host(self, name: str) -> FakeHost:
        host = FakeHost(self, name)
        self._hosts[host.id] = host
        return host

    def reachable(self, one: PeerId, other: PeerId) -> FakeHost:
        if other not in self._hosts or frozenset((one, other)) in self._cut:
            raise Unreachable("no way to it", other)
        return self._hosts[other]

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Lose the link between two hosts at once, with all its streams."""
        pair = frozenset((one, other))
        self._cut.add(pair)
        for link, stream in self.streams:
            if link == pair:
                stream.lose(Unreachable("the link was lost"))
        self.streams = [(link, stream) for link, stream in self.streams if link != pair]

    def heal(self, one: PeerId, other: PeerId) -> None:
        """Let two hosts reach each other again."""
        self._cut.discard(frozenset((one, other)))


@asynccontextmanager
async def fake_net() -> AsyncIterator[FakeNet]:
    """A net whose streams and handlers end with the block."""
    async with trio.open_nursery() as nursery:
        yield FakeNet(nursery)
        nursery.cancel_scope.cancel()
