"""AutoNAT, client and server, and what the host does with the verdict on its reachability.

Passes what peers report about this host's addresses to `reach/reachability`, and asks the peers that it
chooses to dial back. Then the host announces proven addresses, withholds dead ones, and uses candidates for hole
punching. As a server it dials peers back if `reach/dial_back` allows it, and if it is not known to be
unreachable itself. Makes no other decisions. Hostile input: bounded by the two machines; a peer that sends nothing, or
an endless message, costs one stream for some seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from peerd.core.addr import decode_addr, ip_of, split_peer, tcp_place
from peerd.core.clock import Clock
from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import AUTONAT_BYTES
from peerd.reach.dial_back import Asker, DialBackRefusal, DialBacks
from peerd.reach.messages.autonat_message import AUTONAT, DialRequest, DialResponse, DialStatus
from peerd.reach.reachability import (
    AskDialBack,
    Kind,
    ObservedAddr,
    Reachability,
    ReachabilityConfig,
    ReachabilityVerdict,
)
from peerd.wire.host.addresses import CONFIGURED
from peerd.wire.host.host import Host, PeerDown, PeerIdentified
from peerd.wire.host.link_table import PeerEvent
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.link.link_stream import Stream, StreamOwner
from peerd.wire.path_selection import PathKind
from peerd.wire.timer import Timer

_log = logging.getLogger("peerd.reach")
PROVEN = "proven"  # source of announced addresses at which a dial-back succeeded
MAPPED = "mapped"  # source under which port mapping announces addresses of a router


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoNatConfig:
    """Settings of the reachability test. Times in seconds."""

    verdict: ReachabilityConfig = field(default_factory=ReachabilityConfig)
    probe_s: float = 3.0  # one dial-back with its handshake; a lost packet is sent again after one second
    serve_s: float = 10.0  # one request, until our answer
    ask_s: float = 20.0  # until a peer's answer: others may allow more time for their dials
    shut_s: float = 10.0  # without any inbound path before this peer counts as dial-only


class AutoNat:
    """Finds out whether others can reach this host. Idle until `run`."""

    def __init__(self, host: Host, clock: Clock, config: AutoNatConfig | None = None) -> None:
        self._host, self._clock = host, clock
        self._config = config or AutoNatConfig()
        self._machine = Reachability(clock.rng("reach"), self._config.verdict)
        self._dial_backs = DialBacks()
        self._dialed_back = {"through": 0, "in_vain": 0, "refused": 0}
        self._nursery: trio.Nursery | None = None
        self._timer = Timer(self._wake_at, self.look)
        self._heard: list[Callable[[ReachabilityVerdict], None]] = []
        self._relays: Callable[[], int] = lambda: 0
        self._shut_at = math.inf
        self.since = self._began = clock.now()  # when the verdict last changed
        self._first_s: float | None = None
        self._told_of: tuple[Kind, tuple[Multiaddr, ...]] | None = None  # the last verdict that was logged as news

    @property
    def finding(self) -> ReachabilityVerdict:
        """The current verdict on whether others can reach this host."""
        return self._machine.finding

    def count_relays(self, count: Callable[[], int]) -> None:
        """Register `count`, which returns how many relays accept circuits for us. Call `look` when that changes."""
        self._relays = count

    def on_change(self, hear: Callable[[ReachabilityVerdict], None]) -> None:
        """Register `hear`, which is called with each new verdict; it must not block."""
        self._heard.append(hear)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Determine the reachability, and keep it current, until cancelled."""
        self._host.handle(AUTONAT, self._serve)
        self.since = self._began = self._clock.now()
        try:
            with self._host.watch(told=True) as events:
                async with trio.open_nursery() as self._nursery:
                    for peer in self._host.connected():
                        self._told(self._host.links.best(peer))
                    self.look()
                    self._nursery.start_soon(self._timer.run)
                    self._nursery.start_soon(self._follow_machine)
                    task_status.started()
                    async for event in events:
                        self._hear(event)
                        with contextlib.suppress(trio.WouldBlock):
                            while True:  # events that arrive together are judged once
                                self._hear(events.receive_nowait())
                        self.look()
        finally:
            self._nursery = None
            self._host.unhandle(AUTONAT)

    def _hear(self, event: PeerEvent) -> None:
        if isinstance(event, PeerIdentified):
            self._told(event.link)
        elif isinstance(event, PeerDown):
            self._machine.lost(self._clock.now(), event.peer)

    def look(self) -> None:
        """Update the verdict, because something has changed or time has passed."""
        if self._nursery is None:
            return
        now, before = self._clock.now(), self._machine.finding
        places = self._host.whereabouts
        given = [*places.announced(MAPPED), *places.announced(CONFIGURED)]
        self._machine.own(self._host.listen_addrs(), [addr for addr in given if ip_of(addr) is not None])
        for ask in self._machine.step(now):
            self._nursery.start_soon(self._ask, ask)
        if self._machine.finding != before:
            self._apply(before)
        self._open_or_shut(now)
        self._timer.rearm()

    def _open_or_shut(self, now: float) -> None:
        """Set `takes_inbound`. It becomes False only after 10 s without any inbound path."""
        if self.finding.kind in (Kind.UNKNOWN, Kind.REACHABLE) or self._relays():
            self._shut_at, self._host.takes_inbound = math.inf, True
        elif self._host.takes_inbound:
            self._shut_at = min(self._shut_at, now + self._config.shut_s)
            if now >= self._shut_at:
                _log.warning("nobody can connect to this peer: it only dials out")
                self._shut_at, self._host.takes_inbound = math.inf, False

    def _wake_at(self) -> float:
        return min(self._machine.wake_at(self._clock.now()), self._shut_at)

    async def _follow_machine(self) -> None:
        """Test the reachability again when this machine has moved to another network."""
        while True:
            await self._host.whereabouts.relocated()
            self._machine.moved()
            self.look()

    def _told(self, link: StreamOwner | None) -> None:
        """Use what a peer reports in identify over `link`."""
        info = self._host.info(link.peer) if link is not None else None
        if link is None or info is None or link.way == PathKind.RELAYED:
            return
        direct = link.way in (PathKind.LOCAL, PathKind.DIRECT)
        sight = ObservedAddr(
            peer=link.peer,
            at=link.remote,
            seen=split_peer(link.observed)[0] if link.observed is not None else None,
            mapped=not (link.initiator and direct) or self._from_our_port(link),
            accepted=direct and not link.initiator,
            tests=direct and AUTONAT in info.protocols,
        )
        self._machine.saw(self._clock.now(), sight)

    def _from_our_port(self, link: StreamOwner) -> bool:
        """True if we dialed from the port on which we listen. Only then can others use the port that the peer sees."""
        local = tcp_place(link.local) if link.local is not None else None
        return local is not None and any(
            (place := tcp_place(addr)) is not None and (place.family, place.port) == (local.family, local.port)
            for addr in self._host.listen_addrs()
        )

    def _apply(self, before: ReachabilityVerdict) -> None:
        finding = self._machine.finding
        if (finding.kind, finding.proven) != (before.kind, before.proven):
            self.since = self._clock.now()
            if self._first_s is None and finding.kind != Kind.UNKNOWN:
                self._first_s = self.since - self._began
            self._tell(finding)
        self._host.whereabouts.candidates = list(finding.candidates)
        self._host.whereabouts.announce(PROVEN, finding.proven)
        self._host.whereabouts.withhold(finding.dead)
        serves = finding.kind in (Kind.UNKNOWN, Kind.REACHABLE)  # a peer behind a router also sees inside addresses
        if serves != self._host.speaks(AUTONAT):
            if serves:
                self._host.handle(AUTONAT, self._serve)
            else:
                self._host.unhandle(AUTONAT)
        for hear in self._heard:
            hear(finding)

    def _tell(self, finding: ReachabilityVerdict) -> None:
        """Log the verdict. It is logged as debug if nobody can judge any more, if it depends on a single witness, or if
        it is the verdict that was logged last.
        """
        verdict = (finding.kind, finding.proven)
        vague = finding.kind == Kind.UNKNOWN or finding.guessed
        news = self._told_of is None or not (vague or verdict == self._told_of)
        _log.log(logging.INFO if news else logging.DEBUG, "reachability: %s: %s", finding.kind, finding.why)
        self._told_of = verdict if news else self._told_of

    # --- client ------------------------------------------------------------------------------------------------

    async def _ask(self, ask: AskDialBack) -> None:
        """Ask one peer to dial us back. Every outcome is reported to the machine."""
        tried, proven = False, None
        try:
            with trio.move_on_after(self._config.ask_s):
                answer = await self._question(ask)
                proven = _proven_addr(answer, ask) if answer.status == DialStatus.OK else None
                tried = proven is not None or answer.status == DialStatus.DIAL_ERROR
                _log.debug("%s answered a dial-back request: %s %s", ask.peer, answer.status.name, answer.text)
        except ProtocolViolation as error:
            _log.warning("peer %s violated the AutoNAT protocol: %s", ask.peer, error)
        except RemoteError as error:
            _log.debug("dial-back request to %s failed: %s", ask.peer, error)
        self._machine.answered(self._clock.now(), ask.peer, tried=tried, proven=proven)
        self.look()

    async def _question(self, ask: AskDialBack) -> DialResponse:
        stream = await self._host.open_stream(ask.peer, AUTONAT)
        try:
            question = DialRequest(peer=self._host.id, addrs=tuple(addr.to_bytes() for addr in ask.addrs))
            await send_message(stream, question.encode())
            return DialResponse.decode(await receive_message(stream, AUTONAT_BYTES))
        finally:
            stream.reset()

    # --- server ---------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        """Handle one AutoNAT request."""
        with trio.move_on_after(self._config.serve_s):
            question = DialRequest.decode(await receive_message(stream, AUTONAT_BYTES))
            await send_message(stream, (await self._answer(stream, question)).encode())

    async def _answer(self, stream: Stream, question: DialRequest) -> DialResponse:
        asker = Asker(stream.peer, stream.link.remote, stream.link.way)
        begun = self._dial_backs.begin(self._clock.now(), asker, question)
        if isinstance(begun, DialBackRefusal):
            _log.debug("peer %s is not dialed back: %s", stream.peer, begun.why)
            self._dialed_back["refused"] += 1
            return DialResponse(status=begun.status, text=begun.why)
        number, addrs = begun
        try:
            found = await self._dial_back(stream.peer, addrs)
        finally:
            self._dial_backs.end(number)
        self._dialed_back["through" if found is not None else "in_vain"] += 1
        if found is None:
            return DialResponse(status=DialStatus.DIAL_ERROR, text="no address reached you")
        return DialResponse(status=DialStatus.OK, addr=found.to_bytes())

    async def _dial_back(self, peer: PeerId, addrs: list[Multiaddr]) -> Multiaddr | None:
        """The first of the addresses that leads to `peer`, or None. All are dialed at the same time."""
        found: list[Multiaddr] = []

        async def probe(addr: Multiaddr) -> None:
            try:
                await self._host.probe(addr, peer)
            except Unreachable as error:
                _log.debug("dialing %s back at %s failed: %s", peer, addr, error)
            else:
                found.append(addr)
                scope.cancel()

        with trio.move_on_after(self._config.probe_s) as scope:
            async with trio.open_nursery() as nursery:
                for addr in addrs:
                    nursery.start_soon(probe, addr)
        return found[0] if found else None

    def status(self) -> dict[str, object]:
        """Plain data for `peerd status`."""
        finding = self.finding
        return {
            "verdict": finding.kind.value,
            "why": finding.why,
            "for_s": self._clock.now() - self.since,
            "found_after_s": self._first_s,  # from the start to the first verdict
            "proven": [str(addr) for addr in finding.proven],
            "candidates": [str(addr) for addr in finding.candidates],
            "dialed_back": dict(self._dialed_back),  # results of requests to us
        }


def _proven_addr(answer: DialResponse, ask: AskDialBack) -> Multiaddr | None:
    """The address at which the dial-back succeeded, or None if the answer does not show it.

    Raises ProtocolViolation if it is not an address, or not one that we asked about.
    """
    if not answer.addr:
        return ask.addrs[0] if len(ask.addrs) == 1 else None
    addr = split_peer(decode_addr(answer.addr))[0]
    if addr not in ask.addrs:
        raise ProtocolViolation(f"it dialed {addr}, which was not in the request", ask.peer)
    return addr


def port_of(host: Host) -> int | None:
    """The TCP port on which this host listens, for advice to the user. None if it does not listen."""
    places = [tcp_place(addr) for addr in host.listen_addrs()]
    return next((place.port for place in places if place is not None), None)
