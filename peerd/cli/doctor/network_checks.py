"""Checks of the network: ports, router, bootstrap peers, clocks, and whether other peers can connect.

Connects with a temporary identity, so that a running daemon is not disturbed. In a run with tokens it uses the peer's
own identity, since members answer only members. Failures of a bootstrap address have the same text as in `peerd join`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from multiaddr import Multiaddr

from peerd.access.access_guard import Access
from peerd.access.token_files import CredentialFiles
from peerd.cli.doctor.check_result import CheckResult, CheckVerdict
from peerd.core.addr import parse_addr, parse_announced, split_peer, tcp_place
from peerd.core.addr import reach as addr_reach
from peerd.core.errors import Cause, ConfigError, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.limits import CLOCK_CORRECTION_S, CLOCK_TOLERANCE_S
from peerd.dht.bootstrap import NO_PEERD, why_unreachable
from peerd.dht.clock_skew import REPORTED_S, ClockSkew
from peerd.dht.codec import HelloMessage, PingMessage, PongMessage
from peerd.log import clean
from peerd.reach.autonat import AutoNat, port_of
from peerd.reach.messages.circuit_message import HOP
from peerd.reach.port_mapping import own_routers, tried
from peerd.reach.reachability import Kind, advice
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.run.runfile import RunFile
from peerd.wire.clock import RealClock
from peerd.wire.host.addresses import CONFIGURED
from peerd.wire.host.host import Host
from peerd.wire.tcp.listen import other_family
from peerd.wire.tcp.tcp_transport import TcpTransport
from peerd.wire.transport import NoSuchFamily

_CONNECT_S: Final = 15.0
_IDENTIFY_S: Final = 5.0
_SLOW_RTT_S: Final = 0.5
_VERDICT_S: Final = 8.0  # for the peers that dial back
_DHT_PROTOCOL: Final = "/peerd/dht/4"


@dataclass(frozen=True, slots=True)
class NetworkTarget:
    """Addresses to check, and the identity to connect with. Without one, a temporary identity is generated."""

    bootstrap: Sequence[str]
    listen: Sequence[str]
    run: RunFile | None = None
    identity: Keypair | None = None
    papers: CredentialFiles | None = None
    announced: Sequence[str] = ()  # addresses of this machine for others, as the user configured them


@dataclass(slots=True)
class _Observations:
    """Observed at the bootstrap peers: results by address, clock samples, whether one refused to send its time."""

    findings: dict[str, list[CheckResult]]
    clocks: ClockSkew
    silent: bool = False


async def network_checks(visit: NetworkTarget) -> list[CheckResult]:
    """Run all network checks. Bootstrap addresses are tried concurrently."""
    findings = [await _port(text, visit.listen) for text in visit.listen]
    findings += map(_announced, visit.announced)
    listens = not any(finding.verdict == CheckVerdict.FAIL for finding in findings)
    findings += await _router(visit.listen)
    if not visit.bootstrap:
        more = "clock, reachability and bootstrap addresses were not checked"
        return [
            *findings,
            CheckResult("bootstrap", CheckVerdict.UNKNOWN, f"none given; {more}", "pass --bootstrap ADDR"),
        ]
    clock = RealClock()
    stack = peer_stack(visit.identity or Keypair.generate(clock.secure_bytes), clock, [TcpTransport()])
    listen = [parse_addr(text) for text in visit.listen] if listens else []
    return findings + await bootstrap_checks(stack, visit, listen)


async def bootstrap_checks(stack: PeerStack, visit: NetworkTarget, listen: Sequence[Multiaddr]) -> list[CheckResult]:
    """Connect to the bootstrap peers, and check this machine's clock and reachability with their help."""
    reach, observed = AutoNat(stack.host, stack.clock), _Observations({}, ClockSkew())
    access = None
    if visit.run is not None and visit.papers is not None:
        access = Access(visit.run, stack.host, stack.rpc, stack.clock, visit.papers)
        stack.rpc.guard(access)
    stack.host.whereabouts.announce(CONFIGURED, list(map(parse_announced, visit.announced)))
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, listen)
        await nursery.start(reach.run)
        if access is not None:
            await nursery.start(access.run)
        async with trio.open_nursery() as checks:
            for text in dict.fromkeys(visit.bootstrap):
                checks.start_soon(_bootstrap, stack, text, observed)
        reached = await _reachability(stack.host, reach, visit.listen)
        nursery.cancel_scope.cancel()
    found = [finding for text in dict.fromkeys(visit.bootstrap) for finding in observed.findings[text]]
    return [*found, _clock(observed), *([reached] if listen else [])]


