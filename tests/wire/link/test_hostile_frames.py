"""Peers that have proven an identity, and then say what no muxer would: it ends their link, or nothing at all."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.core import limits
from peerd.core.errors import RemoteError, Unreachable
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from peerd.wire.yamux.frames import DATA, FIN, RST, SYN, WINDOW
from peerd.wire.yamux.stream import YamuxStream
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER
from tests.worlds.network.hostile import Hostile, enter, frame, hello, secrets
from tests.worlds.network.hosts import Hosts, ask, echo, running_hosts
from tests.worlds.network.virtual import transport

JUNK = b"\xff" * 12  # no frame


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[Hosts, Host, Hostile]]:
    """A host, and a hostile peer that is connected to it. At the end an honest one is answered: no fault was ours."""
    async with running_hosts() as hosts:
        host, honest = await hosts.start("host"), await hosts.start("honest")
        host.handle("/echo/1", echo)
        await honest.connect(host.id, [hosts.addr("host")])
        hostile = await enter(transport(hosts.net, "hostile"), hosts.addr("host"), secrets("hostile"))
        await trio.sleep(1)
        yield hosts, host, hostile
        await trio.sleep(1)
        assert await ask(honest, host, b"still there?") == b"still there?"
        assert host.faults.places == {}


def kept_streams() -> int:
    gc.collect()
    return sum(type(each) is YamuxStream for each in gc.get_objects())


def link_of(host: Host, hostile: Hostile) -> object:
    return host.links.best(secrets("hostile").identity.peer_id)


@pytest.mark.parametrize("body", [b"", b"\x13/multistream/1.0.0\n", hello("/echo/1"), hello("/echo/1") + b"hello"])
@pytest.mark.parametrize("end", [RST, FIN, RST | FIN])
async def test_a_stream_that_begins_and_ends_in_one_read_is_nobodys(
    autojump_clock: Clock, body: bytes, end: int
) -> None:
    async with attacked() as (_, host, hostile):
        link = link_of(host, hostile)
        await hostile.say(frame(DATA, SYN, 1, len(body), body) + frame(WINDOW, end, 1, 0))
        await hostile.say(frame(WINDOW, SYN | end, 3, 0))
        await trio.sleep(1)
        assert link_of(host, hostile) is link
        (one,) = [each for each in host.links if each is link]
        assert one.mux.inbound == 0
        assert [stream for stream in one.streams if stream.mux.inbound] == []


async def test_a_thousand_such_streams_leave_nothing_behind(autojump_clock: Clock) -> None:
    async with attacked() as (_, host, hostile):
        for begin in range(1, 20_001, 2000):
            numbers = range(begin, begin + 2000, 2)
            await hostile.say(b"".join(frame(WINDOW, SYN, n, 0) + frame(WINDOW, RST, n, 0) for n in numbers))
        await trio.sleep(1)
        (link,) = [each for each in host.links if each.peer == secrets("hostile").identity.peer_id]
        assert link.mux.inbound == 0
        assert link.mux.streams.keys() <= {2, 4}  # we ask it to introduce itself


async def pour(stream: Stream) -> None:
    while True:
        await stream.send(bytes(1 << 18))


async def test_who_answers_a_stream_that_was_reset_beside_a_violation_learns_of_its_end(autojump_clock: Clock) -> None:
    """The link's last words wait behind what the peer does not read: its streams must not wait with them."""
    ended: list[BaseException] = []

    async def answers_late(stream: Stream) -> None:
        await stream.receive_exactly(5)
        await trio.sleep(0.2)
        try:
            await stream.send(b"an answer")
        except BaseException as error:
            ended.append(error)
            raise

    async with attacked() as (_, host, hostile):
        host.handle("/late/1", answers_late)
        host.handle("/pour/1", pour)
        await hostile.say(frame(DATA, SYN, 1, len(hello("/pour/1")), hello("/pour/1")) + frame(WINDOW, 0, 1, 1 << 30))
        await hostile.say(frame(DATA, SYN, 3, len(hello("/late/1")) + 5, hello("/late/1") + b"hello"))
        await trio.sleep(0.1)
        await hostile.say(frame(WINDOW, RST, 3, 0) + JUNK)
        await trio.sleep(0.5)
        assert [type(error) for error in ended] == [Unreachable]
        assert link_of(host, hostile) is None
        await hostile.gone()


async def test_what_came_before_a_violation_is_heard(autojump_clock: Clock) -> None:
    heard = bytearray()

    async def listens(stream: Stream) -> None:
        with pytest.raises(RemoteError):
            await stream.receive_each(lambda data: heard.extend(data) is None)

    async with attacked() as (_, host, hostile):
        host.handle("/listen/1", listens)
        await hostile.say(frame(DATA, SYN, 1, len(hello("/listen/1")), hello("/listen/1")))
        await trio.sleep(0.1)
        await hostile.say(frame(DATA, 0, 1, 5, b"hello") + JUNK)
        await hostile.gone()
        assert bytes(heard) == b"hello"


