"""Rails: further TCP connections of one link, which carry its bulk data in parallel (see wire/yamux/striping).

Each rail is encrypted separately. Its handshake authenticates the same peer, with `/peerd/rail/1` in place of the
muxer; its first frame contains the hash of the link's own handshake, which identifies the link. The hash need not be
secret, since only the link's peer may use it. The side that dialed the link opens rails when `wire.rate.rail_count`
decides so; both sides send on them. Each rail has a reading and a writing task; the writer takes the next batch when
its socket has room, so that the load is balanced. Rails are paced, because bursts of several connections would overflow
short queues on the path.

Invariants: a broken rail ends its link, since its data is lost; a rail that both sides have closed does not. Hostile
input: rails for links of others or for none (closed at once), too many rails, rails without data. The rails of a host
are limited: no peer or place (address block) has more than remain free, so that nobody can take the last ones.
"""

from __future__ import annotations

import hmac
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import RAILS, RAILS_PER_LINK
from peerd.wire.budget.book import User, user_at
from peerd.wire.link.sealing import Buffers, Fill, FrameSealer
from peerd.wire.link.upgrade import UpgradedLink, upgrade
from peerd.wire.noise.noise import Secrets
from peerd.wire.rate.rail_count import RailPace, RailPlan
from peerd.wire.tcp_info import TcpInfo
from peerd.wire.transport import CountedLink, LendingLink, RawLink, counted
from peerd.wire.yamux.frames import GO_AWAY, HEADER
from peerd.wire.yamux.frames import PROTOCOL as YAMUX
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.striping import BINDING_BYTES, PROTOCOL, StripedLane

_log = logging.getLogger("peerd.wire")
OFFERS = (YAMUX, PROTOCOL)  # offered by the side that is dialed
_WARM_ROUND_TRIPS = 8  # until a connection has approximately found its rate
_WARM_S = 0.1  # assumed round trip if none was measured
_READ_BYTES = 256 * 1024
_ASK_S = 0.01  # interval of reading the round trip: a queue should be noticed before calls wait in it


class RailOwner(Protocol):
    """The part of a link that its rails use."""

    peer: PeerId
    remote: Multiaddr
    user: User
    mux: YamuxSession
    buffers: Buffers
    bytes_in: int
    bytes_out: int
    rails: Rails

    @property
    def usable(self) -> bool: ...

    def flush(self) -> None: ...

    def rank(self, raw: RawLink) -> None: ...

    def left_to_small(self, alone: bool) -> None: ...

    def tcp_infos(self) -> dict[CountedLink, TcpInfo]: ...

    def take(self, plains: Iterable[bytes | memoryview], lane: StripedLane | None = None) -> None: ...

    def attach(self, secured: UpgradedLink, early: list[bytes | memoryview]) -> None: ...

    async def open_rail(self) -> UpgradedLink: ...

    async def send_batch(
        self, sealing: FrameSealer, fill: Fill, send: Callable[[memoryview], Awaitable[None]]
    ) -> bool: ...

    async def broke(self, error: Exception) -> None: ...

    async def violated(self, error: ProtocolViolation) -> None: ...