async def _reachability(host: Host, reach: AutoNat, listen: Sequence[str]) -> CheckResult:
    """This machine's reachability, which the bootstrap peers determine by dialing back, with advice."""
    known = trio.Event()
    reach.on_change(lambda finding: known.set() if finding.kind != Kind.UNKNOWN else None)
    outside = any(addr_reach(link.remote) == 2 for link in host.links)
    if outside and reach.finding.kind == Kind.UNKNOWN:
        with trio.move_on_after(_VERDICT_S):
            await known.wait()
    found = reach.finding
    relays = sum(HOP in info.protocols for peer in host.connected() if (info := host.info(peer)) is not None)
    words, _, advice_ = advice(found, port_of(host), relays).partition(": ")
    if found.kind == Kind.UNKNOWN:
        more = "" if outside else "pass --bootstrap with two or more peers elsewhere on the internet"
        return CheckResult("reachability", CheckVerdict.UNKNOWN, found.why, more)
    if found.kind == Kind.REACHABLE:
        return CheckResult("reachability", CheckVerdict.OK, f"reachable: {found.why}")
    if found.guessed:
        more = "pass a second --bootstrap, of a peer at another address: the check needs two observers"
        return CheckResult("reachability", CheckVerdict.UNKNOWN, f"{words}: {found.why}", more)
    if any((place := tcp_place(parse_addr(text))) is not None and place.port == 0 for text in listen):
        advice_ += "; first choose a fixed port, as in --listen /ip4/0.0.0.0/tcp/31337"
    verdict = CheckVerdict.OK if found.kind == Kind.KEEPS_PORTS and relays else CheckVerdict.WARN
    return CheckResult("reachability", verdict, f"{words}: {found.why}", advice_)


def _announced(text: str) -> CheckResult:
    """Check that an announced address is public. Whether it leads to this machine is found by dialing back."""
    if addr_reach(parse_announced(text)) == 2:
        return CheckResult("announce", CheckVerdict.OK, f"announced as {text}")
    found, advice = f"announced as {text}, which is not reachable from the internet", "announce a public address"
    return CheckResult("announce", CheckVerdict.WARN, found, advice)


async def _port(text: str, listen: Sequence[str]) -> CheckResult:
    """Check that address `text` can be bound. `listen` holds all listen addresses."""
    addr = parse_addr(text)
    try:
        listener = await TcpTransport().listen(addr)
    except ConfigError as error:
        if isinstance(error, NoSuchFamily) and other_family(addr) in [parse_addr(other) for other in listen]:
            return CheckResult(
                "listen", CheckVerdict.OK, f"this machine has no address of the family of {text}, and needs none"
            )
        advice = "choose another port with --listen, or stop the program that uses this one (perhaps a peerd daemon)"
        return CheckResult("listen", CheckVerdict.FAIL, str(error), advice)
    await listener.aclose()
    return CheckResult("listen", CheckVerdict.OK, f"{text} is free")


async def _router(listen: Sequence[str]) -> list[CheckResult]:
    """Check that the home router maps a port on request. Returns [] if peerd listens on loopback addresses only."""
    places = [tcp_place(parse_addr(text)) for text in listen]
    clock = RealClock()
    if not any(place is not None and not place.host.startswith(("127.", "::1")) for place in places):
        return []
    routers = own_routers(clock)
    if not routers:
        return [
            CheckResult(
                "router",
                CheckVerdict.UNKNOWN,
                "not asked to map a port",
                "to let peerd ask: pip install 'peerd[portmap]'",
            )
        ]
    told = await tried(routers, clock.rng("doctor").randrange(20000, 60000))
    maps = next((text for text in told if " maps " in text), None)
    advice = "" if maps else "if no peer outside reaches this machine, forward the port in the router's settings"
    return [
        CheckResult(
            "router",
            CheckVerdict.OK if maps else CheckVerdict.WARN,
            maps or f"did not map a port: {'; '.join(told)}",
            advice,
        )
    ]


