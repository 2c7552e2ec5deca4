"""Replaces relayed links of a host by direct ones: DCUtR hole punching.

    puncher = HolePuncher(host, clock)
    await nursery.start(puncher.run)
    puncher.status()                  # what was tried with which peer, and the result

The peer that was dialed over the relay acts: it dials the other's public addresses, then both dial each other at the
same time, so that each router takes the other side's packets for answers (`reach/hole_punch` decides
which side dials, which addresses, and when). The resulting connection joins the host like any other; the relayed one
then drains. Invariants: one attempt per peer at a time and few in total; each wait has a deadline; nothing is dialed
that `reach/hole_punch` does not admit. A hostile peer may claim others' addresses, never answer, or fail
forever: that only lengthens the pauses for itself. Source: libp2p specs `relay/DCUtR.md`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio
from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import is_relayed, reach, tcp_place
from peerd.core.clock import Clock
from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.reach import hole_punch
from peerd.reach.messages.holepunch_message import DCUTR, HolePunch, PunchKind
from peerd.wire.host.host import Host
from peerd.wire.host.identify import PeerInfo
from peerd.wire.link.delimited import next_message, send_message
from peerd.wire.link.link import Link
from peerd.wire.link.link_stream import Stream
from peerd.wire.path_selection import PathKind
from peerd.wire.transport import RawLink

_log = logging.getLogger("peerd.reach")
_INTRODUCTION_S = 5.0  # for the other side's identify
_ANSWER_S = 10.0  # for a message of the other side
_HANDSHAKE_S = 3.0  # for a handshake: both sides may be waiting, or it is another host
_LOOK_S = 10.0  # between two checks whether addresses have changed


class HolePuncher:
    """Serves and proposes hole punching for one host."""

    def __init__(self, host: Host, clock: Clock) -> None:
        self._host = host
        self._rng = clock.rng("punching")
        self._memory = hole_punch.PunchMemory(clock.rng("punching pauses"))
        self._nursery: trio.Nursery | None = None
        self._meeting: dict[PeerId, str] = {}  # peers whose links are being upgraded -> current state
        self._served: dict[PeerId, trio.CancelScope] = {}
        self._room = trio.CapacityLimiter(limits.PUNCH_MEETINGS)
        self._moved = trio.lowlevel.ParkingLot()
        host.when_moved(self._look)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Upgrade relayed links until cancelled."""
        self._host.handle(DCUTR, self._serve)
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                for peer in self._host.connected():
                    self._look(peer)
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._host.unhandle(DCUTR)

    def status(self) -> dict[str, Any]:
        """By peer, as plain data: the current state, or why it failed and how often."""
        failed = {str(peer): f"{pair.reason} ({pair.failures} times)" for peer, pair in self._memory.pairs.items()}
        return failed | {str(peer): what for peer, what in self._meeting.items()}

    # --- acting side -----------------------------------------------------------------------------------

    def _look(self, peer: PeerId) -> None:
        """Handle a change of the best link to this peer, which may be relayed now, or direct again."""
        self._moved.unpark_all()
        if self._nursery is not None and peer not in self._meeting and self._to_upgrade(peer) is not None:
            self._meeting[peer] = "waiting for its identify message"
            self._nursery.start_soon(self._see_to, peer)

    def _to_upgrade(self, peer: PeerId) -> Link | None:
        """The relayed link to this peer, if it is our task to upgrade it."""
        link = self._host.links.best(peer)
        return link if link is not None and link.way == PathKind.RELAYED and not link.initiator else None

    async def _see_to(self, peer: PeerId) -> None:
        """Upgrade one peer's link. Retries after growing pauses, until a direct link exists or the relayed one ends."""
        try:
            while (link := self._to_upgrade(peer)) is not None:
                info = await self._host.introduction(peer, _INTRODUCTION_S)
                said = _said(info)
                now = trio.current_time()
                go, why = self._memory.look(self._place(), peer, said, now)
                self._meeting[peer] = why
                if go:
                    await self._meet(link, info, said)
                else:
                    with trio.move_on_at(min(self._memory.due_s(peer), now + _LOOK_S)):
                        await self._until_direct(peer)
        finally:
            del self._meeting[peer]

    async def _meet(self, link: Link, info: PeerInfo | None, said: frozenset[Hashable]) -> None:
        peer, reason, answered = link.peer, "", True
        async with self._room:
            with self._expected(peer):
                try:
                    await self._reverse(peer, () if info is None else info.addrs)
                    if self._host.links.direct(peer) is None:
                        reason = await self._propose(link, "" if info is None else info.agent)
                except trio.TooSlowError:
                    reason, answered = f"no answer within {_ANSWER_S:g} s", False
                except RemoteError as error:
                    reason, answered = error.args[0], False
        best = self._host.links.direct(peer)
        if best is not None:
            self._memory.succeeded(peer)
            _log.info("connected to %s without the relay: %s, at %s", peer, best.way.word, best.remote)
        else:
            self._memory.failed(peer, said, reason, trio.current_time(), answered=answered)
            _log.info("no direct connection to %s, the relay stays in use: %s", peer, reason)

    async def _reverse(self, peer: PeerId, theirs: Sequence[Multiaddr]) -> None:
        """Dial the peer's own addresses: maybe it needed the relay only because it cannot dial us."""
        self._meeting[peer] = "dialing its addresses"
        addrs = self._memory.admit(peer, hole_punch.to_dial(theirs, self._host.listen_addrs()), trio.current_time())

        async def dial(addr: Multiaddr) -> None:
            try:
                await self._host.dial_at(addr, peer)
            except Unreachable as error:
                _log.debug("cannot connect to %s at %s: %s", peer, addr, error)
            left.discard(addr)
            if not left or self._host.links.direct(peer) is not None:
                nursery.cancel_scope.cancel()

        left = set(addrs)
        link = self._host.links.best(peer)
        with trio.move_on_after(hole_punch.reverse_s(None if link is None else link.rtt_s)):
            async with trio.open_nursery() as nursery:
                for addr in addrs:
                    nursery.start_soon(dial, addr)

    async def _propose(self, link: Link, agent: str) -> str:
        """Do the simultaneous open. Returns why it failed, or "" if it succeeded."""
        peer, reason = link.peer, ""
        first = hole_punch.speaks_first(agent, proposed=True)
        stream = await link.open(DCUTR)
        try:
            for attempt in range(1, limits.PUNCH_ATTEMPTS + 1):
                self._meeting[peer] = f"attempt {attempt}"
                try:
                    answer, rtt_s = await self._agree(stream)
                except Unreachable:
                    if attempt == 1 or not link.usable:
                        raise
                    stream = await link.open(DCUTR)  # js-libp2p expects a new stream for each attempt
                    answer, rtt_s = await self._agree(stream)
                addrs = self._targets(peer, answer)
                if not addrs:
                    reason = "it names no address that can be dialed"
                await trio.sleep(rtt_s / 2)
                if await self._open(peer, addrs, rtt_s, first):
                    return ""
        finally:
            if self._host.links.direct(peer) is None:
                stream.reset()
            else:
                await stream.aclose()
        return reason or f"no connection in {limits.PUNCH_ATTEMPTS} attempts"

    async def _agree(self, stream: Stream) -> tuple[HolePunch, float]:
        """Exchange addresses and send SYNC. Returns the answer and the round trip in seconds."""
        with trio.fail_after(_ANSWER_S):
            began = trio.current_time()
            await self._say(stream, PunchKind.CONNECT)
            answer = await self._hear(stream, PunchKind.CONNECT)
            rtt_s = trio.current_time() - began
            await self._say(stream, PunchKind.SYNC)
        return answer, rtt_s

    # --- answering side ---------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        peer = stream.peer
        if stream.link.way != PathKind.RELAYED:
            raise ProtocolViolation("a hole punching request on a link without a relay", peer)
        if peer in self._served:
            self._served.pop(peer).cancel()  # js-libp2p opens a new stream for each attempt
        if len(self._served) >= limits.PUNCH_MEETINGS:
            stream.reset()
            return
        failure: Exception | None = None
        with trio.CancelScope() as scope:
            self._served[peer] = scope
            try:
                with self._expected(peer):
                    async with trio.open_nursery() as nursery:
                        try:
                            await self._follow(stream, nursery)
                        except (trio.TooSlowError, RemoteError) as error:
                            failure = error  # dials in progress may still succeed
            finally:
                if self._served.get(peer) is scope:
                    del self._served[peer]
        if isinstance(failure, RemoteError):
            raise failure
        if failure is not None or scope.cancelled_caught:
            stream.reset()

    async def _follow(self, stream: Stream, nursery: trio.Nursery) -> None:
        """Answer each CONNECT and dial at each SYNC, until the other side ends the stream."""
        opening = trio.CancelScope()

        async def open_now(answer: HolePunch, rtt_s: float, scope: trio.CancelScope) -> None:
            info = self._host.info(stream.peer)
            first = hole_punch.speaks_first("" if info is None else info.agent, proposed=False)
            with scope:
                await self._open(stream.peer, self._targets(stream.peer, answer), rtt_s, first)

        for _ in range(limits.PUNCH_ATTEMPTS):
            with trio.fail_after(limits.PUNCH_ATTEMPT_S + _ANSWER_S):
                try:
                    answer = await self._hear(stream, PunchKind.CONNECT)
                except Unreachable:
                    return  # the other side has a connection, or gives up
            opening.cancel()
            opening = trio.CancelScope()
            with trio.fail_after(_ANSWER_S):
                began = trio.current_time()
                await self._say(stream, PunchKind.CONNECT)
                await self._hear(stream, PunchKind.SYNC)
            nursery.start_soon(open_now, answer, trio.current_time() - began, opening)

    # --- both sides ---------------------------------------------------------------------------------------------

    def _offer(self) -> list[Multiaddr]:
        """Addresses at which we can probably be dialed, without /p2p."""
        return hole_punch.to_offer(self._host.whereabouts.candidates, self._seen(), self._host.listen_addrs())

    def _place(self) -> list[Multiaddr]:
        return hole_punch.place(self._host.whereabouts.candidates, self._seen(), self._host.listen_addrs())

    def _seen(self) -> list[Multiaddr]:
        """Addresses of our listening port as peers report them."""
        host = self._host
        ports = {_port(addr) for addr in host.listen_addrs()}
        seen = []
        for peer in host.connected():
            link = host.links.direct(peer)
            if link is None or link.observed is None:
                continue
            if not link.initiator or link.local is None or _port(link.local) in ports:
                seen.append(link.observed)  # otherwise they saw another port of ours
        return seen

    def _targets(self, peer: PeerId, message: HolePunch) -> list[Multiaddr]:
        found = hole_punch.to_dial(message.addrs, self._host.listen_addrs())
        return self._memory.admit(peer, found, trio.current_time())

    async def _open(self, peer: PeerId, addrs: Sequence[Multiaddr], rtt_s: float, first: bool) -> bool:
        """Dial all `addrs` repeatedly for some seconds. True if there is a direct link then, however it was made."""
        with trio.move_on_after(limits.PUNCH_ATTEMPT_S):
            async with trio.open_nursery() as nursery:
                for addr in addrs:
                    nursery.start_soon(self._open_at, addr, peer, rtt_s, first)
                await self._until_direct(peer)
                nursery.cancel_scope.cancel()
        return self._host.links.direct(peer) is not None

    async def _open_at(self, addr: Multiaddr, peer: PeerId, rtt_s: float, first: bool) -> None:
        refused = 0
        while True:
            raw: RawLink | None = None
            with trio.move_on_after(hole_punch.silence_s(rtt_s)) as patience:
                try:
                    raw = await self._host.raw_link(addr)
                except Unreachable:
                    refused += 1
            if raw is not None:
                way = PathKind.PUNCHED if reach(addr) == 2 else PathKind.LOCAL
                try:
                    with trio.move_on_after(_HANDSHAKE_S):
                        await self._host.join(raw, way, initiator=first, expected=peer)
                        return
                except RemoteError as error:
                    _log.debug("a punched connection to %s at %s failed: %s", peer, addr, error)
                refused += 1
            if not patience.cancelled_caught:
                await trio.sleep(hole_punch.refused_pause_s(refused, self._rng))

    async def _until_direct(self, peer: PeerId) -> None:
        while self._host.links.direct(peer) is None:
            await self._moved.park()

    @contextmanager
    def _expected(self, peer: PeerId) -> Iterator[None]:
        """Mark connections from `peer` as punched meanwhile: they pass our router because we dial, too."""
        ours = peer not in self._host.punching
        self._host.punching.add(peer)
        try:
            yield
        finally:
            if ours:
                self._host.punching.discard(peer)

    async def _say(self, stream: Stream, kind: PunchKind) -> None:
        addrs = tuple(addr.to_bytes() for addr in self._offer()) if kind == PunchKind.CONNECT else ()
        await send_message(stream, HolePunch(kind, addrs).encode())

    async def _hear(self, stream: Stream, kind: PunchKind) -> HolePunch:
        """The next message, which must be of this kind. Raises Unreachable at the end of the stream."""
        raw = await next_message(stream, limits.PUNCH_MESSAGE_BYTES)
        if raw is None:
            raise Unreachable("the other side has ended the hole punching", stream.peer)
        message = HolePunch.decode(raw)
        if message.kind != kind:
            raise ProtocolViolation(f"{message.kind.name} arrived instead of {kind.name}", stream.peer)
        return message


def _said(info: PeerInfo | None) -> frozenset[Hashable]:
    """The peer's claims (DCUtR support, addresses). If one changes, a peer that failed is tried again early."""
    if info is None:
        return frozenset()
    return frozenset([DCUTR in info.protocols, *(addr for addr in info.addrs if not is_relayed(addr))])


def _port(addr: Multiaddr | None) -> int | None:
    place = None if addr is None else tcp_place(addr)
    return None if place is None else place.port