class Rail:
    """One further TCP connection of a link."""

    def __init__(self, link: RailOwner, secured: UpgradedLink, early: list[bytes | memoryview]) -> None:
        self._link, self.raw, self._opener, self._early = link, secured.raw, secured.session.opener, early
        self._lending = secured.raw if isinstance(secured.raw, LendingLink) else None
        self._sealing = FrameSealer(secured.session.sealer, link.buffers.plain, self._lending)
        link.rank(secured.raw)
        if self._lending is not None:
            self._lending.begin_small()
            self._lending.pace(math.inf)  # evenly, at the rate of the system's congestion control
        self._opener.pool = link.buffers.received
        self._lane = StripedLane(main=False)
        self._work: trio.Event | None = None
        self._over = trio.Event()  # our go-away is sent
        self.leaving = False  # sends no more data
        self.send_began: float | None = None

    def wake(self) -> None:
        if self._work is not None:
            self._work.set()
            self._work = None

    def pace(self, bytes_per_s: float) -> None:
        """Send evenly, at this rate at most."""
        if self._lending is not None:
            self._lending.pace(bytes_per_s)

    def leave(self) -> None:
        """Stop sending. The rail ends once the other side has stopped as well."""
        self.leaving = True
        self._link.rails.changed()
        self.wake()

    async def run(self) -> None:
        """Read and write until the rail or its link ends."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read()
                if not self._lane.ended:
                    await trio.sleep_forever()  # the link is about to end
                self.leave()
                await self._over.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._link.rails.gone(self)
            with trio.CancelScope(shield=True):
                await self.raw.aclose()

    async def _read(self) -> None:
        link, opener, lane = self._link, self._opener, self._lane
        try:
            link.take(self._early, self._lane)
            while not self._lane.ended:
                if self._lending is not None:
                    data: bytes | memoryview = await self._lending.receive_view(opener.missing_bytes)
                else:
                    data = await self.raw.receive_some(_READ_BYTES)
                if not data:
                    raise trio.BrokenResourceError("the peer closed it")
                link.bytes_in += len(data)
                link.take(opener.each(data, lane.place, lane.row), lane)
                link.rails.moved()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            await link.broke(error)
        except ProtocolViolation as error:
            await link.violated(error)

    async def _write(self) -> None:
        link = self._link
        try:
            while not self.leaving:
                while not self.leaving and await link.send_batch(self._sealing, link.mux.fill_rail, self._send):
                    pass
                if not self.leaving:
                    self._work = trio.Event()
                    await self._work.wait()
            await self._send(self._sealing.one(HEADER.pack(0, GO_AWAY, 0, 0, 0)))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            await link.broke(error)
        self._over.set()

    async def _send(self, data: bytes | memoryview) -> None:
        self.send_began = trio.current_time()
        await self.raw.send_all(data)
        self.send_began = None
        self._link.bytes_out += len(data)
        self._link.rails.moved()


class Rails:
    """The rails of one link: opens, closes and paces them."""

    def __init__(self, link: RailOwner, binding: bytes) -> None:
        self._link, self.binding = link, binding
        self._all: dict[Rail, None] = {}  # oldest first
        self._total = 0.0  # bytes of the link, in and out, at which the plan is evaluated next
        self._much = math.inf  # waiting bytes at which it is evaluated at once
        self._enough: trio.Event | None = None  # set when one of them is reached
        self._evenness, self._even_at = RailPace(), 0.0  # and the time of its next evaluation
        self._ask_at = 0.0  # time of the next read of the round trip
        self._warm_at = float("inf")  # until then the first connection, which is past slow start, still carries bulk

    def __len__(self) -> int:
        return len(self._all)

    def raws(self) -> list[RawLink]:
        """The rails' connections."""
        return [rail.raw for rail in self._all]

    def is_of(self, binding: bytes) -> bool:
        """True if a rail with this `binding` belongs to this link."""
        return hmac.compare_digest(binding, self.binding)

    def wake(self) -> None:
        """Wake the writers, because there is something to send."""
        for rail in self._all:
            rail.wake()

    def moved(self) -> None:
        """Called after bytes were sent or received: check whether plan, pacing or round trip need an update."""
        if self._enough is not None and self._link.bytes_in + self._link.bytes_out >= self._total:
            self._enough.set()
        if not self._all:
            return
        now = trio.current_time()
        if now >= self._warm_at:
            self._warm_at = float("inf")
            self.changed()
        if now >= self._even_at:
            self._even(now)
        if now >= self._ask_at:
            self._ask_rtt(now)

    def filled(self) -> None:
        """Called when a batch is about to be sent: if many bytes are waiting, evaluate the plan at once."""
        if self._enough is not None and self._much < math.inf and self._link.mux.waiting_bytes >= self._much:
            self._enough.set()

    def changed(self) -> None:
        """Called when a rail was added or is leaving: update the muxer and the first connection."""
        count = sum(not rail.leaving for rail in self._all)
        helping = trio.current_time() < self._warm_at < float("inf")
        self._link.mux.set_rails(count, helping=helping)
        self._link.left_to_small(count > 0 and not helping)
        self._link.flush()

    def gone(self, rail: Rail) -> None:
        rail.leaving = True
        self._all.pop(rail, None)
        self.changed()

    def stuck(self, now: float, stall_s: float) -> bool:
        """True if a send on one of the rails has made no progress for `stall_s` seconds."""
        return any(rail.send_began is not None and now - rail.send_began > stall_s for rail in self._all)

    def add(self, secured: UpgradedLink, early: list[bytes | memoryview]) -> Rail:
        """Make a rail of an authenticated connection; the caller runs it. Unreachable if there are too many."""
        if len(self._all) >= RAILS_PER_LINK or not self._link.usable:
            raise Unreachable("no more connections for this link", self._link.peer)
        rail = Rail(self._link, secured, early)
        if not self._all:
            rtt_s = self._link.mux.rtt_min_s or _WARM_S
            self._warm_at = trio.current_time() + _WARM_ROUND_TRIPS * rtt_s
        self._all[rail] = None
        self.changed()
        return rail

    async def tend(self, nursery: trio.Nursery) -> None:
        """Open rails in `nursery` and close them, as the plan decides; runs until cancelled."""
        link = self._link
        plan = RailPlan(trio.current_time())
        while True:
            self._total = link.bytes_in + link.bytes_out + plan.look_bytes(link.mux.rtt_min_s)
            self._much = plan.trial_bytes(trio.current_time(), link.mux.rtt_min_s, len(self._all))
            self._enough = trio.Event()
            with trio.move_on_after(plan.idle_s if self._all else float("inf")):
                await self._enough.wait()
            rtt_s = self._distance_s(link.tcp_infos().values())
            now = trio.current_time()
            wanted, why = plan.look(now, rtt_s, (link.bytes_in, link.bytes_out), len(self._all), link.mux.waiting_bytes)
            if wanted > len(self._all):
                _log.debug("%s: opening %d more connections: %s", link, wanted - len(self._all), why)
                if not await self._open(wanted - len(self._all), nursery):
                    plan.failed(trio.current_time())
            elif not wanted:
                for rail in list(self._all):
                    rail.leave()
            await trio.sleep(plan.pause_s(rtt_s))

    def _ask_rtt(self, now: float) -> None:
        """Report the receive-side round trip to the muxer: the median of the rails, since an idle rail's is outdated.

        Does nothing if it is much shorter than the link's, because then a proxy terminates the TCP connections.
        """
        self._ask_at = now + _ASK_S
        times = [info.receive_rtt_s for info in counted(self.raws()).values()]
        least_s = self._link.mux.rtt_min_s
        if times and least_s is not None and (middle := statistics.median_low(times)) > least_s / 2:
            self._link.mux.pings.told(now, middle)

    def _even(self, now: float) -> None:
        """Limit each rail to little more than its share of the path's rate. No effect without system counters."""
        infos = self._link.tcp_infos().values()
        rtt_s = self._distance_s(infos)
        self._even_at = now + self._evenness.pause_s(rtt_s)
        if rtt_s is not None and infos:
            rate = self._evenness.look(now, rtt_s, sum(info.bytes_acked for info in infos), len(self._all))
            for rail in self._all:
                rail.pace(rate)

    def _distance_s(self, infos: Iterable[TcpInfo]) -> float | None:
        """The minimum round trip of the path in seconds, without queues and without delays of busy machines.

        So it includes the system's own measurements, whose acknowledgements do not wait for a process.
        """
        own = self._link.mux.rtt_min_s
        told = [info.min_rtt_s for info in infos if info.min_rtt_s > 0]
        return min(own, *told) if own is not None and told else own

    async def _open(self, count: int, nursery: trio.Nursery) -> bool:
        """Open `count` rails concurrently; returns True if all were opened."""
        before = len(self._all)
        async with trio.open_nursery() as dials:
            for _ in range(count):
                dials.start_soon(self._open_one, nursery)
        return len(self._all) >= before + count

    async def _open_one(self, nursery: trio.Nursery) -> None:
        link = self._link
        try:
            secured = await link.open_rail()
            adopted = False
            try:
                sealing = FrameSealer(secured.session.sealer, link.buffers.plain, None)
                await secured.raw.send_all(sealing.one(self.binding))
                nursery.start_soon(self.add(secured, secured.early).run)
                adopted = True
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Unreachable(str(error), link.peer) from error
            finally:
                if not adopted:
                    with trio.CancelScope(shield=True):
                        await secured.raw.aclose()
        except RemoteError as error:
            _log.debug("%s: cannot open a further connection: %s", link, error)


