"""Requests of the DHT to other peers (connect, call, translate, verify), and comparison of their clocks with ours.

A request fails in one of three ways: no answer (RemoteError), an answer against the protocol (ProtocolViolation), or
cancellation (Cancelled). Signatures are verified here before the machine needs them, a few per turn of the event loop,
so that a large answer does not block it. The machine judges records that do not pass.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
from multiaddr import Multiaddr

from peerd.core.addr import reach
from peerd.core.clock import AdjustableClock, Clock
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER
from peerd.core.record import Record, Verifier
from peerd.dht import codec as wire
from peerd.dht.clock_skew import ClockSkew
from peerd.dht.node import messages as q
from peerd.dht.node.routing_table import Contact
from peerd.messages.token import age
from peerd.rpc.rpc import Rpc
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import StreamOwner
from peerd.wire.path_selection import PathKind

_VERIFIED_PER_TURN = 4  # signatures, about 0.1 ms each
_ENOUGH_NETWORKS = 8  # with known clocks: after that no peer is asked only for its clock
_HEARD_ROUND_TRIP_S = 60.0  # longest of a sample for the user's warning; its error is half of that
_CLOCK_STEP_S = 0.1  # a smaller correction is not worth a jump of the clock


class PeerClock:
    """Compares our uncorrected clock with our peers' clocks, and corrects ours."""

    def __init__(self, clock: Clock, may_vote: Callable[[PeerId], bool]) -> None:
        """`may_vote`: True for peers whose clocks may correct ours."""
        self.skew = ClockSkew()
        # Of all peers, also those without a vote and over slow lines: evidence for the user, never a correction.
        self._heard = ClockSkew(_HEARD_ROUND_TRIP_S)
        self._clock, self._may_vote = clock, may_vote
        self._adjustable = clock if isinstance(clock, AdjustableClock) else None

    def raw_wall(self) -> float:
        """Unix seconds without the correction by peers, as peers compare them."""
        return self._clock.wall() - (self._adjustable.offset_s if self._adjustable is not None else 0.0)

    def wants(self, peer: PeerId, at: Multiaddr) -> bool:
        """True if a peer, connected at that address, should be asked for its time."""
        if self.uncorrected_s():  # until our clock is set, or more clocks show which one is right
            return True
        return self.skew.networks < _ENOUGH_NETWORKS and self._may_vote(peer) and not self.skew.knows(peer, at)

    @property
    def compared(self) -> int:
        """Number of peers whose clocks are known, with or without a vote."""
        return max(self.skew.votes, self._heard.votes)

    def uncorrected_s(self) -> float:
        """Seconds by which peers' clocks are ahead of ours after the correction; 0 within the tolerance of records.

        Peers with a vote decide; if none is known, all others do.
        """
        return self.skew.uncorrected_s() if self.skew.votes else self._heard.uncorrected_s()

    def waits_for(self) -> str | None:
        """What is wrong with this machine's clock, and what to do. None if peers can read each other's records."""
        off = self.uncorrected_s()
        if not off:
            return None
        count = self.skew.votes or self._heard.votes
        theirs = "that of the only peer that was compared" if count == 1 else f"those of {count} peers"
        way = "behind" if off > 0 else "ahead of"
        told = f"this machine's clock is {age(abs(off))} {way} {theirs}: set it, for example by NTP"
        return told if count > 1 else f"{told}; or give a second bootstrap address, which shows whose clock is wrong"

    def compare(self, peer: PeerId, at: Multiaddr, sent: float, theirs: float) -> None:
        """Record that the peer's clock, at that address, showed `theirs` between `sent` and now."""
        if not math.isfinite(theirs):
            return
        self._heard.sample(peer, at, sent, self.raw_wall(), theirs)
        if not self._may_vote(peer):
            return
        self.skew.sample(peer, at, sent, self.raw_wall(), theirs)
        correction_s = self.skew.correction_s()
        if self._adjustable is not None and abs(correction_s - self._adjustable.offset_s) > _CLOCK_STEP_S:
            self._adjustable.offset_s = correction_s


def _dialed(link: StreamOwner) -> bytes | None:
    """The address at which we dialed the peer without a relay.

    None if the link was made otherwise, or leads to this machine itself, which others cannot dial.
    """
    direct = link.initiator and link.way in (PathKind.LOCAL, PathKind.DIRECT)
    return link.remote.to_bytes() if direct and reach(link.remote) > 0 else None


class DhtRequests:
    """Sends requests to peers over `rpc`, at most `at_once` at a time."""

    def __init__(self, host: Host, rpc: Rpc, clock: PeerClock, verifier: Verifier, at_once: int) -> None:
        self._host, self._rpc = host, rpc
        self._clock = clock
        self._verifier = verifier
        self._places = trio.CapacityLimiter(at_once)

    async def ask(self, contact: Contact, request: q.Request, timeout_s: float) -> q.Reply:
        """Send one request. Raises RemoteError or ProtocolViolation. The caller limits the total time."""
        peer = contact.peer
        async with self._place():
            # Connect first, so that `sent` and the answer are one round trip apart, for comparing clocks.
            if self._host.links.best(peer) is None:
                await self._host.connect(peer, wire.addrs_from_wire(contact.addrs), checked=True)
            await trio.lowlevel.checkpoint_if_cancelled()  # at a shutdown the calls may have ended before this task
            sent = self._clock.raw_wall()
            method, body, kind = wire.request_to_wire(request, sent)
            answer = (await self._rpc.call(peer, method, body, kind, timeout_s=timeout_s)).body
        link = self._host.links.best(peer)
        if answer.hello is not None and link is not None:
            self._clock.compare(peer, link.remote, sent, answer.hello.wall)
        reply = wire.reply_from_wire(answer, len(request.keys) if isinstance(request, q.Find) else 0)
        may = self._host.hearing(peer)
        if reply.hello is not None:
            addrs = tuple(filter(may, reply.hello.addrs))
            if reply.hello.addrs and link is not None and (dialed := _dialed(link)) is not None:
                # A peer behind a published port may know only its inner addresses; this one works.
                addrs = (dialed, *(addr for addr in addrs if addr != dialed))[:ADDRS_PER_PEER]
            reply = replace(reply, hello=q.Hello(addrs))
        if isinstance(reply, q.Found):
            # `may` filters only new addresses; ours were filtered when we got them.
            named = ((contact, tuple(filter(may, contact.addrs))) for contact in reply.contacts)
            contacts = tuple(k if k.addrs == addrs else Contact(k.peer, addrs) for k, addrs in named if addrs)
            reply = replace(reply, contacts=contacts)
            await self.verify(record for records in reply.records for record in records)
        return reply

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Limits concurrent calls: waits for a free slot. Does not yield to the scheduler if one is free."""
        try:
            self._places.acquire_nowait()
        except trio.WouldBlock:
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    async def verify(self, records: Iterable[Record]) -> None:
        """Verify the records' signatures before the machine needs the results. Stops at the first forged one."""
        fresh = 0
        for record in records:
            if self._verifier.knows(record):
                continue
            if not self._verifier.genuine(record):
                return
            fresh += 1
            if fresh % _VERIFIED_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
