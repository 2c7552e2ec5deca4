"""A fault of ours ends the link or the stream that met it, is named with its place and counted; the host lives on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.core import limits
from peerd.core.errors import RemoteError
from peerd.wire.faults import Faults
from peerd.wire.link.link_stream import Stream
from tests.worlds.network.hosts import ask, echo, running_hosts


def broken(*_: object) -> bool:
    raise ZeroDivisionError("a bug of ours")


async def broken_later(*_: object) -> None:
    await trio.lowlevel.checkpoint()
    broken()


def only(faults: Faults) -> str:
    """The one place that is counted."""
    ((place, fault),) = faults.places.items()
    assert fault.error == "ZeroDivisionError: a bug of ours"
    return place


async def into_broken(stream: Stream) -> None:
    await stream.receive_into(bytearray(100_000), broken)  # type: ignore[arg-type]


async def each_broken(stream: Stream) -> None:
    await stream.receive_each(broken)


@pytest.mark.parametrize("handler", [into_broken, each_broken])
async def test_a_fault_in_what_waits_for_bytes_resets_its_stream_only(
    autojump_clock: Clock, handler: Callable[[Stream], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        b.handle("/broken/1", handler)
        b.handle("/echo/1", echo)
        await a.connect(b.id, [hosts.addr("b")])
        stream = await a.open_stream(b.id, "/broken/1")
        await trio.sleep(1)
        link = b.links.best(a.id)
        await stream.send(b"x")
        with pytest.raises(RemoteError):
            await stream.receive_some(1)
        assert await ask(a, b, b"hello") == b"hello"
        assert b.links.best(a.id) is link
        assert only(b.faults).startswith(
            "peerd/wire/link/link_stream.py:"
        )  # not this file: the innermost frame of ours
        assert b.faults.total == 1
        assert "an internal error at peerd/wire/link/link_stream.py" in caplog.text


async def test_a_fault_in_a_link_ends_that_link_only(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_hosts() as hosts:
        a, b, c = [await hosts.start(name) for name in "abc"]
        b.handle("/echo/1", echo)
        for host in (a, c):
            await host.connect(b.id, [hosts.addr("b")])
        await trio.sleep(1)
        spoiled = b.links.best(a.id)
        assert spoiled is not None
        with b.watch() as events:
            monkeypatch.setattr(spoiled.mux, "receive", broken)
            link = a.links.best(b.id)
            assert link is not None
            stream = await a.open_stream(b.id, "/echo/1")
            with pytest.raises(RemoteError):
                await stream.receive_some(1)
            assert (await events.receive()).peer == a.id
        assert spoiled.reason == "this side failed"
        assert await ask(c, b, b"hello") == b"hello"
        assert await ask(a, b, b"again") == b"again"
        assert only(b.faults).startswith("peerd/wire/link/link.py:")


async def test_a_fault_in_a_hand_shake_ends_that_connection_only(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        with monkeypatch.context() as patch:
            patch.setattr(b, "_adopt", broken)
            await a.connect(b.id, [hosts.addr("b")])
            await trio.sleep(1)
            assert a.connected() == []
        assert only(b.faults).startswith("peerd/wire/host/host.py:")
        await a.connect(b.id, [hosts.addr("b")])
        assert await a.ping(b.id) >= 0


async def test_a_fault_in_what_is_told_of_a_links_end_ends_nothing_else(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        await a.connect(b.id, [hosts.addr("b")])
        await trio.sleep(1)
        monkeypatch.setattr(b, "link_leaving", broken)
        await hosts.stop("a")
        await trio.sleep(1)
        assert len(b.links) == 0
        assert b.faults.total == 1


async def test_a_fault_in_what_is_told_of_better_links_ends_nothing(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        for host in (a, b):
            host.when_moved(broken)
        await a.connect(b.id, [hosts.addr("b")])
        await trio.sleep(1)
        assert await a.ping(b.id) >= 0
        assert a.faults.total == b.faults.total == 1


async def test_what_is_cancelled_beside_a_fault_stays_cancelled() -> None:
    faults = Faults()

    async def two() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(falls_when_cancelled)

    async def falls_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            broken()

    with trio.CancelScope() as scope:
        scope.cancel()
        await faults.contain(two, lambda: "two")
        raise AssertionError("it was cancelled")
    assert scope.cancelled_caught
    assert faults.total == 1


async def test_places_and_the_log_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    for number in range(limits.FAULT_PLACES + 36):
        code = compile("\n" * number + "1/0", "somewhere.py", "exec")
        try:
            exec(code)
        except ZeroDivisionError as error:
            faults.note("a test", error)
    assert len(faults.places) == limits.FAULT_PLACES + 1
    assert faults.places["elsewhere"].count == 36
    assert faults.total == limits.FAULT_PLACES + 36
    caplog.clear()
    for _ in range(100):
        await faults.contain(broken_later, lambda: "x" * 10_000)
    assert len(caplog.records) <= 7


async def test_only_what_a_peer_does_is_no_fault(autojump_clock: Clock) -> None:
    """A handler that learns of its peer's end, in a nursery or not."""

    async def in_a_nursery(stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive_exactly, 10)

    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        b.handle("/ten/1", in_a_nursery)
        await a.connect(b.id, [hosts.addr("b")])
        for end in (Stream.reset, Stream.aclose):
            stream = await a.open_stream(b.id, "/ten/1")
            await trio.sleep(1)
            done = end(stream)
            if done is not None:
                await done
            await trio.sleep(1)
        assert b.faults.total == 0
