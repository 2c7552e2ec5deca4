"""The relay's service on a simulated network: its limits, its fairness, and what it does with the ends of circuits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.core import limits
from peerd.core.addr import with_peer
from peerd.core.errors import Refused, Unreachable
from peerd.core.keys import verify
from peerd.reach.messages.circuit_message import HOP, STOP, HopKind, HopMessage, Status
from peerd.reach.messages.voucher import Voucher
from peerd.reach.relay.relay import Relay
from peerd.reach.relay.relay_limits import RelayConfig
from peerd.wire.host.host import Host
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.transport import RawLink
from tests.worlds.network.circuits import Client, behind, relayed, start_client, start_relay
from tests.worlds.network.hosts import ask, echo, keypair, running_hosts


async def circuit_to(a: Client, b: Client, relay: Host) -> RawLink:
    """A bare circuit, with nothing authenticated; `b` has to answer it."""
    (addr,) = b.circuits.reservations[relay.id].addrs
    return await a.circuits.dial(with_peer(addr, b.host.id))


def taking(client: Client, monkeypatch: pytest.MonkeyPatch) -> trio.MemoryReceiveChannel[RawLink]:
    """Bare circuits that come in at `client`."""
    give, take = trio.open_memory_channel[RawLink](100)

    async def welcome(raw: RawLink, peer: object) -> None:
        await give.send(raw)

    monkeypatch.setattr(client.circuits, "welcome", welcome)
    return take


Ends = tuple[RawLink, RawLink]


@asynccontextmanager
async def joined(
    monkeypatch: pytest.MonkeyPatch, config: RelayConfig | None = None, **line: float
) -> AsyncIterator[tuple[Relay, Callable[[], Awaitable[Ends]]]]:
    """A relay, and what makes a bare circuit over it each time: the ends of who called and of who was called."""
    async with relayed(config, **line) as (_, relay, service, a, b):
        circuits = taking(b, monkeypatch)

        async def circuit() -> Ends:
            return await circuit_to(a, b, relay), await circuits.receive()

        yield service, circuit


async def read_all(raw: RawLink) -> int:
    """Bytes until the end or the break."""
    count = 0
    try:
        while data := await raw.receive_some(1 << 16):
            count += len(data)
    except trio.BrokenResourceError:
        pass
    return count


async def write_on(raw: RawLink, pause_s: float = 0.0) -> None:
    """Never stop."""
    while True:
        await raw.send_all(bytes(50_000))
        await trio.sleep(pause_s)


async def requested(host: Host, relay: Host, message: bytes) -> HopMessage:
    stream = await host.open_stream(relay.id, HOP)
    await send_message(stream, message)
    answer = HopMessage.decode(await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES))
    await stream.aclose()
    return answer


async def test_a_reservation_comes_with_addresses_limits_and_a_voucher(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r")
        b = await hosts.start("b")
        await b.connect(relay.id, relay.listen_addrs())
        answer = await requested(b, relay, HopMessage(kind=HopKind.RESERVE).encode())
        assert answer.status == Status.OK
        assert answer.promise is not None
        assert [*answer.promise.relay_addrs] == [addr.to_bytes() for addr in relay.addrs()]
        voucher = Voucher.open(answer.promise.voucher, verify)
        assert voucher == Voucher(relay.id, b.id, answer.promise.expires_unix_s)
        assert answer.limit is not None
        assert answer.limit.data_bytes == service.config.circuit_bytes


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"\xff" * 20, Status.MALFORMED_MESSAGE),
        (HopMessage(kind=HopKind.STATUS).encode(), Status.UNEXPECTED_MESSAGE),
        (HopMessage(kind=HopKind.CONNECT).encode(), Status.UNEXPECTED_MESSAGE),
        (HopMessage(kind=HopKind.CONNECT, peer=keypair("x").peer_id).encode(), Status.NO_RESERVATION),
        (HopMessage(kind=HopKind.CONNECT, peer=keypair("a").peer_id).encode(), Status.PERMISSION_DENIED),
    ],
    ids=["junk", "an answer", "to nobody", "to a stranger", "to itself"],
)
async def test_what_cannot_be_is_refused_with_its_status(
    message: bytes, status: Status, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r")
        a = await hosts.start("a")
        await a.connect(relay.id, relay.listen_addrs())
        assert (await requested(a, relay, message)).status == status
        assert service.traffic().circuits == 0


async def test_who_asks_nothing_is_dropped_after_a_while(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, _ = await start_relay(hosts, "r")
        a = await hosts.start("a")
        await a.connect(relay.id, relay.listen_addrs())
        stream = await a.open_stream(relay.id, HOP)
        with pytest.raises(Unreachable):
            await stream.receive_some(1)
        assert trio.current_time() < limits.CIRCUIT_REQUEST_S + 2


async def test_a_destination_that_does_not_answer_costs_a_bounded_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r")
        b = await behind(hosts, "b", relay)

        async def silent(stream: object) -> None:
            await trio.sleep_forever()

        b.host.handle(STOP, silent)
        a = await start_client(hosts, "a")
        with pytest.raises(Unreachable, match="connection failed"):
            await circuit_to(a, b, relay)
        assert trio.current_time() < limits.CIRCUIT_REQUEST_S + 2
        assert service.traffic().circuits == 0


async def test_the_end_of_one_direction_is_carried_over(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(monkeypatch, latency_s=0.02) as (service, circuit):
        near, far = await circuit()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                await near.send_all(bytes(1 << 20))
                await near.aclose()

            nursery.start_soon(write)
            assert await read_all(far) == 1 << 20
        await far.aclose()
        await trio.sleep(1)
        assert service.traffic().circuits == 0


async def test_a_circuit_ends_when_its_bytes_are_used_up(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(monkeypatch, RelayConfig(circuit_bytes=300_000)) as (service, circuit):
        near, far = await circuit()
        with pytest.raises(trio.BrokenResourceError):
            await write_on(near, pause_s=0.1)
        assert await read_all(far) <= 300_000
        assert service.traffic().carried_bytes == 300_000


async def test_a_circuit_ends_when_its_time_is_over_or_nothing_moves(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(monkeypatch, RelayConfig(circuit_s=500, circuit_idle_s=100)) as (service, circuit):
        near, far = await circuit()
        for _ in range(10):
            await near.send_all(b"alive")
            assert await far.receive_some(10) == b"alive"
            await trio.sleep(49)
        assert service.traffic().circuits == 1
        await trio.sleep(20)
        assert service.traffic().circuits == 0
        await circuit()
        await trio.sleep(90)
        assert service.traffic().circuits == 1
        await trio.sleep(50)
        assert service.traffic().circuits == 0


async def test_a_slow_reader_slows_its_writer_and_holds_little(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(monkeypatch, RelayConfig(circuit_stall_s=1000)) as (service, circuit):
        near, far = await circuit()
        written = 0

        async def write() -> None:
            nonlocal written
            while True:
                await near.send_all(bytes(50_000))
                written += 50_000

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.sleep(20)
            # Two windows and what the three programs have in hand.
            assert written <= 4 * limits.WINDOW_BYTES_INITIAL
            got = 0
            while got < 4_000_000:
                got += len(await far.receive_some(1 << 16))
            nursery.cancel_scope.cancel()
        assert service.traffic().circuits <= 1


async def test_a_reader_that_never_reads_loses_its_circuit(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(monkeypatch, RelayConfig(circuit_stall_s=20, circuit_idle_s=1000)) as (service, circuit):
        near, _ = await circuit()
        with pytest.raises(trio.BrokenResourceError):
            await write_on(near)
        assert trio.current_time() < 25
        await trio.sleep(1)
        assert service.traffic().circuits == 0


async def test_one_circuit_keeps_to_its_rate(autojump_clock: trio.testing.MockClock) -> None:
    async with relayed(RelayConfig(circuit_bytes_per_s=500_000)) as (_, relay, _, a, b):
        b.host.handle("/echo/1", echo)
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        begin = trio.current_time()
        await ask(a.host, b.host, bytes(5_000_000))
        assert 9.5 < trio.current_time() - begin < 11.5


async def test_a_relay_that_stops_takes_its_circuits_along(autojump_clock: trio.testing.MockClock) -> None:
    async with relayed() as (hosts, relay, _, a, b):
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        await hosts.stop("r")
        await trio.sleep(1)
        assert (a.host.connected(), b.host.connected(), b.circuits.reservations) == ([], [], {})


async def test_the_reservation_bound_is_told_to_who_asks(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r", RelayConfig(reservations=2))
        for name in ("b", "c"):
            await behind(hosts, name, relay)
        with pytest.raises(Refused, match="reservation refused"):
            await behind(hosts, "d", relay)
        assert service.traffic().reservations == 2
        assert service.traffic().refused == 1
        await hosts.stop("b")
        await trio.sleep(1)
        await behind(hosts, "e", relay)


async def test_circuits_that_stall_full_of_bytes_go_and_the_others_stay(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r", RelayConfig(held_bytes=1_500_000, circuit_stall_s=1000))
        b = await behind(hosts, "b", relay)
        stalls, works = await start_client(hosts, "x"), await start_client(hosts, "a")
        circuits = taking(b, monkeypatch)
        good = await circuit_to(works, b, relay)
        far = await circuits.receive()
        async with trio.open_nursery() as nursery:
            broken = 0

            async def stall(raw: RawLink) -> None:
                nonlocal broken
                with pytest.raises(trio.BrokenResourceError):
                    await write_on(raw)
                broken += 1

            for _ in range(4):
                nursery.start_soon(stall, await circuit_to(stalls, b, relay))
            for _ in range(30):
                await good.send_all(bytes(100_000))
                got = 0
                while got < 100_000:
                    got += len(await far.receive_some(100_000))
                await trio.sleep(0.3)
            held = sum(circuit.held_bytes for circuit in service._circuits.values())
            assert 0 < broken < 4
            assert held <= 1_500_000
            await service_end(service)
        assert broken == 4


async def service_end(service: Relay) -> None:
    """End all of its circuits."""
    for circuit in list(service._circuits.values()):
        service._end(circuit, "the test is over")
    await trio.sleep(1)
