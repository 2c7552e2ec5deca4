"""Rails: further connections of one link, which carry its bulk data side by side (see machine/mux/striping).

A rail is an encrypted connection of its own: the hand-shake proves the same peer, with `/peerd/rail/1` in the muxer's
place, and its first frame names the link by the hash of the link's own hand-shake: a name and no secret, since only the
link's own peer may use it. The side that dialed the link opens them when `machine.rate.rail_count` says so; both send
on them. Each has one task that reads and one that writes; the writer takes the next batch when its socket has room, so
that rails share the load by themselves. They send evenly: several connections that each send their window in bursts
make short queues on the way overflow. Invariants: a rail that breaks ends its link, since what it carried is lost; one
that both sides have declared over does not. Hostile input: rails for links of others or of none (closed at once), more
than allowed, rails that carry nothing. All rails of a host are shared: neither a peer nor a place has more of them than
are left to all others, so that nobody takes the last ones.
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
from peerd.machine.budget.book import User, user_at
from peerd.machine.mux.frames import GO_AWAY, HEADER
from peerd.machine.mux.frames import PROTOCOL as YAMUX
from peerd.machine.mux.session import YamuxSession
from peerd.machine.mux.striping import BINDING_BYTES, PROTOCOL, StripedLane
from peerd.machine.rate.rail_count import RailPlan
from peerd.machine.rate.rail_pacing import RailPace
from peerd.machine.secure.noise import Secrets
from peerd.net.link.sealing import Buffers, Fill, FrameSealer
from peerd.net.link.upgrade import UpgradedLink, upgrade
from peerd.net.tcp_info import TcpInfo
from peerd.net.transport import CountedLink, LendingLink, RawLink, counted

_log = logging.getLogger("peerd.net")
OFFERS = (YAMUX, PROTOCOL)  # of the side that is dialed
_WARM_ROUND_TRIPS = 8  # until a connection has found its rate, more or less
_WARM_S = 0.1  # a round trip, if none was measured
_READ_BYTES = 256 * 1024
_ASK_S = 0.01  # between two looks at the round trip: a queue should be seen before calls wait in it


class RailOwner(Protocol):
    """The link that a rail belongs to, as far as it matters here."""

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
    """One further connection."""

    def __init__(self, link: RailOwner, secured: UpgradedLink, early: list[bytes | memoryview]) -> None:
        self._link, self.raw, self._opener, self._early = link, secured.raw, secured.session.opener, early
        self._lending = secured.raw if isinstance(secured.raw, LendingLink) else None
        self._sealing = FrameSealer(secured.session.sealer, link.buffers.plain, self._lending)
        link.rank(secured.raw)
        if self._lending is not None:
            self._lending.begin_small()
            self._lending.pace(math.inf)  # evenly, at the rate that the system finds for itself
        self._opener.pool = link.buffers.received
        self._lane = StripedLane(main=False)
        self._work: trio.Event | None = None
        self._over = trio.Event()  # our goodbye is sent
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
        """Send nothing more; over once the other side has said the same."""
        self.leaving = True
        self._link.rails.changed()
        self.wake()

    async def run(self) -> None:
        """Read and write until it is over, or the link is."""
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
    """The rails of one link, and when there are more or fewer."""

    def __init__(self, link: RailOwner, binding: bytes) -> None:
        self._link, self.binding = link, binding
        self._all: dict[Rail, None] = {}  # oldest first
        self._total = 0.0  # bytes at which the plan looks again
        self._much = math.inf  # bytes that wait at which it does, too
        self._enough: trio.Event | None = None  # the plan waits for that
        self._evenness, self._even_at = RailPace(), 0.0  # when it looks next
        self._ask_at = 0.0  # when the system is asked for the round trip next
        self._warm_at = float("inf")  # until then the first connection still helps: its start is behind it

    def __len__(self) -> int:
        return len(self._all)

    def raws(self) -> list[RawLink]:
        """The connections."""
        return [rail.raw for rail in self._all]

    def is_of(self, binding: bytes) -> bool:
        """True when a rail that names `binding` belongs to this link."""
        return hmac.compare_digest(binding, self.binding)

    def wake(self) -> None:
        """There is something to send."""
        for rail in self._all:
            rail.wake()

    def moved(self) -> None:
        """Bytes have come or gone."""
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
        """A batch is about to go; if what waits is much, the plan looks at once whether to open rails."""
        if self._enough is not None and self._much < math.inf and self._link.mux.waiting_bytes >= self._much:
            self._enough.set()

    def changed(self) -> None:
        """A rail came, or is on its way out."""
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
        """True when the peer takes nothing on one of them."""
        return any(rail.send_began is not None and now - rail.send_began > stall_s for rail in self._all)

    def add(self, secured: UpgradedLink, early: list[bytes | memoryview]) -> Rail:
        """A connection that stands, to be run; Unreachable when there are enough."""
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
        """Open rails in `nursery`, and close them, as the plan says."""
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
                _log.debug("%s gets %d connections more: %s", link, wanted - len(self._all), why)
                if not await self._open(wanted - len(self._all), nursery):
                    plan.failed(trio.current_time())
            elif not wanted:
                for rail in list(self._all):
                    rail.leave()
            await trio.sleep(plan.pause_s(rtt_s))

    def _ask_rtt(self, now: float) -> None:
        """Tell the muxer the round trip of what comes in, by most rails: one that rests says how it was before.

        Not if it is much shorter than that of the link: a proxy between ends the connections that the system knows.
        """
        self._ask_at = now + _ASK_S
        times = [info.receive_rtt_s for info in counted(self.raws()).values()]
        least_s = self._link.mux.rtt_min_s
        if times and least_s is not None and (middle := statistics.median_low(times)) > least_s / 2:
            self._link.mux.pings.told(now, middle)

    def _even(self, now: float) -> None:
        """Let no rail send much faster than its share of what the path carries; not where the system counts nothing."""
        infos = self._link.tcp_infos().values()
        rtt_s = self._distance_s(infos)
        self._even_at = now + self._evenness.pause_s(rtt_s)
        if rtt_s is not None and infos:
            rate = self._evenness.look(now, rtt_s, sum(info.bytes_acked for info in infos), len(self._all))
            for rail in self._all:
                rail.pace(rate)

    def _distance_s(self, infos: Iterable[TcpInfo]) -> float | None:
        """The round trip of the idle path: queues are no distance, and neither is a busy machine, here or there.

        Which is why the system, whose own answers wait for nobody, is asked as well.
        """
        own = self._link.mux.rtt_min_s
        told = [info.min_rtt_s for info in infos if info.min_rtt_s > 0]
        return min(own, *told) if own is not None and told else own

    async def _open(self, count: int, nursery: trio.Nursery) -> bool:
        """Dial so many at once; whether all stand."""
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
            _log.debug("no further connection for %s: %s", link, error)


def _check_room(links: Iterable[RailOwner], peer: PeerId, remote: Multiaddr) -> None:
    place, used, own = user_at(peer.text, remote).place, 0, 0
    for link in links:
        if count := len(link.rails):
            used += count
            own += count if link.peer == peer or link.user.place == place else 0
    if own >= RAILS - used:
        raise Unreachable("this host has too many connections, or too many from there", peer)


async def secure_rail(raw: RawLink, secrets: Secrets, link: RailOwner, links: Iterable[RailOwner]) -> UpgradedLink:
    """Authenticate a raw link that is to be a rail of `link`; RemoteError says why not, and `raw` is closed."""
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
    """Give a further connection that a peer opened to the link that it names; RemoteError says why not."""
    binding, early = await _receive_binding(secured)
    peer = secured.session.peer
    _check_room(links, peer, secured.raw.remote)
    link = next((link for link in links if link.peer == peer and link.rails.is_of(binding)), None)
    if link is None:
        raise Unreachable("a further connection for no link of its peer", peer)
    link.attach(secured, early)


async def _receive_binding(secured: UpgradedLink) -> tuple[bytes, list[bytes | memoryview]]:
    """The link that a rail's first frame says it belongs to; and the plaintexts behind that frame."""
    early = list(secured.early)
    try:
        while not early:
            data = await secured.raw.receive_some(_READ_BYTES)
            if not data:
                raise Unreachable("the connection ended before it named its link", secured.session.peer)
            early = secured.session.opener.feed(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unreachable(f"the connection broke before it named its link: {error}", secured.session.peer) from error
    binding = bytes(early.pop(0))
    if len(binding) != BINDING_BYTES:
        raise ProtocolViolation(f"a connection names its link with {len(binding)} bytes", secured.session.peer)
    return binding, early