async def _bootstrap(stack: PeerStack, text: str, observed: _Observations) -> None:
    """Connect to a bootstrap address, check the peer's protocols, measure the round trip, and compare clocks."""
    addr = parse_addr(text)
    name = f"bootstrap {text}"
    findings = observed.findings[text] = []
    if split_peer(addr)[1] is None:
        advice = "ask the organizer for the address with /p2p/12D3...; without it anyone could answer in its place"
        findings.append(CheckResult(name, CheckVerdict.WARN, "the address has no peer id", advice))
    try:
        with trio.fail_after(_CONNECT_S):
            peer = await stack.host.connect_addr(addr)
            info = await stack.host.introduction(peer, _IDENTIFY_S)
            rtt_s = await stack.host.ping(peer)
            if info is not None and _DHT_PROTOCOL in info.protocols:
                await _compare_clocks(stack, peer, addr, observed)
    except trio.TooSlowError:
        findings.append(_unreached(name, f"no answer within {_CONNECT_S:.0f} s"))
        return
    except RemoteError as error:
        findings.append(_unreached(name, clean(why_unreachable(addr, error))))
        return
    if info is None or _DHT_PROTOCOL not in info.protocols:
        findings.append(
            _unreached(name, f"{NO_PEERD} ({clean(info.agent) if info is not None else 'it sent no identification'})")
        )
        return
    slow = rtt_s > _SLOW_RTT_S
    found = f"reached {clean(info.agent)}, round trip {rtt_s * 1000:.0f} ms"
    advice = "a nearer backbone would help" if slow else ""
    findings.append(CheckResult(name, CheckVerdict.WARN if slow else CheckVerdict.OK, found, advice))


async def _compare_clocks(stack: PeerStack, peer: PeerId, addr: Multiaddr, observed: _Observations) -> None:
    """Sample a peer's clock. If the peer rejects the request because we have no token, set `silent`; other refusals
    raise Refused.
    """
    sent = stack.clock.wall()
    body = PingMessage(HelloMessage([], sent))
    try:
        answer = await stack.rpc.call(peer, "dht/4/ping", body, PongMessage, timeout_s=_CONNECT_S)
    except Refused as error:
        if error.cause is not Cause.NO_TOKEN:
            raise
        observed.silent = True
        return
    hello = answer.body.hello
    if hello is not None and math.isfinite(hello.wall):
        observed.clocks.sample(peer, addr, sent, stack.clock.wall(), hello.wall)


def _clock(observed: _Observations) -> CheckResult:
    """Compare this machine's clock with those of all bootstrap peers, by the rules of a running peer."""
    clocks, let_ntp = observed.clocks, "let NTP set this machine's clock, as in: timedatectl set-ntp true"
    if not clocks.votes:
        why = "no bootstrap peer answered"
        if observed.silent:
            why = "the peer belongs to a run with tokens and answers members only"
            let_ntp = "pass --model FILE and --role"
        return CheckResult("clock", CheckVerdict.UNKNOWN, f"not compared: {why}", let_ntp if observed.silent else "")
    off_s = clocks.furthest_s()
    theirs = "that peer's" if clocks.votes == 1 else f"those of {clocks.votes} peers"
    if abs(off_s) <= REPORTED_S:
        return CheckResult("clock", CheckVerdict.OK, f"{abs(off_s):.1f} s from {theirs}")
    way = "behind" if off_s > 0 else "ahead of"
    found = f"this machine's clock is {abs(off_s):.1f} s {way} {theirs}"
    if abs(off_s) > CLOCK_CORRECTION_S:
        return CheckResult("clock", CheckVerdict.FAIL, f"{found}, too far to correct", let_ntp)
    if abs(clocks.correction_s() - off_s) <= CLOCK_TOLERANCE_S:
        return CheckResult("clock", CheckVerdict.WARN, f"{found}; it is corrected", let_ntp)
    if abs(off_s) > CLOCK_TOLERANCE_S:
        advice = f"{let_ntp}; or pass a second --bootstrap, to find out whose clock is wrong"
        return CheckResult("clock", CheckVerdict.FAIL, f"{found}: they reject each other's records", advice)
    return CheckResult("clock", CheckVerdict.WARN, found, let_ntp)


def _unreached(name: str, why: str) -> CheckResult:
    return CheckResult(name, CheckVerdict.FAIL, why, _advice(why))


_ADVICE: Final = {
    "refused": "nothing listens there: is the backbone running, and is the port right?",
    "no answer": "a firewall or router drops the packets: open the port there, and check the address",
    "timed out": "a firewall or router drops the packets: open the port there, and check the address",
    "another peer answers there": "another peer answers there: ask the organizer for the new join link",
    NO_PEERD: "the program that answers there is not a peerd daemon: check the port",
    "no valid token": "ask the organizer for a token: see `peerd token --help`",
    "resolved": "check the name, and this machine's DNS",
    "unreachable": "this machine has no route to it: check its network",
    "no route": "this machine has no route to it: check its network",
}


def _advice(reason: str) -> str:
    return next((advice for sign, advice in _ADVICE.items() if sign in reason.lower()), "check address and port")
