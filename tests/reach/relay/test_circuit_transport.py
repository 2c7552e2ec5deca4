"""Circuits between real hosts over a real relay, on a simulated network: a transport like the others, and its rules."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import circuit_addr, parse_addr, with_peer
from peerd.core.errors import ConfigError, ProtocolViolation, Refused, Unreachable
from peerd.core.ids import PeerId
from peerd.reach.messages.circuit_message import (
    HOP,
    STOP,
    HopKind,
    HopMessage,
    ReservationMessage,
    Status,
    StopKind,
    StopMessage,
)
from peerd.reach.messages.voucher import Voucher
from peerd.reach.relay.circuit_link import CircuitLink
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay_limits import RelayConfig
from peerd.wire.host.host import Host, HostConfig
from peerd.wire.host.link_table import LinkLimits, PeerDown
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.link.link_stream import Stream
from peerd.wire.path_selection import PathKind
from peerd.wire.transport import LendingLink, RawLink
from tests.wire.compliance import Ends, TransportCompliance
from tests.worlds.network.circuits import Client, behind, relayed, start_client, start_relay
from tests.worlds.network.hosts import Hosts, ask, echo, keypair, running_hosts
from tests.worlds.simulation.clock import EPOCH_S


class _Dialer:
    """The transport of one side, for circuits to one peer: what the host adds to an address, this adds."""

    def __init__(self, circuits: Circuits, peer: PeerId) -> None:
        self._circuits, self._peer = circuits, peer
        self.can_dial = circuits.can_dial
        self.listen = circuits.listen

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        return await self._circuits.dial(with_peer(addr, self._peer), fresh=fresh)


class _Listener:
    """Circuits that come in, before anyone authenticates them."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addrs = [addr for held in client.circuits.reservations.values() for addr in held.addrs]
        self._host = client.host
        self._give, self._take = trio.open_memory_channel[RawLink](10)

        async def welcome(raw: RawLink, peer: PeerId) -> None:
            await self._give.send(raw)

        monkeypatch.setattr(client.circuits, "welcome", welcome)

    async def accept(self) -> RawLink:
        return await self._take.receive()

    async def aclose(self) -> None:
        self._host.unhandle(STOP)
        self._take.close()


class TestCircuits(TransportCompliance):
    @pytest.fixture(autouse=True)
    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    @asynccontextmanager
    async def ends(self) -> AsyncIterator[Ends]:
        async with relayed() as (_, _, _, a, b):
            listener = _Listener(b, self._monkeypatch)
            dialer = _Dialer(a.circuits, b.host.id)
            near = await dialer.dial(listener.addrs[0])
            far = await listener.accept()
            yield Ends(dialer, b.circuits, listener, near, far)
            for end in (near, far, listener):
                await end.aclose()

    async def settle(self) -> None:
        await trio.sleep(3.0)  # links ping for ever: nothing moves any more, yet they do


