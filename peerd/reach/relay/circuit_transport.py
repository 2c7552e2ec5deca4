"""Circuits: connections over a relay, at both of their ends. The relay itself is `reach.relay.relay`.

    circuits = Circuits(host, clock)
    host.add_transport(circuits)              # from now on the host dials /…/p2p/<relay>/p2p-circuit addresses
    nursery.start(circuits.run)               # accepts incoming circuits, detects the loss of relays
    held = await circuits.reserve(relay)      # Reservation: `addrs` to announce, `expires_at` by the clock's now()
    circuits.reservations                     # the valid ones, by relay; dropped when the link to the relay ends

A circuit is a stream on the link to the relay, used as a raw link: the host authenticates the far peer through it and
encrypts end to end, so a relay sees only ciphertext and can at most delay or cut it. Invariants: a relay is reached
directly, never over another relay; circuits are accepted only from relays where this peer has a reservation; the link
to such a relay is kept even if idle; incoming handshakes are bounded, in total and per relay.

A hostile relay may break its promises, claim addresses of others, claim a wrong source peer, or flood us with circuits;
a hostile peer may not finish its handshake. Source: libp2p specs `relay/circuit-v2.md`.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import (
    circuit_addr,
    circuit_place,
    decode_addr,
    is_dialable,
    is_relayed,
    reach,
    split_peer,
    with_peer,
)
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, ProtocolViolation, Refused, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import verify
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
from peerd.reach.relay.circuit_link import CircuitLink
from peerd.reach.relay.renewal import Renewal
from peerd.wire.host.host import Host
from peerd.wire.host.link_table import PeerDown
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.link.link import Link
from peerd.wire.link.link_stream import Stream, StreamOwner
from peerd.wire.path_selection import PathKind
from peerd.wire.transport import Listener, RawLink

_log = logging.getLogger("peerd.reach")
_SHORTEST_S = 60.0  # minimum of a reservation: an earlier expiry means that the relay's clock or ours is wrong
_LOOK_S = 30.0  # interval of checks for expired reservations


@dataclass(frozen=True, slots=True)
class Reservation:
    """A relay's promise to accept circuits to this peer."""

    relay: PeerId
    addrs: tuple[Multiaddr, ...]  # this peer's addresses through the relay, without its /p2p
    expires_at: float  # by the clock's now(); to renew, call `reserve` well before
    limit: Limit | None  # of each circuit, or None if the relay stated none


