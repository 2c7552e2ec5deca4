"""A Link: one authenticated connection, its three tasks, and the Streams on it.

One task reads (socket -> Noise -> yamux -> inboxes), one writes (yamux -> Noise -> socket, all ready frames in one
send), one handles timeouts. There is no task or lock per frame: a waiting stream is woken by an event. The protocol is
in `wire.yamux.session`; the Host handles the end of a link.
Invariants: only the writer writes to the socket, so that a cancelled caller never cuts a frame in two; every stream is
notified of the link's end; `run` returns only after the raw link is closed. An unexpected exception in code that runs
here for one stream (a taker, a handler's start) resets that stream; any other ends only the link (see `faults`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.errors import ProtocolViolation, Unreachable
from peerd.core.ids import PeerId
from peerd.wire.budget.book import Book, Resource, user_at
from peerd.wire.faults import Faults
from peerd.wire.link.config import LinkConfig
from peerd.wire.link.link_stream import Stream
from peerd.wire.link.rails import Rails
from peerd.wire.link.sealing import Buffers, Fill, FrameSealer
from peerd.wire.link.unread import Unread
from peerd.wire.link.upgrade import UpgradedLink
from peerd.wire.noise.multistream import HEADER, MultistreamSelector, Proposal, hello
from peerd.wire.path_selection import PathKind
from peerd.wire.tcp_info import TcpInfo
from peerd.wire.timer import Timer
from peerd.wire.transport import CountedLink, LendingLink, LocatedLink, RankedLink, RawLink, counted
from peerd.wire.yamux.frames import GONE_NORMAL, GONE_PROTOCOL, Changed, Dead, Event, GoneAway, Opened
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.silence import Silence
from peerd.wire.yamux.stream import WindowBudget, YamuxStream
from peerd.wire.yamux.striping import PROTOCOL as RAIL
from peerd.wire.yamux.striping import StripedLane

__all__ = ["Buffers", "Link", "LinkOwner", "Stream"]

_log = logging.getLogger("peerd.wire")
_READ_BYTES = 256 * 1024
_TOGETHER_S = 0.0002  # small messages within this time share a frame and a system call


class LinkOwner(Protocol):
    """The part of the host that a link uses."""

    book: Book  # for the streams that the peer opens
    faults: Faults
    unread: Unread

    def speaks(self, protocol: str) -> bool: ...

    def accept(self, stream: Stream) -> None:
        """Serve an incoming stream whose protocol has been negotiated."""

    def link_leaving(self, link: Link, reason: str) -> None:
        """Called once, when the link must no longer be used."""

    def link_doubted(self, link: Link) -> None:
        """Called when the peer has been silent for a while and was pinged on this link."""

    async def open_rail(self, link: Link) -> UpgradedLink:
        """Dial and authenticate a further connection for `link`; raises RemoteError."""
        ...


class Link:
    """One connection to `peer`, with its rails and streams."""

    def __init__(
        self,
        secured: UpgradedLink,
        owner: LinkOwner,
        config: LinkConfig,
        buffers: Buffers,
        budget: WindowBudget,
        way: PathKind = PathKind.DIRECT,
    ) -> None:
        session = secured.session
        self.way = way
        self.peer: PeerId = session.peer
        self.initiator = secured.initiator
        self.remote = secured.raw.remote
        self.user = user_at(self.peer.text, self.remote)  # its user in the host's book
        self.local = secured.raw.local if isinstance(secured.raw, LocatedLink) else None  # this end's address, if known
        self.observed: Multiaddr | None = None  # this end's address as the peer sees it, once reported
        self.opened_at = self.idle_since = trio.current_time()
        self.bytes_in = self.bytes_out = 0
        self.paced = False  # sending is rate-limited by `pace`
        self.superseded_at: float | None = None  # since then new streams use a better link to this peer
        self.reason: str | None = None  # why it ended, or is about to end
        self.mux = YamuxSession(
            initiator=secured.initiator,
            now=self.opened_at,
            config=config.yamux,
            budget=budget,
            pool=buffers.received,
        )
        self.mux.rtt_min_s, self.mux.ready = secured.rtt_s, RAIL in session.offers  # peerd serves streams at once
        self.streams: dict[Stream, None] = {}  # oldest first
        # Rails dial the same address again, which works neither through a punched NAT nor over a relay.
        self._opens_rails = secured.initiator and way in (PathKind.LOCAL, PathKind.DIRECT) and RAIL in session.offers
        self.rails = Rails(self, session.binding)
        self.mux.takes_placed = self._opens_rails or not secured.initiator
        self._raw, self._opener, self._early = secured.raw, session.opener, secured.early
        self.owner, self._config, self.buffers = owner, config, buffers
        self._scope = trio.CancelScope()
        self._leave_at = float("inf")
        self._timer = Timer(lambda: min(self.mux.wake_at(), self._leave_at), self._tend)
        self._ended = trio.Event()
        self._work: trio.Event | None = None  # the writer waits on it
        self._quiet: trio.Event | None = None  # set when everything is written to the raw link
        self._lending = secured.raw if isinstance(secured.raw, LendingLink) else None
        self._sealing = FrameSealer(session.sealer, buffers.plain, self._lending)
        self.rank(secured.raw)
        self._nursery: trio.Nursery | None = None  # of its tasks, while it runs
        self._send_began: float | None = None
        self._sent_now_at = 0.0  # time of the last `flush_now`
        self._unsent = b""  # encrypted, and not yet written to the raw link
        self._openers = trio.lowlevel.ParkingLot()
        self._look_at = 0  # value of `bytes_in` at which unread bytes are counted next
        self._violated = False  # the peer broke the protocol
        self._told = False  # `link_leaving` was called

    def __repr__(self) -> str:
        return f"<Link {'to' if self.initiator else 'from'} {self.peer.short} {self.remote}>"

    @property
    def usable(self) -> bool:
        return not self._told and not self.mux.exhausted

    @property
    def silence(self) -> Silence:
        """The peer's silence on this link and its rails: its duration, and whether the peer is suspected."""
        return self.mux.silence

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip in seconds, or None before the first measurement."""
        return self.mux.rtt_s

    def rank(self, raw: RawLink) -> None:
        """Give one of its connections priority in rate limits while the peer is a member of the run."""
        if isinstance(raw, RankedLink):
            raw.rank_by(lambda: self.owner.book.is_member(self.user.peer))

    def tcp_infos(self) -> dict[CountedLink, TcpInfo]:
        """The system's counters of each of its TCP connections; empty for circuits, and if there are none."""
        return counted((self._raw, *self.rails.raws()))

    # --- for the host --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the connection until it ends. Never raises because of the peer or the network."""
        try:
            if not await self.owner.faults.contain(self._run, lambda: repr(self)):
                self.reason = self.reason or "this side failed"
        finally:
            self._nursery = None
            self.mux.budget.close()
            try:
                self._leaving(self.reason or "this side closed the connection")
                self._end_streams()
                self._openers.unpark_all()
            finally:
                with trio.CancelScope(shield=True):
                    await self._raw.aclose()
                self._ended.set()

    async def _run(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write_loop)
                nursery.start_soon(self._timer.run)
                if self._opens_rails:
                    nursery.start_soon(self.rails.tend, nursery)
                await self._read_loop()
                nursery.cancel_scope.cancel()

    def _end_streams(self) -> None:
        for stream in list(self.streams):
            stream.end(f"the connection ended: {self.reason}")
            self._forget(stream)

    async def open(self, protocol: str) -> Stream:
        """Open a stream. Waits while too many are open. The protocol proposal is sent with the first data."""
        while not self.mux.can_open or not self.usable:
            if not self.usable:
                raise Unreachable(f"the connection ended: {self.reason}", self.peer)
            await self._openers.park()
        mux = self.mux.open(trio.current_time())
        stream = Stream(self, mux, protocol, Proposal(protocol, hello(protocol)))
        mux.owner = stream
        self.streams[stream] = None
        self.mux.write(mux, hello(protocol))
        self.flush()
        return stream

    async def close(self, reason: str) -> None:
        """Reset all streams, send a go-away, and close within `linger_s`."""
        self.reason = self.reason or reason
        with self.owner.faults.guard(f"closing {self}"):
            for stream in list(self.streams):
                stream.reset()
            self.mux.go_away()
            self.flush()
            self._leaving(reason)
        with trio.move_on_after(self._config.linger_s):
            await self._ended.wait()
        self.abort(reason)
        await self._ended.wait()

    def attach(self, secured: UpgradedLink, early: list[bytes | memoryview]) -> None:
        """Use a further connection that the peer opened for this link. Raises Unreachable if the link takes none."""
        if self._nursery is None or self.initiator or self.way not in (PathKind.LOCAL, PathKind.DIRECT):
            raise Unreachable("this link takes no further connections", self.peer)
        self._nursery.start_soon(self.rails.add(secured, early).run)

    def pace(self, bytes_per_s: float) -> None:
        """Send evenly, at this rate at most; inf: no limit. No effect while there are rails, which pace themselves."""
        self.paced = bytes_per_s < float("inf") and not self.rails
        if self._lending is not None and not self.rails:
            self._lending.pace(bytes_per_s)

    async def open_rail(self) -> UpgradedLink:
        """Dial and authenticate a further connection to the peer; raises RemoteError."""
        return await self.owner.open_rail(self)

    def left_to_small(self, alone: bool) -> None:
        """Set whether the first connection carries small frames only, which must not wait for BBR's measurements."""
        if self._lending is not None:
            self._lending.never_rest(alone)

    def abort(self, reason: str) -> None:
        """End the link at once."""
        self.reason = self.reason or reason
        self._scope.cancel()

    # --- for streams ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wake the writer and the rails if there is something to send, and the callers that wait to open a stream."""
        if self._work is not None and self.mux.has_output:
            self._work.set()
            self._work = None
        if self.rails and self.mux.has_bulk:
            self.rails.wake()
        if self._openers and self.mux.can_open:
            self._openers.unpark()

    def flush_now(self) -> None:
        """Like `flush`, but sends a small message within this turn of the event loop if the writer is idle.

        Messages that follow closely are left to the writer, so that concurrent calls share a packet.
        """
        now = trio.current_time()
        raw = self._lending
        if raw is None or self._work is None or now - self._sent_now_at < _TOGETHER_S:
            self.flush()
            return
        self._sent_now_at = now
        pool = self.buffers.batches(self._sealing.alone)
        buffer = pool.take()
        with memoryview(buffer) as batch:
            size = self.filled(self._sealing.batch(batch, self.mux.fill, self.mux))
            sent = raw.send_nowait(batch[:size])
            self.bytes_out += sent
            self._unsent = bytes(batch[sent:size])
        pool.give(buffer)
        if self._unsent:
            self._work.set()
            self._work = None
        else:
            self.flush()

    def consumed(self, mux: YamuxStream) -> None:
        self.mux.consumed(mux, trio.current_time())
        self.flush()

    def agreed(self, stream: Stream) -> None:
        """Called when an incoming stream has negotiated a protocol."""
        self.owner.accept(stream)

    def doubt(self, *, patient: bool = False) -> float:
        """Suspect the peer, because a call was not answered in time: it is pinged, and its deadline is shortened.

        Returns the seconds since its last bytes. `patient`: no call is overdue, so only `hurry` shortens the deadline.
        """
        silent_s = self.mux.doubt(trio.current_time(), patient=patient)
        self._timer.rearm()
        self.flush()
        if self.silence.doubted:
            self.owner.link_doubted(self)
        return silent_s

    def hurry(self) -> None:
        """Shorten a suspected peer's deadline on this link, because it has answered on another link."""
        self.silence.hurry(trio.current_time(), self.rtt_s)
        self._timer.rearm()

    def release(self, stream: Stream) -> None:
        """Remove a stream that its user has closed or reset."""
        self._forget(stream)
        if not self.streams:
            self.idle_since = trio.current_time()
            if self.mux.peer_gone:
                self._leave_at = min(self._leave_at, trio.current_time())
                self.abort("the peer left")
        self.flush()

    def _forget(self, stream: Stream) -> None:
        if stream in self.streams:
            del self.streams[stream]
            if stream.mux.inbound:
                self.owner.book.give(Resource.STREAMS, self.user)

    # --- tasks ---------------------------------------------------------------------------------------------

    async def _read_loop(self) -> None:
        raw, opener = self._raw, self._opener
        opener.pool = self.buffers.received
        lending = self._lending
        try:
            self.take(self._early)
            while not (self.mux.peer_gone and not self.streams):
                if lending is not None:
                    data: bytes | memoryview = await lending.receive_view(opener.missing_bytes)
                else:
                    data = await raw.receive_some(_READ_BYTES)
                if not data:
                    self.reason = self.reason or "the peer closed the connection"
                    return
                self.bytes_in += len(data)
                self.take(opener.each(data, self.mux.place, self.mux.row))
                self.rails.moved()
            await self._drain()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.reason = self.reason or f"the connection broke: {error}"
        except ProtocolViolation as error:
            await self.violated(error)

    async def violated(self, error: ProtocolViolation) -> None:
        """Handle a protocol violation: notify the peer, end the streams at once, ignore further data, end the link."""
        self.reason = self.reason or f"protocol violation: {error}"
        _log.warning("peer %s at %s violated the protocol: %s", self.peer, self.remote, error)
        self._violated = True
        self.mux.go_away(GONE_PROTOCOL)
        self._leaving(self.reason)
        self._end_streams()
        self.flush()
        await self._drain()
        self.abort(self.reason)

    async def broke(self, error: Exception) -> None:
        """End the link after a failed send, with a delay in which the reader can receive the peer's last data."""
        await trio.sleep(self._config.linger_s)
        self.abort(f"the connection broke: {error}")

    def take(self, plains: Iterable[bytes | memoryview], lane: StripedLane | None = None) -> None:
        """Process received plaintext, from `lane` of a rail or from the first connection."""
        now = trio.current_time()
        for plain in plains:
            if self._violated:
                return
            events: list[Event] = []
            try:
                self.mux.receive(plain, now, lane, events)
            finally:  # data before a violation is still delivered
                self._act(events)
            if isinstance(plain, memoryview) and not self.mux.pinned:
                self.buffers.received.give(plain.obj)
        if self.bytes_in >= self._look_at:
            self._look_at = self.bytes_in + self.owner.unread.look(self)
        self.flush()

    def _act(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Changed):
                self._tell(event.stream.owner)
            elif isinstance(event, Opened):
                self._greet(event.stream)
            elif isinstance(event, GoneAway):
                self._peer_leaves(event.code)

    def _tell(self, stream: object) -> None:
        """Notify a stream of new bytes or its end. Its taker often runs here, in the link's own task."""
        if isinstance(stream, Stream):
            try:
                stream.changed()
            except ProtocolViolation:
                raise
            except Exception as error:
                self.owner.faults.note(repr(stream), error)
                stream.reset()

    def _greet(self, mux: YamuxStream) -> None:
        """Accept an incoming stream: send our multistream header at once, as other libp2p implementations expect."""
        if mux.was_reset or self.owner.book.take(Resource.STREAMS, self.user) is not None:
            self.mux.reset(mux)  # already reset by the peer, so no handler will do it; or above the peer's limit
            return
        stream = Stream(self, mux, "", MultistreamSelector(self.owner.speaks))
        mux.owner = stream
        self.streams[stream] = None
        self.mux.write(mux, HEADER)

    def _peer_leaves(self, code: int) -> None:
        word = {GONE_NORMAL: "the peer left", GONE_PROTOCOL: "the peer reports a protocol violation"}
        self.reason = self.reason or word.get(code, f"the peer left with code {code}")
        self._leave_at = trio.current_time() + self._config.leave_s
        self._leaving(self.reason)

    async def _write_loop(self) -> None:
        mux = self.mux
        try:
            while True:
                if not mux.has_output:
                    await self._wait_for_work()
                if self._unsent:
                    data, self._unsent = self._unsent, b""
                    await self._send(data)
                while await self.send_batch(self._sealing, mux.fill, self._send):
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.reason = self.reason or f"the connection broke: {error}"
            await self.broke(error)

    async def send_batch(self, sealing: FrameSealer, fill: Fill, send: Callable[[memoryview], Awaitable[None]]) -> bool:
        """Send one batch on the first connection or a rail; returns whether there was anything to send."""
        pool = self.buffers.batches(sealing.alone)
        buffer = pool.take()
        batch = memoryview(buffer)
        if size := self.filled(sealing.batch(batch, fill, self.mux)):
            await send(batch[:size])
        pool.give(buffer)
        return size > 0

    async def _send(self, data: bytes | memoryview) -> None:
        self._send_began = trio.current_time()
        await self._raw.send_all(data)
        self._send_began = None
        self.bytes_out += len(data)
        self.rails.moved()

    async def _wait_for_work(self) -> None:
        if self._quiet is not None:
            self._quiet.set()
        self._work = trio.Event()
        await self._work.wait()

    def filled(self, size: int) -> int:
        """Wake streams and other writers after a batch of `size` bytes was filled; returns `size`.

        An empty batch wakes them too, since it may have left a stream with new data to the other writers.
        """
        mux = self.mux
        if mux.drained:
            for drained in mux.drained:
                if isinstance(drained.owner, Stream):
                    drained.owner.wake_writer()
            mux.drained.clear()
        self.rails.filled()
        if self.rails:
            self.flush()
        return size

    async def _drain(self) -> None:
        """Wait until all queued data is written, for at most `linger_s`."""
        with trio.move_on_after(self._config.linger_s):
            while self.mux.has_output or self._unsent or self._send_began is not None:
                self._quiet = trio.Event()
                await self._quiet.wait()

    def _tend(self) -> None:
        """Handle timeouts of the peer, of sends and of negotiations."""
        now = trio.current_time()
        for event in self.mux.wake(now):
            if isinstance(event, Dead):
                self.abort(f"no answer for {event.silent_s:.0f} s")
        if now >= self._leave_at:
            self.abort("the peer left")
        if self._send_began is not None and now - self._send_began > self._config.stall_s:
            self.abort(f"the peer accepted no data for {self._config.stall_s:.0f} s")
        if self.rails.stuck(now, self._config.stall_s):
            self.abort(f"the peer accepted no data on a rail for {self._config.stall_s:.0f} s")
        for stream in [s for s in self.streams if s.negotiating and s.mux.inbound]:
            if now - stream.opened_at > self._config.negotiate_s:
                stream.reset()
        self.flush()

    def _leaving(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self.owner.link_leaving(self, reason)
            self._openers.unpark_all()