async def test_a_taker_that_answers_on_a_stream_whose_end_came_in_the_same_read_goes_on(autojump_clock: Clock) -> None:
    """Both ends are in the muxer before either stream is told."""
    first: list[Stream] = []
    taken: list[bool] = []

    async def remembers(stream: Stream) -> None:
        first.append(stream)
        await stream.receive_some(1)

    async def answers_there(stream: Stream) -> None:
        await stream.receive_each(lambda data: taken.append(first[0].send_nowait(data)) is None)

    async with attacked() as (_, host, hostile):
        host.handle("/first/1", remembers)
        host.handle("/second/1", answers_there)
        await hostile.open("/first/1")
        await hostile.open("/second/1")
        await trio.sleep(0.1)
        await hostile.say(frame(DATA, 0, 3, 4, b"work") + frame(WINDOW, RST, 1, 0))
        await trio.sleep(0.1)
        assert taken == [False]


async def test_nothing_counts_that_comes_after_a_violation(autojump_clock: Clock) -> None:
    came: list[Stream] = []

    async def notes(stream: Stream) -> None:
        came.append(stream)

    async with attacked() as (_, host, hostile):
        host.handle("/note/1", notes)
        await hostile.say(JUNK)
        await hostile.say(frame(DATA, SYN, 1, len(hello("/note/1")), hello("/note/1")))
        await hostile.gone()
        assert came == []


@pytest.mark.slow
async def test_streams_opened_and_reset_while_nothing_is_read_are_not_kept(autojump_clock: Clock) -> None:
    async with attacked() as (_, host, hostile):
        host.handle("/pour/1", pour)
        await hostile.say(frame(DATA, SYN, 1, len(hello("/pour/1")), hello("/pour/1")) + frame(WINDOW, 0, 1, 1 << 30))
        await trio.sleep(1)  # the writer is stuck from now on
        before = kept_streams()
        for begin in range(3, 20_003, 200):
            numbers = range(begin, begin + 200, 2)
            await hostile.say(b"".join(frame(WINDOW, SYN, n, 0) for n in numbers))
            await trio.lowlevel.checkpoint()
            await hostile.say(b"".join(frame(WINDOW, RST, n, 0) for n in numbers))
        await trio.sleep(1)
        assert kept_streams() - before < 2 * limits.RINGED_RESETS
        await hostile.raw.aclose()


@pytest.mark.slow
async def test_one_byte_pieces_far_apart_end_the_link_before_they_cost_much(autojump_clock: Clock) -> None:
    async with attacked() as (_, host, hostile):
        (link,) = [each for each in host.links if each.peer == secrets("hostile").identity.peer_id]
        tracemalloc.start()
        try:
            before, stream = tracemalloc.get_traced_memory()[0], -1
            while host.links.best(link.peer) is link:
                stream += 2
                await hostile.say(frame(WINDOW, SYN, stream, 0))
                places = range(1, 600, 2)  # more than a window as it is at first allows
                await hostile.say(b"".join(PLACED_HEADER.pack(0, PLACED, 0, stream, 1, at) + b"x" for at in places))
                await trio.sleep(0.001)
            taken = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert "scattered pieces" in str(link.reason)
        assert taken < limits.WINDOW_BYTES_LINK // 4 + (stream // 2 + 1) * limits.WINDOW_BYTES_INITIAL // 4


async def test_windows_lent_to_a_link_are_free_again_when_it_ends(autojump_clock: Clock) -> None:
    """Also those of streams that nobody holds: they never named a protocol, or we are done with them."""

    async def done(stream: Stream) -> None:
        await stream.receive_some(1)

    async with attacked() as (_, host, hostile):
        host.handle("/done/1", done)
        for stream, protocol in ((1, "/done/1"), (3, "/none/1")):
            body = hello(protocol)[: None if stream == 1 else -1]
            await hostile.say(frame(DATA, SYN, stream, len(body), body))
            await hostile.say(PLACED_HEADER.pack(0, PLACED, 0, stream, 1, 1000) + b"x")
        await trio.sleep(0.1)
        assert host.window_bytes_lent > 0
        await hostile.say(PLACED_HEADER.pack(0, PLACED, 0, 1, 1, len(hello("/done/1"))) + b"x")
        await trio.sleep(0.1)
        await hostile.raw.aclose()
        await trio.sleep(0.1)
        assert host.window_bytes_lent == 0