def _check_room(links: Iterable[RailOwner], peer: PeerId, remote: Multiaddr) -> None:
    place, used, own = user_at(peer.text, remote).place, 0, 0
    for link in links:
        if count := len(link.rails):
            used += count
            own += count if link.peer == peer or link.user.place == place else 0
    if own >= RAILS - used:
        raise Unreachable("this host has too many connections, or too many from this peer's network", peer)


async def secure_rail(raw: RawLink, secrets: Secrets, link: RailOwner, links: Iterable[RailOwner]) -> UpgradedLink:
    """Authenticate a raw link that will be a rail of `link`. On failure, closes `raw` and raises RemoteError."""
    stands = False
    try:
        _check_room(links, link.peer, link.remote)
        secured = await upgrade(raw, secrets, initiator=True, expected=link.peer, muxers=(PROTOCOL,))
        stands = True
        return secured
    finally:
        if not stands:
            with trio.CancelScope(shield=True):
                await raw.aclose()


def is_rail(secured: UpgradedLink) -> bool:
    return secured.session.muxer == PROTOCOL


async def attach_rail(secured: UpgradedLink, links: Iterable[RailOwner]) -> None:
    """Attach a connection that a peer opened to the link that it identifies. Raises RemoteError with the reason."""
    binding, early = await _receive_binding(secured)
    peer = secured.session.peer
    _check_room(links, peer, secured.raw.remote)
    link = next((link for link in links if link.peer == peer and link.rails.is_of(binding)), None)
    if link is None:
        raise Unreachable("a further connection for an unknown link", peer)
    link.attach(secured, early)


async def _receive_binding(secured: UpgradedLink) -> tuple[bytes, list[bytes | memoryview]]:
    """Receive a rail's first frame: the hash that identifies its link, and the plaintext after that frame."""
    early = list(secured.early)
    try:
        while not early:
            data = await secured.raw.receive_some(_READ_BYTES)
            if not data:
                raise Unreachable("the connection ended before it identified its link", secured.session.peer)
            early = secured.session.opener.feed(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unreachable(f"the connection broke before its first frame: {error}", secured.session.peer) from error
    binding = bytes(early.pop(0))
    if len(binding) != BINDING_BYTES:
        raise ProtocolViolation(f"a rail's first frame has {len(binding)} bytes", secured.session.peer)
    return binding, early