async def test_a_circuit_lends_what_it_received_and_sends_without_waiting(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relayed() as (_, _, _, a, b):
        listener = _Listener(b, monkeypatch)
        near = await _Dialer(a.circuits, b.host.id).dial(listener.addrs[0])
        far = await listener.accept()
        assert isinstance(near, LendingLink)
        assert isinstance(far, LendingLink)
        assert near.send_nowait(memoryview(b"small")) == 5
        assert bytes(await far.receive_view()) == b"small"
        await near.aclose()
        assert near.send_nowait(memoryview(b"late")) == 0
        assert bytes(await far.receive_view()) == b""


async def test_a_peer_behind_a_relay_is_reached_and_both_know_the_way(autojump_clock: trio.testing.MockClock) -> None:
    async with relayed(latency_s=0.01) as (_, relay, service, a, b):
        b.host.handle("/echo/1", echo)
        (addr,) = b.circuits.reservations[relay.id].addrs
        await a.host.connect(b.host.id, [addr])
        data = bytes(range(256)) * 4000
        assert await ask(a.host, b.host, data) == data
        (near,) = [link for link in a.host.links if link.peer == b.host.id]
        (far,) = [link for link in b.host.links if link.peer == a.host.id]
        assert (near.way, far.way) == (PathKind.RELAYED, PathKind.RELAYED)
        assert (near.remote, far.remote) == (addr, addr)
        assert service.traffic().circuits == 1
        assert service.traffic().carried_bytes > 2 * len(data)


async def test_an_idle_circuit_stays_and_its_end_frees_its_place(autojump_clock: trio.testing.MockClock) -> None:
    async with relayed() as (hosts, relay, service, a, b):
        b.host.handle("/echo/1", echo)
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        await trio.sleep(600)
        assert await ask(a.host, b.host, b"still here") == b"still here"
        await hosts.stop("a")
        await trio.sleep(1)
        assert service.traffic().circuits == 0
        assert a.host.id not in b.host.connected()


async def test_the_link_that_carries_a_reservation_is_not_closed_to_make_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_hosts() as hosts:
        relay, _ = await start_relay(hosts, "r")
        few = HostConfig(links=LinkLimits(total=2, inbound=2))
        b = await start_client(hosts, "b", few)
        await b.host.connect(relay.id, relay.listen_addrs())
        await b.circuits.reserve(relay.id)
        for name in ("c", "d", "e"):
            other = await hosts.start(name)
            await trio.sleep(30)
            await b.host.connect(other.id, other.listen_addrs())
        assert relay.id in b.host.connected()
        b.circuits.forget(relay.id)
        await trio.sleep(30)
        last = await hosts.start("f")
        await b.host.connect(last.id, last.listen_addrs())
        await trio.sleep(1)
        assert relay.id not in b.host.connected()


async def test_reservations_end_with_the_link_on_both_sides(autojump_clock: trio.testing.MockClock) -> None:
    async with relayed() as (_, relay, service, a, b):
        addrs = b.circuits.reservations[relay.id].addrs
        for link in list(b.host.links):
            link.abort("cut")
        await trio.sleep(1)
        assert b.circuits.reservations == {}
        assert service.traffic().reservations == 0
        with pytest.raises(Unreachable, match="no reservation"):
            await a.host.connect(b.host.id, addrs)


async def test_a_reservation_lapses_when_it_is_not_renewed(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r", RelayConfig(reservation_s=300))
        b = await behind(hosts, "b", relay)
        await trio.sleep(200)
        held = await b.circuits.reserve(relay.id)
        assert held.expires_at == pytest.approx(trio.current_time() + 300, abs=1)
        await trio.sleep(200)
        assert (list(b.circuits.reservations), service.traffic().reservations) == ([relay.id], 1)
        await trio.sleep(140)
        assert (list(b.circuits.reservations), service.traffic().reservations) == ([], 0)


async def test_a_relay_is_never_reached_over_a_relay(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        first, _ = await start_relay(hosts, "r1")
        second, _ = await start_relay(hosts, "r2")
        a = await start_client(hosts, "a")
        # Each relay is only known behind the other one: that must fail at once, not go round.
        for one, other in ((first, second), (second, first)):
            a.host.learn(one.id, [circuit_addr(None, other.id)])
        begin = trio.current_time()
        with pytest.raises(Unreachable, match="cannot be reached over a relay"):
            await a.host.connect(keypair("b").peer_id, [circuit_addr(None, first.id)])
        assert trio.current_time() - begin < 1


async def test_a_relay_reached_over_a_relay_gives_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with relayed() as (_, relay, _, a, b):
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        with pytest.raises(Unreachable, match="only reachable over a relay"):
            await a.circuits.reserve(b.host.id)
        with pytest.raises(Unreachable, match="only reachable over a relay"):
            await a.host.connect(keypair("c").peer_id, [circuit_addr(None, b.host.id)])


async def answering(hosts: Hosts, answer: HopMessage | None) -> tuple[Host, Client]:
    """A relay that gives this answer, or none, to whatever it is asked, and a client of it."""
    relay = await hosts.start("r")

    async def hop(stream: Stream) -> None:
        await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES)
        if answer is None:
            await trio.sleep_forever()
        else:
            await send_message(stream, answer.encode())

    relay.handle(HOP, hop)
    a = await start_client(hosts, "a")
    await a.host.connect(relay.id, relay.listen_addrs())
    return relay, a


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (HopMessage(kind=HopKind.STATUS, status=Status.RESERVATION_REFUSED), Refused, "reservation refused"),
        (HopMessage(kind=HopKind.STATUS, status=777), Refused, "status 777"),
        (HopMessage(kind=HopKind.RESERVE), ProtocolViolation, "answered with RESERVE"),
        (
            HopMessage(
                kind=HopKind.STATUS,
                status=Status.OK,
                promise=ReservationMessage(
                    int(EPOCH_S) + 100,
                    voucher=Voucher(keypair("r").peer_id, keypair("x").peer_id, 1).seal(keypair("r")),
                ),
            ),
            ProtocolViolation,
            "another peer",
        ),
        (
            HopMessage(kind=HopKind.STATUS, status=Status.OK, promise=ReservationMessage(0, voucher=b"\x08\x01")),
            ProtocolViolation,
            "public key is a number",
        ),
    ],
    ids=["no", "unknown status", "no answer at all", "another's voucher", "no voucher"],
)
async def test_what_a_relay_may_answer_wrongly(
    answer: HopMessage, error: type[Exception], words: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_hosts() as hosts:
        relay, a = await answering(hosts, answer)
        with pytest.raises(error, match=words):
            await a.circuits.reserve(relay.id)
        assert a.circuits.reservations == {}


async def test_the_way_that_led_to_the_relay_is_announced_whatever_it_says_of_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_hosts() as hosts:
        other = keypair("x").peer_id
        claims = ["/ip4/198.51.100.9/tcp/1", "/ip4/0.0.0.0/tcp/1", f"/ip4/198.51.100.9/tcp/2/p2p/{other}"]
        nested = with_peer(circuit_addr(None, other), keypair("r").peer_id)
        addrs = (*(parse_addr(claim).to_bytes() for claim in claims), nested.to_bytes(), b"nonsense")
        promise = ReservationMessage(int(EPOCH_S) + 1000, addrs)
        relay, a = await answering(hosts, HopMessage(kind=HopKind.STATUS, status=Status.OK, promise=promise))
        held = await a.circuits.reserve(relay.id)
        ways = [*relay.listen_addrs(), parse_addr(claims[0])]  # what led us there comes first, whatever it claims
        assert held.addrs == tuple(circuit_addr(way, relay.id) for way in ways)
        assert (held.limit, held.expires_at) == (None, pytest.approx(1000, abs=2))


async def test_a_silent_relay_costs_a_bounded_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, a = await answering(hosts, None)
        with pytest.raises(Unreachable, match="did not answer"):
            await a.circuits.reserve(relay.id)
        assert trio.current_time() < limits.CIRCUIT_ANSWER_S + 1


async def stop_status(hosts: Hosts, b: Client, relay: str, message: StopMessage) -> int | None:
    """The status that `b` answers to this message from a relay."""
    from_relay = await hosts.start(relay)
    await from_relay.connect(b.host.id, b.host.listen_addrs())
    stream = await from_relay.open_stream(b.host.id, STOP)
    await send_message(stream, message.encode())
    return StopMessage.decode(await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES)).status


