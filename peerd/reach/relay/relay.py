"""Circuit relay v2: this peer relays for peers that nobody can dial, as `reach/relay/relay_limits` decides.

    relay = Relay(host, clock, keypair)
    await nursery.start(relay.run)    # serves until cancelled; then all circuits end
    relay.traffic()                   # reservations, circuits and bytes, for `peerd status`

A circuit is two streams, and a task for each direction that reads a piece, waits for its turn, forwards it, and then
reads the next one. So a slow reader slows only its own writer. The end of one direction is forwarded, too. The windows
of its two streams bound the bytes that wait in a circuit; if the total is too large, the fullest circuits are ended. A
peer with a reservation keeps its link. A hostile peer may send endless requests (refused with a reason), open circuits
and send nothing (a deadline), never read (a deadline for each piece), send at full speed (equal shares by address), or
build chains of relays (refused). Source: libp2p specs `relay/circuit-v2.md`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import trio

from peerd.core import limits
from peerd.core.addr import ip_of, is_relayed, place_of, reach
from peerd.core.clock import Clock
from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.reach.messages.circuit_message import (
    HOP,
    STOP,
    HopKind,
    HopMessage,
    Limit,
    ReservationMessage,
    Status,
    StopKind,
    StopMessage,
    status_words,
)
from peerd.reach.messages.voucher import Voucher
from peerd.reach.relay.relay_limits import Refusal, RelayConfig, RelayServer, overfull
from peerd.wire.host.host import Host
from peerd.wire.host.link_table import PeerDown
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.link.link_stream import Stream
from peerd.wire.path_selection import PathKind
from peerd.wire.tcp.rate_limit import LinePace, LineTurn

_log = logging.getLogger("peerd.relay")
_PIECE_BYTES = 64 * 1024  # about a frame: what one direction forwards in its turn
_LOOK_S = 30.0  # between two checks for expired reservations and idle circuits
_ROUND_TRIP_S = 0.1  # round trip in which one circuit alone can use the relay's whole rate
_WEIGH_S = 1.0  # between two checks of the bytes that wait in circuits
_ADDRS_BYTES = 3072  # of our addresses in one answer, so that it stays within a message


@dataclass(frozen=True, slots=True)
class RelayTraffic:
    """Current load of this relay, and traffic since its start."""

    reservations: int
    circuits: int
    carried_bytes: int
    refused: int


@dataclass(eq=False, slots=True)
class _Circuit:
    source: Stream
    destination: Stream
    moved_at: float
    place: str  # IPv4 address or IPv6 /64 of the source, to which all bytes count
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    carried_bytes: int = 0
    over: str | None = None  # why this relay ended it

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and have not been sent on."""
        return sum(stream.mux.inbox_bytes + stream.mux.out_bytes for stream in (self.source, self.destination))


