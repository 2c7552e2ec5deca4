"""Reach: AutoNAT's client and server, and what follows from the verdict.

Tells `machine/connectivity/reachability` how peers see this host, asks those that it names to dial back, and puts the
finding to use: proven addresses are announced, dead ones withheld, candidates are there for hole punching. As a server
it dials askers back where `machine/connectivity/dial_back` allows it, unless it is known to be unreachable itself.
Decides nothing else. Hostile input: bounded by the two machines; a peer that sends nothing, or no end, costs one stream
for some seconds.
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
from peerd.core.protobuf.autonat import AUTONAT, Dialed, DialMe, DialStatus
from peerd.machine.connectivity.dial_back import Asker, DialBackRefusal, DialBacks
from peerd.machine.connectivity.path_selection import PathKind
from peerd.machine.connectivity.reachability import (
    AskDialBack,
    Kind,
    ObservedAddr,
    Reachability,
    ReachabilityConfig,
    ReachabilityVerdict,
)
from peerd.net.host.addresses import CONFIGURED
from peerd.net.host.host import Host, PeerDown, PeerTold
from peerd.net.host.link_table import PeerEvent
from peerd.net.link.delimited import receive_message, send_message
from peerd.net.link.stream import Stream, StreamOwner
from peerd.net.timer import Timer

_log = logging.getLogger("peerd.reach")
PROVEN = "proven"  # announces addresses at which strangers got through
MAPPED = "mapped"  # under this name others announce addresses that a router promised


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoNatConfig:
    """Times in seconds."""

    verdict: ReachabilityConfig = field(default_factory=ReachabilityConfig)
    probe_s: float = 3.0  # one dial-back, hand-shake included: a lost packet is repeated after one second
    serve_s: float = 10.0  # one asker, from its question to our answer
    ask_s: float = 20.0  # an answer: others may be more patient with their dials than we are
    shut_s: float = 10.0  # how long nobody can come in before this peer counts as one that only dials


class AutoNat:
    """Reachability of this host by others. Nothing moves until `run`."""

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
        self.since = self._began = clock.now()  # since when the verdict is what it is
        self._first_s: float | None = None
        self._told_of: tuple[Kind, tuple[Multiaddr, ...]] | None = None  # the verdict that the log told last

    @property
    def finding(self) -> ReachabilityVerdict:
        """The verdict as it stands."""
        return self._machine.finding

    def count_relays(self, count: Callable[[], int]) -> None:
        """`count`: how many relays take circuits for us; `look` when that changes."""
        self._relays = count

    def on_change(self, hear: Callable[[ReachabilityVerdict], None]) -> None:
        """Have `hear` called with each new finding; it must not block."""
        self._heard.append(hear)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find out, and keep finding out, until cancelled."""
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
                            while True:  # many at once are weighed once
                                self._hear(events.receive_nowait())
                        self.look()
        finally:
            self._nursery = None
            self._host.unhandle(AUTONAT)

    def _hear(self, event: PeerEvent) -> None:
        if isinstance(event, PeerTold):
            self._told(event.link)
        elif isinstance(event, PeerDown):
            self._machine.lost(self._clock.now(), event.peer)

    def look(self) -> None:
        """Judge anew: something has changed, or time has passed."""
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
        """Set whether others can come in at all; that they cannot counts only once it has lasted."""
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
        """Ask again when this machine is elsewhere."""
        while True:
            await self._host.whereabouts.relocated()
            self._machine.moved()
            self.look()

    def _told(self, link: StreamOwner | None) -> None:
        """A peer has introduced itself over `link`."""
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
        """True when we dialed from the port on which we listen: only then its outside port says something."""
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
        serves = finding.kind in (Kind.UNKNOWN, Kind.REACHABLE)  # a peer behind a router sees the inside of it
        if serves != self._host.speaks(AUTONAT):
            if serves:
                self._host.handle(AUTONAT, self._serve)
            else:
                self._host.unhandle(AUTONAT)
        for hear in self._heard:
            hear(finding)

    def _tell(self, finding: ReachabilityVerdict) -> None:
        """A line of the log. That nobody is left who knows, or but one witness, is no news to people, nor is the same
        verdict after that.
        """
        verdict = (finding.kind, finding.proven)
        vague = finding.kind == Kind.UNKNOWN or finding.guessed
        news = self._told_of is None or not (vague or verdict == self._told_of)
        _log.log(logging.INFO if news else logging.DEBUG, "reachability: %s: %s", finding.kind, finding.why)
        self._told_of = verdict if news else self._told_of

    # --- asking ------------------------------------------------------------------------------------------------

    async def _ask(self, ask: AskDialBack) -> None:
        """One question and its answer; whatever happens, the machine hears of it."""
        tried, proven = False, None
        try:
            with trio.move_on_after(self._config.ask_s):
                answer = await self._question(ask)
                proven = _proven_addr(answer, ask) if answer.status == DialStatus.OK else None
                tried = proven is not None or answer.status == DialStatus.DIAL_ERROR
                _log.debug("%s dialed us back: %s %s", ask.peer, answer.status.name, answer.text)
        except ProtocolViolation as error:
            _log.warning("peer %s broke AutoNAT: %s", ask.peer, error)
        except RemoteError as error:
            _log.debug("%s was asked to dial back: %s", ask.peer, error)
        self._machine.answered(self._clock.now(), ask.peer, tried=tried, proven=proven)
        self.look()

    async def _question(self, ask: AskDialBack) -> Dialed:
        stream = await self._host.open_stream(ask.peer, AUTONAT)
        try:
            question = DialMe(peer=self._host.id, addrs=tuple(addr.to_bytes() for addr in ask.addrs))
            await send_message(stream, question.encode())
            return Dialed.decode(await receive_message(stream, AUTONAT_BYTES))
        finally:
            stream.reset()

    # --- answering ---------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        """The handler of AutoNAT: one question."""
        with trio.move_on_after(self._config.serve_s):
            question = DialMe.decode(await receive_message(stream, AUTONAT_BYTES))
            await send_message(stream, (await self._answer(stream, question)).encode())

    async def _answer(self, stream: Stream, question: DialMe) -> Dialed:
        asker = Asker(stream.peer, stream.link.remote, stream.link.way)
        begun = self._dial_backs.begin(self._clock.now(), asker, question)
        if isinstance(begun, DialBackRefusal):
            _log.debug("peer %s is not dialed back: %s", stream.peer, begun.why)
            self._dialed_back["refused"] += 1
            return Dialed(status=begun.status, text=begun.why)
        number, addrs = begun
        try:
            found = await self._dial_back(stream.peer, addrs)
        finally:
            self._dial_backs.end(number)
        self._dialed_back["through" if found is not None else "in_vain"] += 1
        if found is None:
            return Dialed(status=DialStatus.DIAL_ERROR, text="no address led to you")
        return Dialed(status=DialStatus.OK, addr=found.to_bytes())

    async def _dial_back(self, peer: PeerId, addrs: list[Multiaddr]) -> Multiaddr | None:
        """The first of the addresses that leads to `peer`, all tried at once."""
        found: list[Multiaddr] = []

        async def probe(addr: Multiaddr) -> None:
            try:
                await self._host.probe(addr, peer)
            except Unreachable as error:
                _log.debug("%s dialed back at %s: %s", peer, addr, error)
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
            "found_after_s": self._first_s,  # the first one, since the start
            "proven": [str(addr) for addr in finding.proven],
            "candidates": [str(addr) for addr in finding.candidates],
            "dialed_back": dict(self._dialed_back),  # peers that asked us for it
        }


def _proven_addr(answer: Dialed, ask: AskDialBack) -> Multiaddr | None:
    """Address at which the dial got through; ProtocolViolation when that is no address, or none that was asked
    about.
    """
    if not answer.addr:
        return ask.addrs[0] if len(ask.addrs) == 1 else None
    addr = split_peer(decode_addr(answer.addr))[0]
    if addr not in ask.addrs:
        raise ProtocolViolation(f"it got through to {addr}, about which it was not asked", ask.peer)
    return addr


def port_of(host: Host) -> int | None:
    """The TCP port on which others would come in, for advice."""
    places = [tcp_place(addr) for addr in host.listen_addrs()]
    return next((place.port for place in places if place is not None), None)