class Circuits:
    """The transport of circuit addresses, and this peer's reservations."""

    def __init__(self, host: Host, clock: Clock) -> None:
        self.reservations: dict[PeerId, Reservation] = {}
        self._host, self._clock = host, clock
        self._reaching: Counter[PeerId] = Counter()  # relays that are being dialed for a circuit
        self._half_open: Counter[PeerId] = Counter()  # incoming handshakes, by relay
        self._renewal = Renewal(self._renew)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept incoming circuits, and drop reservations that have expired or whose relay is disconnected."""
        self._host.handle(STOP, self._serve_stop)
        try:
            with self._host.watch() as events:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._renewal.run)
                    task_status.started()
                    while True:
                        with trio.move_on_after(_LOOK_S):
                            event = await events.receive()
                            if isinstance(event, PeerDown):
                                self.forget(event.peer)
                        for relay in [relay for relay, held in self.reservations.items() if self._is_over(held)]:
                            self.forget(relay)
        finally:
            self._host.unhandle(STOP)
            for relay in list(self.reservations):
                self.forget(relay)

    # --- reservations --------------------------------------------------------------------------------------

    async def reserve(self, relay: PeerId) -> Reservation:
        """Make or renew a reservation at `relay`, over a direct connection, which is dialed if there is none.

        Raises Refused with the relay's reason, Unreachable, or ProtocolViolation for an invalid answer.
        """
        link = await self._relay_link(relay, None)
        answer = await self._ask(link, HopMessage(kind=HopKind.RESERVE))
        if answer.status != Status.OK or answer.promise is None:
            raise Refused(f"the relay refused a reservation: {status_words(answer.status)}", relay)
        held = self._believe(link, answer.promise, answer.limit)
        if not link.usable:
            raise Unreachable(f"the connection to the relay ended: {link.reason}", relay)
        if relay not in self.reservations:
            self._host.links.keep(relay)
        self.reservations[relay] = held
        return held

    def forget(self, relay: PeerId) -> None:
        """Drop the reservation at this relay: refuse its circuits, and close its link when idle. Sends nothing."""
        if self.reservations.pop(relay, None) is not None:
            self._host.links.let_go(relay)

    def _is_over(self, held: Reservation) -> bool:
        return held.expires_at <= self._clock.now() or self._host.links.direct(held.relay) is None

    def _believe(self, link: Link, promise: ReservationMessage, limit: Limit | None) -> Reservation:
        relay, me = link.peer, self._host.id
        if promise.voucher:
            try:
                voucher = Voucher.open(promise.voucher, verify)
            except ProtocolViolation as error:
                raise error.blame(relay) from None
            if (voucher.relay, voucher.peer) != (relay, me):
                raise ProtocolViolation("the voucher is for another relay or another peer", relay)
        lasts_s = min(max(promise.expires_unix_s - self._clock.wall(), _SHORTEST_S), limits.RESERVATION_S)
        addrs = self._relay_addrs(link, promise)
        if not addrs:
            raise Refused("the relay has no address at which others can reach it", relay)
        return Reservation(relay, addrs, self._clock.now() + lasts_s, limit)

    def _relay_addrs(self, link: Link, promise: ReservationMessage) -> tuple[Multiaddr, ...]:
        """This peer's circuit addresses through a relay: from the address that was dialed, which is known to work, and
        from the relay's own list; if there are none, from the address book.

        A relay could list addresses of others, which peers would then dial, so only few of them are announced (see
        `reach.relay.relay_client`).
        """
        said = [link.remote] if link.initiator else []
        for raw in promise.relay_addrs:
            try:
                bare, named = split_peer(decode_addr(raw))
            except ProtocolViolation:
                continue  # an unknown kind of address
            if named in (None, link.peer) and bare.to_bytes():
                said.append(bare)
        local = reach(link.remote) == 0  # a relay's loopback address is useless on other machines
        told = said or self._host.known_addrs(link.peer)
        unique = dict.fromkeys(addr for addr in told if _is_direct(addr) and (local or reach(addr) > 0))
        return tuple(circuit_addr(addr, link.peer) for addr in list(unique)[: limits.ADDRS_PER_PEER])

    # --- outgoing: the transport ---------------------------------------------------------------------------

    def can_dial(self, addr: Multiaddr) -> bool:
        return circuit_place(addr) is not None

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        """Open a circuit to the peer at the end of `addr`. `fresh` is ignored: circuits have no ports."""
        bare, destination = split_peer(addr)
        place = circuit_place(addr)
        if place is None or destination is None:
            raise Unreachable(f"{addr} has no relay, or no destination peer")
        if destination in self._reaching or destination == place.relay:
            raise Unreachable("a relay cannot be reached over a relay", destination)
        link = await self._relay_link(place.relay, place.addr)
        answer, stream = await self._request(link, HopMessage(kind=HopKind.CONNECT, peer=destination))
        if answer.status != Status.OK:
            stream.reset()
            raise Unreachable(f"the relay {place.relay.short} answered: {status_words(answer.status)}", destination)
        circuit = CircuitLink(stream, bare, answer.limit)
        self._renewal.opened(destination, circuit)
        return circuit

    async def _renew(self, peer: PeerId, old: CircuitLink) -> None:
        """Open another circuit to `peer` over the same relay, if the circuit is still this side's best link."""
        best = self._host.links.best(peer)
        if best is not None and best.way == PathKind.RELAYED and best.initiator:
            raw = await self.dial(with_peer(old.remote, peer))
            await self._host.join(raw, PathKind.RELAYED, initiator=True, expected=peer)

    async def listen(self, addr: Multiaddr) -> Listener:
        raise ConfigError(f"cannot listen on {addr}: circuit addresses come from reservations at relays")

    async def _relay_link(self, relay: PeerId, addr: Multiaddr | None) -> Link:
        """A direct link to the relay, dialed if there is none. During the dial, no circuit to this relay is opened, to
        prevent a loop.
        """
        links = self._host.links
        self._reaching[relay] += 1
        try:
            if links.direct(relay) is None:
                await self._host.connect(relay, [] if addr is None else [addr], checked=True)
        finally:
            self._reaching[relay] -= 1
            self._reaching += Counter()  # drops the zeros
        link = links.direct(relay)
        if link is None:
            raise Unreachable("the relay itself is only reachable over a relay", relay)
        return link

    async def _ask(self, link: Link, message: HopMessage) -> HopMessage:
        answer, stream = await self._request(link, message)
        await stream.aclose()
        return answer

    async def _request(self, link: Link, message: HopMessage) -> tuple[HopMessage, Stream]:
        """Send a request; returns the relay's answer, and the stream for the data that follows."""
        stream = await link.open(HOP)
        answered = False
        try:
            with trio.fail_after(limits.CIRCUIT_ANSWER_S):
                await send_message(stream, message.encode())
                answer = HopMessage.decode(await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES))
            if answer.kind != HopKind.STATUS:
                raise ProtocolViolation(f"a relay answered with {answer.kind.name}", link.peer)
            answered = True
            return answer, stream
        except ProtocolViolation as error:
            raise error.blame(link.peer) from None
        except trio.TooSlowError:
            raise Unreachable(f"the relay did not answer within {limits.CIRCUIT_ANSWER_S:g} s", link.peer) from None
        finally:
            if not answered:
                stream.reset()

    # --- incoming ------------------------------------------------------------------------------------------

    async def _serve_stop(self, stream: Stream) -> None:
        """Accept a circuit from a relay. Returns when the circuit is over, because the host then closes its stream."""
        with trio.move_on_after(limits.CIRCUIT_REQUEST_S) as scope:
            message = StopMessage.decode(await receive_message(stream, limits.CIRCUIT_MESSAGE_BYTES))
        if scope.cancelled_caught:
            raise ProtocolViolation("a relay opened a stream and sent nothing", stream.peer)
        status = self._verdict(stream, message)
        await send_message(stream, StopMessage(kind=StopKind.STATUS, status=status).encode())
        if status != Status.OK or message.peer is None:
            return
        raw = CircuitLink(stream, self._remote(stream.link), message.limit)
        relay = stream.peer
        self._half_open[relay] += 1
        try:
            await self.welcome(raw, message.peer)
        finally:
            self._half_open[relay] -= 1
            self._half_open += Counter()
        # On shutdown the link is closed first, which ends the stream.
        with trio.CancelScope(shield=True):
            await stream.wait_gone()

    async def welcome(self, raw: RawLink, peer: PeerId) -> None:
        """Authenticate an incoming circuit, which must be from `peer`, and use it as a link."""
        try:
            await self._host.join(raw, PathKind.RELAYED, initiator=False, expected=peer)
        except Unreachable as error:
            _log.info("a circuit from %s over %s failed: %s", peer, raw.remote, error.args[0])

    def _verdict(self, stream: Stream, message: StopMessage) -> Status:
        if message.kind != StopKind.CONNECT:
            return Status.UNEXPECTED_MESSAGE
        if message.peer is None:
            return Status.MALFORMED_MESSAGE
        if stream.peer not in self.reservations or stream.link.way == PathKind.RELAYED or message.peer == self._host.id:
            return Status.PERMISSION_DENIED
        most = limits.CIRCUITS_HALF_OPEN
        if self._half_open[stream.peer] * 2 >= most or self._half_open.total() >= most:
            return Status.RESOURCE_LIMIT_EXCEEDED
        return Status.OK

    def _remote(self, link: StreamOwner) -> Multiaddr:
        """The circuit address through this relay: with the relay's address if this side dialed it, else with its id."""
        return circuit_addr(link.remote if link.initiator else None, link.peer)


def _is_direct(addr: Multiaddr) -> bool:
    return not is_relayed(addr) and is_dialable(addr)