async def test_circuits_come_in_only_over_a_relay_that_was_asked(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        b = await start_client(hosts, "b")
        someone = StopMessage(kind=StopKind.CONNECT, peer=keypair("x").peer_id)
        assert await stop_status(hosts, b, "r", someone) == Status.PERMISSION_DENIED
        nobody = StopMessage(kind=StopKind.CONNECT)
        assert await stop_status(hosts, b, "s", nobody) == Status.MALFORMED_MESSAGE
        odd = StopMessage(kind=StopKind.STATUS)
        assert await stop_status(hosts, b, "t", odd) == Status.UNEXPECTED_MESSAGE


async def test_a_relay_that_brings_another_than_it_says_brings_nobody(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, _ = await start_relay(hosts, "r")
        b = await behind(hosts, "b", relay)
        liar = await relay.open_stream(b.host.id, STOP)
        await send_message(liar, StopMessage(kind=StopKind.CONNECT, peer=keypair("x").peer_id).encode())
        assert StopMessage.decode(await receive_message(liar, limits.CIRCUIT_MESSAGE_BYTES)).status == Status.OK
        await relay.join(CircuitLink(liar, circuit_addr(None, relay.id), None), PathKind.RELAYED, initiator=True)
        await trio.sleep(1)
        assert [link.way for link in b.host.links if link.peer == relay.id] != [PathKind.RELAYED]
        assert len(b.host.links) == len(relay.links) == 1


async def test_half_open_circuits_are_bounded_and_end_by_themselves(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        relay, _ = await start_relay(hosts, "r")
        b = await behind(hosts, "b", relay)
        statuses = []
        for number in range(limits.CIRCUITS_HALF_OPEN):
            stream = await relay.open_stream(b.host.id, STOP)
            peer = keypair(f"x{number}").peer_id
            await send_message(stream, StopMessage(kind=StopKind.CONNECT, peer=peer).encode())
            statuses.append(StopMessage.decode(await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES)).status)
        half = limits.CIRCUITS_HALF_OPEN // 2
        assert statuses == [Status.OK] * half + [Status.RESOURCE_LIMIT_EXCEEDED] * half
        await trio.sleep(15)
        a = await start_client(hosts, "a")
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        assert b.host.id in a.host.connected()


async def test_nobody_listens_on_a_circuit_address(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        a = await start_client(hosts, "a")
        addr = circuit_addr(None, keypair("r").peer_id)
        with pytest.raises(ConfigError, match="reservation"):
            await a.circuits.listen(addr)
        with pytest.raises(Unreachable, match="no destination peer"):
            await a.host.connect_addr(addr)


@pytest.mark.parametrize("leaver", ["a", "b"])
async def test_who_leaves_says_goodbye_over_the_circuit(leaver: str, autojump_clock: trio.testing.MockClock) -> None:
    async with relayed(latency_s=0.01) as (hosts, relay, _, a, b):
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        await trio.sleep(1)
        gone, stays = (a.host, b.host) if leaver == "a" else (b.host, a.host)
        with stays.watch() as events:
            begin = trio.current_time()
            await hosts.stop(leaver)
            assert events.receive_nowait() == PeerDown(gone.id, "the peer left")
            assert trio.current_time() - begin < gone.config.shutdown_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "pause_s"),
    [(RelayConfig(circuit_s=100), 1.0), (RelayConfig(circuit_bytes=2_000_000), 0.5)],
    ids=["time", "bytes"],
)
async def test_a_circuit_is_followed_by_a_fresh_one_before_it_is_used_up(
    config: RelayConfig, pause_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    async with relayed(config, latency_s=0.01) as (_, relay, service, a, b):
        b.host.handle("/echo/1", echo)
        await a.host.connect(b.host.id, b.circuits.reservations[relay.id].addrs)
        with a.host.watch() as events:
            for _ in range(300):
                assert await ask(a.host, b.host, bytes(50_000)) == bytes(50_000)
                await trio.sleep(pause_s)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()  # it was never gone
        assert service.traffic().carried_bytes > 2 * 300 * 50_000
        assert service.traffic().circuits <= 2