class Relay:
    """The relay service of one host."""

    def __init__(self, host: Host, clock: Clock, keypair: Keypair, config: RelayConfig | None = None) -> None:
        self.config = config or RelayConfig()
        self._host, self._clock, self._keypair = host, clock, keypair
        self._board = RelayServer(self.config)
        self._pace = _pace(self.config.bytes_per_s)
        # Larger windows would not help if our rate is limited: the bytes would wait here, or fill the line and lengthen
        # its round trip.
        under_way = min(self.config.bytes_per_s * _ROUND_TRIP_S, limits.WINDOW_BYTES_MAX)
        self._window_bytes = max(limits.WINDOW_BYTES_INITIAL, int(under_way))
        self._circuits: dict[int, _Circuit] = {}
        self._kept: dict[PeerId, None] = {}  # peers whose links are protected
        self._past_bytes = self._refused = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self._host.handle(HOP, self._serve)
        try:
            with self._host.watch() as events:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep_small)
                    task_status.started()
                    while True:
                        with trio.move_on_after(_LOOK_S):
                            event = await events.receive()
                            if isinstance(event, PeerDown):
                                self._board.left(event.peer)
                        self._look(self._clock.now())
        finally:
            self._host.unhandle(HOP)
            for circuit in self._circuits.values():
                self._end(circuit, "this relay stops")
            for peer in self._kept:
                self._host.links.let_go(peer)
            self._kept.clear()

    def traffic(self) -> RelayTraffic:
        carried = self._past_bytes + sum(circuit.carried_bytes for circuit in self._circuits.values())
        return RelayTraffic(len(self._board.holders()), len(self._circuits), carried, self._refused)

    def _look(self, now: float) -> None:
        """Expire reservations, protect the links of peers that have one, and end idle circuits."""
        self._board.wake(now)
        holders = dict.fromkeys(self._board.holders())
        for peer in [peer for peer in self._kept if peer not in holders]:
            del self._kept[peer]
            self._host.links.let_go(peer)
        for circuit in self._circuits.values():
            if now - circuit.moved_at > self.config.circuit_idle_s:
                self._end(circuit, f"no data passed for {self.config.circuit_idle_s:g} s")

    async def _keep_small(self) -> None:
        """End circuits in which too many bytes wait."""
        while True:
            await trio.sleep(_WEIGH_S)
            circuits = list(self._circuits.values())
            for number in overfull([(c.place, c.held_bytes) for c in circuits], self.config.held_bytes):
                _log.info("a circuit from %s has too many unread bytes", circuits[number].source.peer)
                self._end(circuits[number], "too many unread bytes")

    # --- requests ------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        with trio.move_on_after(limits.CIRCUIT_REQUEST_S) as scope:
            try:
                message = HopMessage.decode(await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES))
            except ProtocolViolation as error:
                _log.warning("peer %s sent the relay an invalid request: %s", stream.peer, error)
                await _answer(stream, Status.MALFORMED_MESSAGE)
                return
        if scope.cancelled_caught:
            raise ProtocolViolation("opened a stream to the relay and sent no request", stream.peer)
        if message.kind == HopKind.RESERVE:
            await self._reserve(stream)
        elif message.kind == HopKind.CONNECT and message.peer is not None:
            await self._connect(stream, message.peer)
        else:
            await _answer(stream, Status.UNEXPECTED_MESSAGE)

    async def _reserve(self, stream: Stream) -> None:
        peer = stream.peer
        decision = (
            Refusal(Status.PERMISSION_DENIED, "it came over another relay")
            if stream.link.way == PathKind.RELAYED
            else self._board.reserve(self._clock.now(), peer, ip_of(stream.link.remote), spare=self._is_dialable(peer))
        )
        if isinstance(decision, Refusal):
            await self._refuse(stream, "a reservation", decision)
            return
        if peer not in self._kept:
            self._kept[peer] = None
            self._host.links.keep(peer)
        expires_unix_s = int(self._clock.wall() + self.config.reservation_s)
        voucher = Voucher(self._host.id, peer, expires_unix_s).seal(self._keypair)
        promise = ReservationMessage(expires_unix_s, self._addrs(stream), voucher)
        _log.debug("%s the reservation of %s", "renewed" if decision.renewed else "granted", peer)
        answer = HopMessage(kind=HopKind.STATUS, status=Status.OK, promise=promise, limit=self._limit())
        await send_message(stream, answer.encode())

    def _is_dialable(self, peer: PeerId) -> bool:
        """True if the peer reports a public address of its own."""
        info = self._host.info(peer)
        return info is not None and any(reach(addr) == 2 and not is_relayed(addr) for addr in info.addrs)

    def _addrs(self, stream: Stream) -> tuple[bytes, ...]:
        """Our addresses without a relay that are of use to the requester."""
        local = reach(stream.link.remote) == 0
        direct = [addr for addr in self._host.addrs() if not is_relayed(addr) and (local or reach(addr) > 0)]
        found: list[bytes] = []
        for raw in (addr.to_bytes() for addr in direct[: limits.ADDRS_PER_PEER]):
            if sum(map(len, found)) + len(raw) <= _ADDRS_BYTES:
                found.append(raw)
        return tuple(found)

    def _limit(self) -> Limit:
        return Limit(int(self.config.circuit_s), self.config.circuit_bytes)

    async def _refuse(self, stream: Stream, what: str, refusal: Refusal) -> None:
        self._refused += 1
        _log.debug("%s is refused %s: %s", stream.peer, what, refusal.why)
        await _answer(stream, refusal.status)

    async def _connect(self, stream: Stream, destination: PeerId) -> None:
        source = stream.peer
        decision = (
            Refusal(Status.PERMISSION_DENIED, "it came over another relay")
            if stream.link.way == PathKind.RELAYED
            else self._board.connect(self._clock.now(), source, ip_of(stream.link.remote), destination)
        )
        if isinstance(decision, Refusal):
            await self._refuse(stream, f"a circuit to {destination.short}", decision)
            return
        try:
            far = await self._open_far(source, destination)
            if isinstance(far, Refusal):
                await self._refuse(stream, f"a circuit to {destination.short}", far)
                return
            ended = False
            try:
                answer = HopMessage(kind=HopKind.STATUS, status=Status.OK, limit=self._limit())
                await send_message(stream, answer.encode())
                ended = await self._bridge(decision.number, stream, far)
            finally:
                if ended:
                    await far.aclose()  # queued bytes are still sent; the host closes the near stream in the same way
                else:
                    far.reset()
                    stream.reset()
        finally:
            self._board.ended(decision.number)

    async def _open_far(self, source: PeerId, destination: PeerId) -> Stream | Refusal:
        """Open the circuit's second stream. Returns it once the destination accepts, else the reason for a refusal."""
        link = self._host.links.direct(destination)
        if link is None:
            self._board.left(destination)
            return Refusal(Status.NO_RESERVATION, f"{destination.short} is not connected")
        far = None
        try:
            with trio.fail_after(limits.CIRCUIT_REQUEST_S):
                far = await link.open(STOP)
                ask = StopMessage(kind=StopKind.CONNECT, peer=source, limit=self._limit())
                await send_message(far, ask.encode())
                answer = StopMessage.decode(await receive_message(far, limits.CIRCUIT_MESSAGE_BYTES))
            if (answer.kind, answer.status) == (StopKind.STATUS, Status.OK):
                good, far = far, None
                return good
            return Refusal(Status.CONNECTION_FAILED, f"{destination.short} says: {status_words(answer.status)}")
        except trio.TooSlowError:
            return Refusal(Status.CONNECTION_FAILED, f"{destination.short} does not answer")
        except RemoteError as error:
            return Refusal(Status.CONNECTION_FAILED, f"{destination.short}: {error.args[0]}")
        finally:
            if far is not None:
                far.reset()

    # --- circuits ------------------------------------------------------------------------------------------

    async def _bridge(self, number: int, near: Stream, far: Stream) -> bool:
        """Forward bytes in both directions. True if both ended by themselves, False if the circuit was ended."""
        circuit = _Circuit(near, far, self._clock.now(), place_of(ip_of(near.link.remote))[0])
        self._circuits[number] = circuit
        for stream in (near, far):
            stream.mux.window_bytes_max = self._window_bytes
        circuit.scope.deadline = trio.current_time() + self.config.circuit_s
        try:
            with circuit.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, circuit, near, far)
                    nursery.start_soon(self._carry, circuit, far, near)
            if circuit.scope.cancelled_caught:
                circuit.over = circuit.over or "its time limit was reached"
        finally:
            del self._circuits[number]
            self._past_bytes += circuit.carried_bytes
        if circuit.over is not None:
            _log.debug("the circuit from %s to %s ended: %s", near.peer, far.peer, circuit.over)
        return circuit.over is None

    async def _carry(self, circuit: _Circuit, source: Stream, sink: Stream) -> None:
        """Forward one direction until its end."""
        left, shared = self.config.circuit_bytes, (_pace(self.config.circuit_bytes_per_s), self._pace)
        turns = [(pace, _turn(pace, circuit.place)) for pace in shared if pace is not None]
        try:
            while view := await source.receive_view(_PIECE_BYTES):
                for pace, turn in turns:
                    await pace.take_all(turn, len(view))
                size = min(len(view), left)
                with trio.move_on_after(self.config.circuit_stall_s) as stall:
                    await sink.send(view[:size])
                if stall.cancelled_caught:
                    self._end(circuit, f"{sink.peer.short} read nothing for {self.config.circuit_stall_s:g} s")
                    return
                circuit.moved_at = self._clock.now()
                circuit.carried_bytes += size
                left -= size
                if not left:
                    self._end(circuit, "its byte limit was reached")
                    return
            await sink.close_write()
        except Unreachable as error:
            self._end(circuit, error.args[0])

    def _end(self, circuit: _Circuit, why: str) -> None:
        circuit.over = circuit.over or why
        circuit.scope.cancel()


def _turn(pace: LinePace, place: str) -> LineTurn:
    """A circuit's flow, whose account is that of its place. No circuit has priority, so none leaves bytes to others."""
    turn = LineTurn()
    turn.account = pace.at(place)
    return turn


def _pace(bytes_per_s: float) -> LinePace | None:
    return None if math.isinf(bytes_per_s) else LinePace(bytes_per_s)


async def _answer(stream: Stream, status: Status) -> None:
    await send_message(stream, HopMessage(kind=HopKind.STATUS, status=status).encode())
