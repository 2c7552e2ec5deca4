"""Connections within limits, on loopback: they keep every transport's promises, and share what there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio
import trio.testing

from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.work import RateLimitedRead, read_at_once
from peerd.run.runfile import LimitsSection
from peerd.wire import tcp_info
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from peerd.wire.rate.limiter import SLACK_S
from peerd.wire.tcp import rate_limit
from peerd.wire.tcp.rate_limit import LimitedLine, LinePace, LineTurn, RateLimitedLink
from peerd.wire.tcp.tcp_transport import TcpLink, TcpTransport
from peerd.wire.transport import LendingLink
from tests.kit.amount import thorough
from tests.wire.compliance import Ends, TransportCompliance, on_loopback

MBIT = 8e-6


def keypair(number: int) -> Keypair:
    return Keypair.from_seed(bytes([number]) * 32)


def two_ends(limits: LimitsSection) -> AbstractAsyncContextManager[Ends]:
    """`near` is within the limits, `far` is not."""
    return on_loopback(LimitedLine(limits).tcp(), LimitedLine(LimitsSection()).tcp())


class _Paced(TransportCompliance):
    limits: LimitsSection

    @pytest.fixture
    def autojump_clock(self) -> None:
        """Sockets live in real time."""

    def ends(self) -> AbstractAsyncContextManager[Ends]:
        return two_ends(self.limits)


@pytest.mark.socket
@pytest.mark.alone
class TestBothLimited(_Paced):
    limits = LimitsSection(upload_mbit=400, download_mbit=400)


@pytest.mark.socket
@pytest.mark.alone
class TestUploadLimited(_Paced):
    limits = LimitsSection(upload_mbit=400)


@pytest.mark.socket
@pytest.mark.alone
class TestDownloadLimited(_Paced):
    limits = LimitsSection(download_mbit=400)


@pytest.mark.socket
@pytest.mark.alone
async def test_without_limits_there_is_nothing_on_the_way() -> None:
    async with two_ends(LimitsSection()) as ends:
        assert type(ends.near) is TcpLink


@pytest.fixture
def loopback_clock() -> trio.testing.MockClock:
    """Virtual time beside real sockets: it moves on once a connection on loopback has been still for a millisecond."""
    return trio.testing.MockClock(autojump_threshold=0.001)


def fill(ends: Ends, end: str, got: dict[str, int], nursery: trio.Nursery, size: int) -> None:
    """Send to this end all the time, in pieces of `size`, and count what arrives."""
    taker, sender = (ends.near, ends.far) if end == "near" else (ends.far, ends.near)

    async def read() -> None:
        while data := await taker.receive_some(1 << 16):
            got[end] += len(data)

    async def write() -> None:
        while True:
            await sender.send_all(bytes(size))

    nursery.start_soon(read)
    nursery.start_soon(write)


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize("known", [True, False])
async def test_what_passes_in_half_a_second_is_what_the_limits_allow(
    loopback_clock: trio.testing.MockClock, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(rate_limit, "tcp_info", lambda sock: None)
    async with two_ends(LimitsSection(upload_mbit=20, download_mbit=40)) as ends:
        got = {"near": 0, "far": 0}
        began = trio.current_time()
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                for end in got:
                    fill(ends, end, got, nursery, 1 << 16)
        passed_s = trio.current_time() - began
        assert isinstance(ends.near, RateLimitedLink)
    for count, mbit in ((got["far"], 20), (got["near"], 40)):
        assert 0.5 * mbit < count * MBIT / passed_s < mbit * (1 + 0.06 / passed_s) + 0.5


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize(("up_mbit", "down_mbit"), [thorough(5.0, 5.0), (8.0, 0.0), thorough(0.0, 16.0), (20.0, 40.0)])
async def test_a_limit_is_kept_within_five_in_a_hundred(
    loopback_clock: trio.testing.MockClock, up_mbit: float, down_mbit: float
) -> None:
    """After the burst with which it begins, with the connection busy both ways."""
    async with two_ends(LimitsSection(upload_mbit=up_mbit, download_mbit=down_mbit)) as ends:
        got = {"near": 0, "far": 0}
        async with trio.open_nursery() as nursery:
            for end, limit in (("near", down_mbit), ("far", up_mbit)):
                if limit:
                    fill(ends, end, got, nursery, 1 << 14)
            await trio.sleep(1.0)
            before, began = dict(got), trio.current_time()
            await trio.sleep(4.0)  # what is measured is a stretch of the line's own time
            passed_s = trio.current_time() - began
            moved = {end: (got[end] - before[end]) * MBIT / passed_s for end in got}
            nursery.cancel_scope.cancel()
    for end, limit in (("near", down_mbit), ("far", up_mbit)):
        assert not limit or 0.95 * limit < moved[end] < 1.05 * limit, moved


async def test_connections_take_turns_and_one_of_them_keeps_the_time(autojump_clock: trio.testing.MockClock) -> None:
    pace, turns = LinePace(1e6), [LineTurn() for _ in range(3)]
    got = [0, 0, 0]

    async def pull(number: int) -> None:
        while True:
            got[number] += await pace.take(turns[number], 1 << 20)

    began = trio.current_time()
    with trio.move_on_after(10.0):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(pull, number)
            await trio.sleep(5.0)
            nursery.cancel_scope.cancel()
    assert trio.current_time() - began == pytest.approx(5.0)
    assert sum(got) == pytest.approx(5e6, rel=0.02)
    assert max(got) - min(got) <= 70_000
    assert pace.busy == 1, "who was cancelled still waits"


async def test_who_waits_goes_on_when_the_one_that_kept_the_time_is_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pace, first, second = LinePace(1e3), LineTurn(), LineTurn()
    while pace.try_take(first, 3000):
        pass
    scope = trio.CancelScope()
    got: list[int] = []

    async def keep() -> None:
        with scope:
            await pace.take(first, 3000)

    async def wait() -> None:
        got.append(await pace.take(second, 3000))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert got == [3000]
    assert scope.cancelled_caught


async def test_closing_ends_the_wait_for_a_turn(autojump_clock: trio.testing.MockClock) -> None:
    pace, turn = LinePace(125.0), LineTurn()
    while pace.try_take(turn, 3000):
        pass

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pace.take(turn, 3000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        pace.close(turn)
    with pytest.raises(trio.ClosedResourceError):
        await pace.take(turn, 1)


@pytest.mark.socket
@pytest.mark.alone
async def test_a_slow_line_is_given_small_batches() -> None:
    async with two_ends(LimitsSection(upload_mbit=1)) as ends:
        near, far = ends.near, ends.far
        assert isinstance(near, LendingLink)
        assert isinstance(far, LendingLink)
        assert near.batch_bytes < 64 << 10 < far.batch_bytes


@pytest.mark.socket
@pytest.mark.alone
async def test_the_system_counts_what_a_connection_costs() -> None:
    async with two_ends(LimitsSection(upload_mbit=1000)) as ends:
        assert isinstance(ends.near, RateLimitedLink)
        before = tcp_info.tcp_info(ends.near._socket)
        if before is None:
            pytest.skip("this system has no TCP_INFO")
        await ends.near.send_all(b"x" * 1000)
        assert await ends.far.receive_some(2000) == b"x" * 1000
        await ends.far.send_all(b"y")
        await ends.near.receive_some(1)
        after = tcp_info.tcp_info(ends.near._socket)
        assert after is not None
        out, into = after.overhead_since(before)
        assert after.bytes_acked - before.bytes_acked == 1000
        assert after.bytes_received - before.bytes_received == 1
        assert after.header_bytes <= out <= 3 * after.header_bytes
        assert after.header_bytes <= into <= 3 * after.header_bytes


async def seconds_to_read(reads: RateLimitedRead, total: int, most: int, given: Callable[[int], int]) -> float:
    """Until a thread has read so many bytes; `given`: how many of those that it may bring have come."""
    began, came = trio.current_time(), 0

    def read(allowed: int) -> bytes:
        return bytes(min(given(allowed), total - came))

    def job() -> None:
        nonlocal came
        while came < total:
            came += len(reads(read, most))

    await trio.to_thread.run_sync(job)
    return trio.current_time() - began


@pytest.mark.parametrize("share", [1.0, 0.25], ids=["whole", "in part"])
async def test_what_a_thread_reads_keeps_to_the_limit_however_little_has_come(
    autojump_clock: trio.testing.MockClock, share: float
) -> None:
    reads = LimitedLine(LimitsSection(download_mbit=80, upload_mbit=1)).reads()
    took_s = await seconds_to_read(reads, 2_000_000, 1 << 20, lambda allowed: max(1, int(allowed * share)))
    assert took_s == pytest.approx(2_000_000 * (1 + 52 / 1448) / 10e6 - SLACK_S, rel=0.05)


async def test_what_a_thread_has_read_connections_cannot_have_too(autojump_clock: trio.testing.MockClock) -> None:
    line = LimitedLine(LimitsSection(download_mbit=80))
    pace = line._down
    assert pace is not None
    quantum_bytes = pace.limiter.quantum_bytes
    assert pace.try_take(LineTurn(), quantum_bytes)
    await seconds_to_read(line.reads(), int(pace.limiter.burst_bytes), quantum_bytes, lambda allowed: allowed)
    assert not pace.try_take(LineTurn(), quantum_bytes)


def test_without_a_limit_a_thread_reads_at_once() -> None:
    assert LimitedLine(LimitsSection(upload_mbit=1)).reads() is read_at_once


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize("way", ["into", "out of"])
async def test_strangers_who_fill_the_line_leave_it_to_members(
    loopback_clock: trio.testing.MockClock, way: str
) -> None:
    """Three strangers at another address and one member all move as much as they can, over the host's limited line.

    The strangers are there first, and what the line carried before the member's first byte does not count; nor does
    what waits in sockets, since the host itself counts. The limit is far below what a busy machine moves, else the
    processors would share out the line.
    """
    limits = LimitsSection(upload_mbit=10, download_mbit=10)
    host, (member, *strangers) = Host(keypair(1), RealClock(1), [LimitedLine(limits).tcp()]), map(keypair, range(2, 6))
    host.book.members_by(lambda peer: peer == member.peer_id.text)
    before: dict[PeerId, int] = {}

    def carried() -> dict[PeerId, int]:
        peers = host.traffic().peers
        return {peer: each.bytes_in if way == "into" else each.bytes_out for peer, each in peers.items()}

    def look() -> None:
        if before and sum(carried().values()) - sum(before.values()) > 1_500_000:
            enough.set()

    async def fill(stream: Stream) -> None:
        while True:
            await stream.send(bytes(1 << 16))
            look()

    async def count(stream: Stream, peer: PeerId) -> None:
        while await stream.receive_some(1 << 16):
            if peer == member.peer_id and not before:
                before.update(carried())
            look()

    enough = trio.Event()
    async with trio.open_nursery() as nursery:
        host.handle("/sink/1", lambda stream: count(stream, stream.peer))
        host.handle("/spring/1", fill)
        await nursery.start(functools.partial(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")]))
        streams = []
        for number, each in enumerate((member, *strangers)):
            own = Host(each, RealClock(number), [TcpTransport()])
            await nursery.start(functools.partial(own.run, [parse_addr("/ip4/127.0.0.1/tcp/0")]))
            peer = await own.connect_addr(host.addrs()[0])
            streams.append((await own.open_stream(peer, "/sink/1" if way == "into" else "/spring/1"), each.peer_id))
        for stream, peer_id in reversed(streams):
            if way == "into":
                nursery.start_soon(fill, stream)
            else:
                await stream.send(b"go")
                nursery.start_soon(count, stream, peer_id)
        await enough.wait()
        after = carried()
        nursery.cancel_scope.cancel()
    moved = {peer: total - before[peer] for peer, total in after.items()}
    assert moved[member.peer_id] > 2 * sum(moved[each.peer_id] for each in strangers), moved
