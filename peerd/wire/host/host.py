"""Host: this peer on the network. Listens, dials, opens streams, and passes incoming streams to handlers by protocol.

It composes transports (bytes), `upgrade` (authentication), `Link` (one connection), `Links` (table and events),
`Dialer` and `Failover` (paths to peers), `HostAddresses` (own addresses) and `InboundGate` (incoming connections). An
unexpected exception ends only the stream, link or connection that it occurs in (see `faults`). Invariants: every task
runs in `run`'s nursery; cancelling `run` closes every link properly and ends in bounded time; the number of incoming
connections that have not authenticated yet is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import trio
from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import circuit_place, is_relayed, reach, split_peer, with_peer
from peerd.core.clock import Clock
from peerd.core.errors import Cause, LocalError, ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.version import VERSION
from peerd.wire.budget.book import Book, user_at
from peerd.wire.faults import Faults, first_of
from peerd.wire.host import identify
from peerd.wire.host.addresses import HostAddresses
from peerd.wire.host.dial_quota import NOBODY, DialQuota, blocks_of, common, rule_of
from peerd.wire.host.dialer import AddressBook, Dialer
from peerd.wire.host.failover import Failover
from peerd.wire.host.identify import PeerInfo
from peerd.wire.host.identify_service import IdentifyService
from peerd.wire.host.inbound import InboundGate
from peerd.wire.host.link_table import HostTraffic, LinkLimits, Links, PeerDown, PeerEvent, PeerIdentified, PeerUp
from peerd.wire.link.config import LinkConfig
from peerd.wire.link.link import Buffers, Link, Stream
from peerd.wire.link.rails import OFFERS, attach_rail, is_rail, secure_rail
from peerd.wire.link.unread import Unread
from peerd.wire.link.upgrade import UpgradedLink, recognise, upgrade
from peerd.wire.noise.noise import Secrets
from peerd.wire.path_selection import PathKind
from peerd.wire.rate.access_line import AccessLine
from peerd.wire.transport import RawLink, Transport, close_surely
from peerd.wire.yamux.stream import WindowBudget

__all__ = ["Host", "HostConfig", "PeerDown", "PeerIdentified", "PeerUp"]

_log = logging.getLogger("peerd.wire")
Handler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """Limits and timeouts of one host, in bytes and seconds."""

    links: LinkLimits = field(default_factory=LinkLimits)
    link: LinkConfig = field(default_factory=LinkConfig)
    half_open: int = limits.HALF_OPEN  # concurrent inbound handshakes
    unread_link_bytes: int = limits.UNREAD_BYTES_LINK
    unread_host_bytes: int = limits.UNREAD_BYTES_HOST
    handshake_s: float = 10.0
    dial_s: float = 15.0  # per address, including the handshake
    identify_s: float = 20.0
    shutdown_s: float = 2.0
    agent: str = f"peerd/{VERSION}"


class Host:
    """This peer on the network. It opens no connections before `run`."""

    def __init__(
        self,
        keypair: Keypair,
        clock: Clock,
        transports: Sequence[Transport],
        config: HostConfig | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """`buffers` may be shared by the hosts of one process. If None, this host creates its own."""
        self.id: PeerId = keypair.peer_id
        self.book = Book()  # resources used by each peer, place and region
        self.sign = keypair.sign  # for signed statements that other peers may forward: see messages/proof
        self.config = config or HostConfig()
        self.faults = Faults()  # of this whole process: services and roles record theirs here, too
        self.links = Links(self.config.links, self.id, self.book, self.faults)
        self._clock, self._transports = clock, list(transports)
        self._secrets = Secrets(keypair, clock.secure_bytes(32))
        self._handlers: dict[str, Handler] = {}
        self._book = AddressBook()
        self._introductions = IdentifyService(self)
        self.whereabouts = HostAddresses(self.id, self._transports, self._introductions.changed)
        restraint = DialQuota(self.book)
        self._dialer = Dialer(self._book, self._dial, self.whereabouts.surroundings, restraint, self.faults)
        self._failover = Failover(self.links, self._dialer)
        self._gate = InboundGate(self.config.half_open, self.config.handshake_s, self._welcome, self.faults)
        self.line = AccessLine()  # measured rate of this machine's line, if a LineMeter runs
        self.takes_inbound = True  # others can connect, directly or over a relay; False: this peer only dials
        self.punching: set[PeerId] = set()  # peers with which a hole punch is in progress
        self._buffers = buffers or Buffers()
        self._budget = WindowBudget(limits.WINDOW_BYTES_HOST)
        self.unread = Unread(self.config.unread_link_bytes, self.config.unread_host_bytes)
        self._nursery: trio.Nursery | None = None  # handlers, dials, handshakes
        self._link_nursery: trio.Nursery | None = None  # outlives the other, so that links can be closed properly
        self.handle(identify.IDENTIFY, self._introductions.serve)
        self.handle(identify.IDENTIFY_PUSH, self._introductions.serve_push)
        self.handle(identify.PING, identify.answer_pings)

    # --- public interface ----------------------------------------------------------------------------------

    async def run(
        self, listen: Sequence[Multiaddr] = (), *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen on `listen` and run until cancelled. Raises ConfigError if an address cannot be listened on."""
        try:
            listeners = await self.whereabouts.listen(listen)
            async with trio.open_nursery() as nursery:
                self._link_nursery = await nursery.start(self._keep_links)
                self._nursery = nursery
                try:
                    for listener in listeners:
                        nursery.start_soon(self._gate.serve, listener)
                    nursery.start_soon(self._introductions.run)
                    nursery.start_soon(self.links.run)
                    nursery.start_soon(self.whereabouts.follow, self._book.forget_failures)
                    task_status.started()
                    await trio.sleep_forever()
                finally:
                    self._nursery = None
                    nursery.cancel_scope.cancel()
                    with trio.CancelScope(shield=True):
                        await self._say_goodbye()
                    self._link_nursery.cancel_scope.cancel()
        finally:
            await self.whereabouts.close()

    @property
    def identify_s(self) -> float:
        """Timeout of identify, in seconds."""
        return self.config.identify_s

    @property
    def agent(self) -> str:
        """Name and version of this program, for identify."""
        return self.config.agent

    def addrs(self) -> list[Multiaddr]:
        """Addresses at which this host can be reached, with /p2p/<id>; the best first."""
        return self.whereabouts.addrs()

    def listen_addrs(self) -> list[Multiaddr]:
        """Concrete addresses on which this host listens, without /p2p."""
        return self.whereabouts.listen_addrs()

    def add_transport(self, transport: Transport) -> None:
        """Add a transport; earlier ones have precedence."""
        self._transports.append(transport)

    def protocols(self) -> list[str]:
        """Protocols that this host serves, sorted."""
        return sorted(self._handlers)

    def handle(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol`: `handler` runs in its own task for each incoming stream, which is closed afterwards."""
        if not 0 < len(protocol.encode()) <= limits.PROTOCOL_BYTES:
            raise LocalError(f"a protocol name has 1 to {limits.PROTOCOL_BYTES} bytes")
        self._handlers[protocol] = handler
        self._introductions.changed()

    def unhandle(self, protocol: str) -> None:
        """Stop serving `protocol`; running handlers continue."""
        self._handlers.pop(protocol, None)
        self._introductions.changed()

    def learn(
        self, peer: PeerId, addrs: Iterable[Multiaddr], *, by: PeerId | None = None, checked: bool = False
    ) -> None:
        """Add addresses that `by` reported (None if unknown) to the address book, except those that may not be dialed.

        `checked`: the addresses are a result of `believed`, so they are not filtered again.
        """
        if peer != self.id:
            told = list(addrs) if checked else self.believed(addrs, by)
            links = self.links.to(by) if by is not None else ()
            self._dialer.learn(peer, told, links[-1].user if links else NOBODY)

    def believed(self, addrs: Iterable[Multiaddr], by: PeerId | None = None) -> list[Multiaddr]:
        """The addresses reported by `by` that may be dialed as hearsay: see `wire/host/dial_quota`."""
        may = self.hearing(by)
        return [addr for addr in addrs if may(addr.to_bytes())]

    def hearing(self, by: PeerId | None) -> Callable[[bytes], bool]:
        """A function that tests a binary address as `believed` does. Use it at once, since the links may change."""
        links = self.links.to(by) if by is not None else []
        if not links and not self.links.blocks:
            return lambda raw: True  # no peer was ever connected, so the addresses are from the user
        blocks = blocks_of(link.remote for link in links) if links else common(self.links.blocks)
        around = self.whereabouts.surroundings()
        return rule_of(around, blocks)

    def trust(self, peer: PeerId, addrs: Iterable[Multiaddr]) -> None:
        """Add addresses from our own configuration to the address book; they are dialed without restrictions."""
        for addr in addrs:
            circuit = circuit_place(addr)
            if circuit is not None and circuit.addr is not None:
                self._dialer.learn(circuit.relay, [circuit.addr])
            if peer != self.id:
                self._dialer.learn(peer, [addr])

    def known_addrs(self, peer: PeerId) -> list[Multiaddr]:
        """Addresses of `peer`, best first, without /p2p."""
        return self._book.addrs(peer)

    async def connect(self, peer: PeerId, addrs: Iterable[Multiaddr] = (), *, checked: bool = False) -> None:
        """Connect to `peer` unless it is connected. Raises Unreachable with the reason of each address.

        `addrs` are added to the address book as hearsay: see `learn`.
        """
        if peer == self.id:
            raise Unreachable("that is this peer itself", peer, Cause.OURSELVES)
        self.learn(peer, addrs, checked=checked)
        if self.links.best(peer) is None:
            await self._dialer.reach(peer, self._running())

    async def connect_addr(self, addr: Multiaddr) -> PeerId:
        """Connect to an address from our own configuration; returns the peer there.

        If `addr` has a /p2p, raises Unreachable if another peer answers.
        """
        bare, peer = split_peer(addr)
        if peer is None:
            link = await self._dial(bare, None)
            self._book.worked(link.peer, bare)
            return link.peer
        self.trust(peer, [bare])
        await self.connect(peer)
        return peer

    async def dial_at(self, addr: Multiaddr, peer: PeerId) -> Link:
        """Dial a further link to `peer`, even if it is connected. Raises Unreachable. Does not use the address book."""
        return await self._dial(addr, peer)

    async def raw_link(self, addr: Multiaddr) -> RawLink:
        """Dial `addr` without authentication, for `join`. Raises Unreachable."""
        return await self._raw_link(addr, None)

    async def join(
        self, raw: RawLink, way: PathKind, *, initiator: bool = False, expected: PeerId | None = None
    ) -> Link:
        """Authenticate a raw link and add it to the host's links. On failure, closes `raw` and raises Unreachable."""
        adopted = False
        try:
            with trio.move_on_after(self.config.handshake_s):
                secrets = self._secrets.fresh(self._clock.secure_bytes(32))
                secured = await upgrade(raw, secrets, initiator=initiator, expected=expected)
                link = self._adopt(secured, way)
                adopted = True
                return link
            raise Unreachable(f"no handshake within {self.config.handshake_s:g} s", expected)
        except ProtocolViolation as error:
            _log.info("handshake with %s failed: %s", raw.remote, error)
            raise Unreachable(error.args[0], expected, error.cause) from error
        finally:
            if not adopted:
                await close_surely(raw)

    async def probe(self, addr: Multiaddr, peer: PeerId) -> None:
        """Test whether strangers can reach `peer` at `addr`: connect from a fresh port, verify its identity, close.

        Raises Unreachable with the reason. Creates no link on either side, and does not change the address book.
        """
        raw = await self._raw_link(addr, peer, fresh=True)
        try:
            with trio.fail_after(self.config.handshake_s):
                await recognise(raw, self._secrets.fresh(self._clock.secure_bytes(32)), peer)
        except trio.TooSlowError:
            raise Unreachable(f"no handshake within {self.config.handshake_s:g} s", peer) from None
        except RemoteError as error:
            raise Unreachable(error.args[0], peer, error.cause) from error
        finally:
            await close_surely(raw)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream; connects if needed. If the peer refuses `protocol`, the first receive raises Refused."""
        link = self.links.best(peer)
        if link is None:
            await self.connect(peer)
            link = self.links.best(peer)
            if link is None:
                raise Unreachable("the connection was lost right after it was made", peer)
        return await link.open(protocol)

    def pace(self, peer: PeerId, bytes_per_s: float) -> None:
        """Send to this peer evenly, at this rate at most, if the system supports it; inf: no limit."""
        link = self.links.best(peer)
        if link is not None:
            link.pace(bytes_per_s)

    async def ping(self, peer: PeerId) -> float:
        """Round trip to `peer` in seconds, by libp2p's ping protocol."""
        stream = await self.open_stream(peer, identify.PING)
        try:
            return await identify.ping(stream, self._clock.secure_bytes(identify.PING_BYTES))
        finally:
            stream.reset()

    def connected(self) -> list[PeerId]:
        """Peers with a link, the longest connected first."""
        return self.links.peers()

    def info(self, peer: PeerId) -> PeerInfo | None:
        """A connected peer's identify description, or None before it has arrived."""
        return self._introductions.infos.get(peer)

    async def introduction(self, peer: PeerId, timeout_s: float) -> PeerInfo | None:
        """Like `info`, but waits for the description, for at most `timeout_s`."""
        return await self._introductions.wait(peer, timeout_s)

    def watch(self, *, told: bool = False) -> AbstractContextManager[trio.MemoryReceiveChannel[PeerEvent]]:
        """A channel of PeerUp, PeerDown and, if `told`, PeerIdentified events in order; see Links.watch."""
        return self.links.watch(told=told)

    def when_moved(self, told: Callable[[PeerId], None]) -> None:
        """Call `told` whenever the best link to a peer changes, and for its first link."""
        self.links.when_moved(told)

    @property
    def window_bytes_lent(self) -> int:
        """Bytes of flow-control window granted on all links together, beyond the initial windows."""
        return self._budget.used_bytes

    def traffic(self) -> HostTraffic:
        """Traffic counters of the host and of each connected peer."""
        return self.links.traffic()

    # --- links ---------------------------------------------------------------------------------------------

    def speaks(self, protocol: str) -> bool:
        return protocol in self._handlers

    def accept(self, stream: Stream) -> None:
        handler = self._handlers.get(stream.protocol)
        if self._nursery is None or handler is None:
            stream.reset()
        else:
            self._nursery.start_soon(self._supervise, stream, handler)

    def link_leaving(self, link: Link, reason: str) -> None:
        self.links.leaving(link, reason)
        if self.links.best(link.peer) is None:
            self._introductions.forget(link.peer)

    def link_doubted(self, link: Link) -> None:
        nursery = self._nursery
        if nursery is not None and self._failover.begins(link):
            work = partial(self._failover.search, link, nursery)
            nursery.start_soon(self.supervise, work, lambda: f"the search for another path to {link.peer}")

    async def supervise(self, work: Callable[[], Awaitable[None]], about: Callable[[], str]) -> bool:
        """Run `work`; an exception is recorded in `faults` and suppressed. Returns True if `work` returned."""
        return await self.faults.contain(work, about)

    async def _supervise(self, stream: Stream, handler: Handler) -> None:
        """Run the handler of an incoming stream. The stream ends with it, and its exceptions do not reach the host."""
        served = False

        async def serve() -> None:
            nonlocal served
            try:
                await handler(stream)
                served = True
            except* ProtocolViolation as group:
                _log.warning("peer %s violated the protocol %s: %s", stream.peer, stream.protocol, first_of(group))
            except* RemoteError as group:
                _log.debug("%s ended: %s", stream, first_of(group))

        try:
            await self.supervise(serve, lambda: f"the handler of {stream.protocol}")
        finally:
            if served:
                await stream.aclose()
            else:
                stream.reset()

    def _adopt(self, secured: UpgradedLink, way: PathKind) -> Link:
        """Run an authenticated connection as a link. Raises Unreachable with the reason if that is impossible."""
        peer = secured.session.peer
        if peer == self.id:
            raise Unreachable("that is this peer itself", peer, Cause.OURSELVES)
        if self._nursery is None or self._link_nursery is None:
            raise Unreachable("this host is shutting down", peer)
        full = self.links.make_room(user_at(peer.text, secured.raw.remote), inbound=not secured.initiator)
        if full is not None:
            raise Unreachable(f"this host has too many connections: {full}", peer)
        budget = WindowBudget(limits.WINDOW_BYTES_LINK, self._budget)
        link = Link(secured, self, self.config.link, self._buffers, budget, way)
        self.links.add(link)
        self._link_nursery.start_soon(self._run_link, link)
        self._dialer.connected(peer, relayed=way == PathKind.RELAYED)
        self._nursery.start_soon(self.supervise, lambda: self._introductions.ask(link), lambda: f"identify with {peer}")
        return link

    async def open_rail(self, link: Link) -> UpgradedLink:
        with trio.move_on_after(self.config.dial_s):
            raw = await self._raw_link(link.remote, link.peer, fresh=True)
            return await secure_rail(raw, self._secrets.fresh(self._clock.secure_bytes(32)), link, self.links)
        raise Unreachable("no answer in time", link.peer)

    async def _run_link(self, link: Link) -> None:
        try:
            await self.supervise(link.run, lambda: f"the end of {link}")
        finally:
            self.links.remove(link)
            self.unread.gone(link)
            _log.debug("%s ended: %s", link, link.reason)

    async def _keep_links(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Run the links, shielded from the cancellation of `run` until they are closed properly."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await trio.sleep_forever()

    async def _say_goodbye(self) -> None:
        await self.whereabouts.close()
        await trio.lowlevel.cancel_shielded_checkpoint()  # so that handlers are cancelled first
        with trio.move_on_after(self.config.shutdown_s):
            for relayed in (True, False):  # relayed links first, while the links to their relays are open
                async with trio.open_nursery() as nursery:
                    for link in self.links:
                        if (link.way == PathKind.RELAYED) is relayed:
                            nursery.start_soon(link.close, "this peer left")

    # --- in and out ----------------------------------------------------------------------------------------

    def _running(self) -> trio.Nursery:
        if self._nursery is None:
            raise Unreachable("this host is not running")
        return self._nursery

    async def _welcome(self, raw: RawLink) -> None:
        """Authenticate an incoming connection, and use it as a link or as a rail of one."""
        fresh = self._secrets.fresh(self._clock.secure_bytes(32))
        secured = await upgrade(raw, fresh, initiator=False, muxers=OFFERS)
        way = way_to(raw.remote)
        if is_rail(secured):
            await attach_rail(secured, self.links)
        else:
            punched = way == PathKind.DIRECT and secured.session.peer in self.punching
            self._adopt(secured, PathKind.PUNCHED if punched else way)

    async def _dial(self, addr: Multiaddr, peer: PeerId | None) -> Link:
        """Connect and authenticate. Every failure raises Unreachable with the reason."""
        with trio.move_on_after(self.config.dial_s):
            raw = await self._raw_link(addr, peer)
            try:
                return await self.join(raw, way_to(addr), initiator=True, expected=peer)
            except RemoteError as error:
                raise Unreachable(error.args[0], peer, error.cause) from error
        raise Unreachable(f"no answer within {self.config.dial_s:g} s", peer)

    async def _raw_link(self, addr: Multiaddr, peer: PeerId | None, *, fresh: bool = False) -> RawLink:
        transport = next((t for t in self._transports if t.can_dial(addr)), None)
        if transport is None:
            raise Unreachable("no transport supports that kind of address", peer)
        if peer is not None and is_relayed(addr):
            addr = with_peer(addr, peer)  # the relay needs the destination
        return await transport.dial(addr, fresh=fresh)


def way_to(addr: Multiaddr) -> PathKind:
    """Kind of path of a connection to or from this address."""
    if is_relayed(addr):
        return PathKind.RELAYED
    return PathKind.DIRECT if reach(addr) == 2 else PathKind.LOCAL
