"""A Link: one authenticated connection, its three tasks, and the Streams on it.

One task reads (socket -> Noise -> yamux -> inboxes), one writes (yamux -> Noise -> socket, everything that is ready in
one send), one keeps time. No task or lock per frame: a stream that waits is woken by an event. The protocol is
`machine.mux.session`'s; what the link's ending means is the Host's.
Invariants: the socket is written by the writer alone, so that a cancelled caller never cuts a frame in two; every
stream learns of the link's end; `run` returns only after the raw link is closed. A fault of ours in what runs here for
one stream (a taker, a handler's start) resets that stream; any other ends the link, and nothing else (see `faults`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.errors import ProtocolViolation, Unreachable
from peerd.core.ids import PeerId
from peerd.machine.budget.book import Book, Means, user_at
from peerd.machine.connectivity.path_selection import PathKind
from peerd.machine.mux.frames import GONE_NORMAL, GONE_PROTOCOL, Changed, Dead, Event, GoneAway, Opened
from peerd.machine.mux.session import YamuxSession
from peerd.machine.mux.silence import Silence
from peerd.machine.mux.stream import WindowBudget, YamuxStream
from peerd.machine.mux.striping import PROTOCOL as RAIL
from peerd.machine.mux.striping import StripedLane
from peerd.machine.secure.multistream import HEADER, Proposal, ProtocolSelector, hello
from peerd.net.faults import Faults
from peerd.net.link.config import LinkConfig
from peerd.net.link.rails import Rails
from peerd.net.link.sealing import Buffers, Fill, FrameSealer
from peerd.net.link.stream import Stream
from peerd.net.link.unread import Unread
from peerd.net.link.upgrade import UpgradedLink
from peerd.net.tcp_info import TcpInfo
from peerd.net.timer import Timer
from peerd.net.transport import CountedLink, LendingLink, LocatedLink, RankedLink, RawLink, counted

__all__ = ["Buffers", "Link", "LinkOwner", "Stream"]

_log = logging.getLogger("peerd.net")
_READ_BYTES = 256 * 1024
_TOGETHER_S = 0.0002  # small messages closer than this share a frame and a system call


class LinkOwner(Protocol):
    """The host, as a link uses it."""

    book: Book  # for the streams that the peer opens
    faults: Faults
    unread: Unread

    def speaks(self, protocol: str) -> bool: ...

    def accept(self, stream: Stream) -> None:
        """A stream with an agreed protocol has come."""

    def link_leaving(self, link: Link, reason: str) -> None:
        """The link is no longer to be used; called once."""

    def link_doubted(self, link: Link) -> None:
        """The peer, which has said nothing for a while, was asked on this link whether it is there."""

    async def open_rail(self, link: Link) -> UpgradedLink:
        """A further connection to where `link` leads, authenticated; raises RemoteError."""
        ...


class Link:
    """One connection to `peer`."""

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
        self.user = user_at(self.peer.text, self.remote)  # the user that the host's book knows it as
        self.local = secured.raw.local if isinstance(secured.raw, LocatedLink) else None  # this end, where it is known
        self.observed: Multiaddr | None = None  # this end as the peer sees it, once it has said so
        self.opened_at = self.idle_since = trio.current_time()
        self.bytes_in = self.bytes_out = 0
        self.paced = False  # what leaves is held back on purpose
        self.superseded_at: float | None = None  # since then new streams take a better link to this peer
        self.reason: str | None = None  # why it ended, or is about to
        self.mux = YamuxSession(
            initiator=secured.initiator,
            now=self.opened_at,
            config=config.yamux,
            budget=budget,
            pool=buffers.received,
        )
        self.mux.rtt_min_s, self.mux.ready = secured.rtt_s, RAIL in session.offers  # peerd serves streams at once
        self.streams: dict[Stream, None] = {}  # in the order of their opening
        # Rails lead where this connection does: not through routers that let in this one only, nor over third peers.
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
        self._quiet: trio.Event | None = None  # set when everything is handed to the raw link
        self._lending = secured.raw if isinstance(secured.raw, LendingLink) else None
        self._sealing = FrameSealer(session.sealer, buffers.plain, self._lending)
        self.rank(secured.raw)
        self._nursery: trio.Nursery | None = None  # of its tasks, while it runs
        self._send_began: float | None = None
        self._sent_now_at = 0.0  # when `flush_now` last did so
        self._unsent = b""  # sealed, and not yet taken by the raw link
        self._openers = trio.lowlevel.ParkingLot()
        self._look_at = 0  # received bytes at which the unread ones are counted next
        self._violated = False  # the peer broke the protocol
        self._told = False  # the owner knows that the link is not to be used

    def __repr__(self) -> str:
        return f"<Link {'to' if self.initiator else 'from'} {self.peer.short} {self.remote}>"

    @property
    def usable(self) -> bool:
        return not self._told and not self.mux.exhausted

    @property
    def silence(self) -> Silence:
        """The peer's, on this link and its rails: how long it lasts, and whether the peer was asked."""
        return self.mux.silence

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip, once one was measured."""
        return self.mux.rtt_s

    def rank(self, raw: RawLink) -> None:
        """Tell one of its connections which peer it belongs to, where it shares a limited line with others."""
        if isinstance(raw, RankedLink):
            raw.rank_by(lambda: self.owner.book.is_member(self.user.peer))

    def tcp_infos(self) -> dict[CountedLink, TcpInfo]:
        """The system's counters of each of its connections; nothing where it keeps none, and for circuits."""
        return counted((self._raw, *self.rails.raws()))

    # --- for the host --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the connection until it ends; never raises for what the peer or the network does."""
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
        """A new stream; the proposal travels with its first data. Waits while too many are open."""
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
        """Reset what is open, say goodbye, close within `linger_s`."""
        self.reason = self.reason or reason
        with self.owner.faults.guard(f"the goodbye of {self}"):
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
        """Use a further connection that the peer opened for this link; Unreachable says why not."""
        if self._nursery is None or self.initiator or self.way not in (PathKind.LOCAL, PathKind.DIRECT):
            raise Unreachable("this link takes no further connections", self.peer)
        self._nursery.start_soon(self.rails.add(secured, early).run)

    def pace(self, bytes_per_s: float) -> None:
        """Let bytes leave evenly, at this rate at most; inf: no more. Rails find their own."""
        self.paced = bytes_per_s < float("inf") and not self.rails
        if self._lending is not None and not self.rails:
            self._lending.pace(bytes_per_s)

    async def open_rail(self) -> UpgradedLink:
        """A further connection to where this one leads, authenticated; raises RemoteError."""
        return await self.owner.open_rail(self)

    def left_to_small(self, alone: bool) -> None:
        """Tell the first connection that it carries small frames only: none of them waits for its measurements then."""
        if self._lending is not None:
            self._lending.never_rest(alone)

    def abort(self, reason: str) -> None:
        """End the link now."""
        self.reason = self.reason or reason
        self._scope.cancel()

    # --- for streams ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wake the writer when there is something to send, and whoever waits to open a stream."""
        if self._work is not None and self.mux.has_output:
            self._work.set()
            self._work = None
        if self.rails and self.mux.has_bulk:
            self.rails.wake()
        if self._openers and self.mux.can_open:
            self._openers.unpark()

    def flush_now(self) -> None:
        """Like `flush`, but a small message leaves within this turn of the loop, if the writer rests.

        What follows closely is left to the writer: calls made together leave together.
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
        """An incoming stream has named a protocol that we speak."""
        self.owner.accept(stream)

    def doubt(self, *, patient: bool = False) -> float:
        """A call on this link was not answered in time: if the peer says nothing at all, it is soon taken for lost.

        Returns the seconds since it was last heard. `patient`: no call was, and only `hurry` makes it soon.
        """
        silent_s = self.mux.doubt(trio.current_time(), patient=patient)
        self._timer.rearm()
        self.flush()
        if self.silence.doubted:
            self.owner.link_doubted(self)
        return silent_s

    def hurry(self) -> None:
        """Give a doubted peer little time to be heard here: it was heard elsewhere."""
        self.silence.hurry(trio.current_time(), self.rtt_s)
        self._timer.rearm()

    def release(self, stream: Stream) -> None:
        """The user of this stream is done with it."""
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
                self.owner.book.give(Means.STREAMS, self.user)

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
        """Say so to the peer, and end: its streams at once, and nothing that still comes counts."""
        self.reason = self.reason or f"protocol violation: {error}"
        _log.warning("peer %s at %s broke the protocol: %s", self.peer, self.remote, error)
        self._violated = True
        self.mux.go_away(GONE_PROTOCOL)
        self._leaving(self.reason)
        self._end_streams()
        self.flush()
        await self._drain()
        self.abort(self.reason)

    async def broke(self, error: Exception) -> None:
        """End, but what the peer said last may still be unread: the reader has a moment to find it."""
        await trio.sleep(self._config.linger_s)
        self.abort(f"the connection broke: {error}")

    def take(self, plains: Iterable[bytes | memoryview], lane: StripedLane | None = None) -> None:
        """Use what has come, on that lane of a rail or on the first connection."""
        now = trio.current_time()
        for plain in plains:
            if self._violated:
                return
            events: list[Event] = []
            try:
                self.mux.receive(plain, now, lane, events)
            finally:  # what came before a violation has come
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
        """Bytes or an end have come: what waits for them often runs here, in the link's own task."""
        if isinstance(stream, Stream):
            try:
                stream.changed()
            except ProtocolViolation:
                raise
            except Exception as error:
                self.owner.faults.note(repr(stream), error)
                stream.reset()

    def _greet(self, mux: YamuxStream) -> None:
        """An incoming stream: our header goes out at once, as foreign peers expect."""
        if mux.was_reset or self.owner.book.take(Means.STREAMS, self.user) is not None:
            self.mux.reset(mux)  # in the same breath, so that nobody will hear of it; or there is no room for it
            return
        stream = Stream(self, mux, "", ProtocolSelector(self.owner.speaks))
        mux.owner = stream
        self.streams[stream] = None
        self.mux.write(mux, HEADER)

    def _peer_leaves(self, code: int) -> None:
        word = {GONE_NORMAL: "the peer left", GONE_PROTOCOL: "the peer says we broke the protocol"}
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
        """One batch on the first connection, or on a rail; whether there was anything to send."""
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
        """A batch of so many bytes was filled: wake the streams whose data is on its way, and other writers.

        After an empty one, too: a stream whose data has grown meanwhile was left to them. Returns `size`.
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
        """Wait, but not for long, until all that is queued is handed over."""
        with trio.move_on_after(self._config.linger_s):
            while self.mux.has_output or self._unsent or self._send_began is not None:
                self._quiet = trio.Event()
                await self._quiet.wait()

    def _tend(self) -> None:
        """Time has passed: end what takes too long."""
        now = trio.current_time()
        for event in self.mux.wake(now):
            if isinstance(event, Dead):
                self.abort(f"no answer for {event.silent_s:.0f} s")
        if now >= self._leave_at:
            self.abort("the peer left")
        if self._send_began is not None and now - self._send_began > self._config.stall_s:
            self.abort(f"the peer took nothing for {self._config.stall_s:.0f} s")
        if self.rails.stuck(now, self._config.stall_s):
            self.abort(f"the peer took nothing on a rail for {self._config.stall_s:.0f} s")
        for stream in [s for s in self.streams if s.negotiating and s.mux.inbound]:
            if now - stream.opened_at > self._config.negotiate_s:
                stream.reset()
        self.flush()

    def _leaving(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self.owner.link_leaving(self, reason)
            self._openers.unpark_all()
