"""`peerd doctor`: tries what a peer needs on this machine, and says what to do about what is wrong.

Each check does the real thing (bind the port, write the file, connect and shake hands) with a throw-away identity, so
a running daemon is not disturbed. A check never raises: it ends in ok, warn or fail, with what was found and advice.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import trio
from rich.console import Console
from rich.text import Text

from peerd.core.addr import parse_addr, split_peer, tcp_place
from peerd.core.addr import reach as addr_reach
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.messages.token import NO_TOKEN
from peerd.core.protobuf.circuit import HOP
from peerd.core.version import VERSION
from peerd.home import IDENTITY_FILE, load_identity, make_private_dir
from peerd.log import clean
from peerd.machine.connectivity.reachability import Kind, advice
from peerd.net.clock import RealClock
from peerd.net.host.host import Host
from peerd.net.tcp.listen import other_family
from peerd.net.tcp.tcp_transport import TcpTransport
from peerd.net.transport import NoSuchFamily
from peerd.service.connectivity.autonat import Reach, port_of
from peerd.service.connectivity.port_mapping import own_routers, tried
from peerd.service.dht.codec import HelloMessage, PingMessage, PongMessage
from peerd.service.peer_stack import PeerStack, peer_stack
from peerd.service.rpc.rpc import Rpc

DISK_FAIL_BYTES: Final = 200 << 20  # not even one small checkpoint
DISK_WARN_BYTES: Final = 5 << 30
CONNECT_S: Final = 15.0
IDENTIFY_S: Final = 5.0
SLOW_RTT_S: Final = 0.5
VERDICT_S: Final = 8.0  # for the peers that dial back
CLOCK_WARN_S: Final = 2.0
DHT_PROTOCOL: Final = "/peerd/dht/2"
PACKAGES: Final = ("trio", "msgspec", "cryptography", "pynacl", "multiaddr", "numpy", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorWish:
    """Settings to check."""

    bootstrap: tuple[str, ...]
    listen: tuple[str, ...]
    data_dir: Path
    device: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check's end. `verdict`: ok, warn or fail."""

    check: str
    verdict: str
    found: str
    advice: str = ""


def run(wish: DoctorWish, *, as_json: bool) -> int:
    """All checks, shown; 1 when something fails."""
    findings = [*_versions(), *_device(wish.device), *_data_dir(wish.data_dir)]
    findings += trio.run(_network, wish)
    failed = any(finding.verdict == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}, ensure_ascii=False))
    else:
        _show(findings)
    return 1 if failed else 0


def _show(findings: list[CheckResult]) -> None:
    console = Console()
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        line = Text.assemble((f"{finding.verdict:5}", styles[finding.verdict]), f"{finding.check}: {finding.found}")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"     {finding.advice}", "dim"), soft_wrap=True)


def _versions() -> list[CheckResult]:
    base = f"peerd {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    found: list[str] = []
    missing: list[str] = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return [CheckResult("versions", "fail", f"{base}; missing: {', '.join(missing)}", "install peerd again")]
    return [CheckResult("versions", "ok", base), CheckResult("packages", "ok", ", ".join(found))]


def _device(device: str) -> list[CheckResult]:
    try:
        from peerd.compute.devices import describe
        from peerd.compute.kernels import ops

        facts = describe(device)
    except ImportError as error:
        return [CheckResult("device", "fail", f"torch can't be loaded: {error}", "install peerd again, with its torch")]
    except ConfigError as error:
        return [CheckResult("device", "fail", str(error))]
    memory = f", {facts.memory_bytes / 1e9:.0f} GB" if facts.memory_bytes else ""
    text = f"{facts.name}{memory}, torch {facts.torch_version}, {facts.threads} threads of {os.cpu_count()} cores"
    coded_by, slow_because = ops.described(device)
    return [
        CheckResult("device", "ok", text),
        CheckResult("quantized transfer", "warn" if slow_because else "ok", coded_by, slow_because),
    ]


def _data_dir(path: Path) -> list[CheckResult]:
    try:
        place = make_private_dir(path)
    except ConfigError as error:
        return [CheckResult("data directory", "fail", str(error), "choose another with --data-dir")]
    findings = [CheckResult("data directory", "ok", str(place))]
    free = shutil.disk_usage(place).free
    verdict = "fail" if free < DISK_FAIL_BYTES else "warn" if free < DISK_WARN_BYTES else "ok"
    advice = "" if verdict == "ok" else "checkpoints need room: free some, or choose another --data-dir"
    findings.append(CheckResult("free disk", verdict, f"{free / 1e9:.1f} GB", advice))
    if (place / IDENTITY_FILE).exists():
        try:
            findings.append(CheckResult("identity", "ok", load_identity(place).peer_id.text))
        except ConfigError as error:
            findings.append(CheckResult("identity", "fail", str(error)))
    else:
        findings.append(CheckResult("identity", "ok", "none yet; made at the first start"))
    return findings


async def _network(wish: DoctorWish) -> list[CheckResult]:
    findings = [await _port(text, wish.listen) for text in wish.listen]
    findings += await _router(wish.listen)
    if not wish.bootstrap:
        advice_ = "to try one, give --bootstrap or --config"
        return [*findings, CheckResult("bootstrap", "ok", "none given, so none was tried", advice_)]
    clock = RealClock()
    stack = peer_stack(Keypair.generate(clock.secure_bytes), clock, [TcpTransport()])
    reach = Reach(stack.host, clock)
    listens = not any(finding.verdict == "fail" for finding in findings)
    results: dict[str, list[CheckResult]] = {}

    async def check(text: str) -> None:
        results[text] = await _bootstrap(stack, text)

    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, [parse_addr(text) for text in wish.listen] if listens else [])
        await nursery.start(reach.run)
        async with trio.open_nursery() as checks:
            for text in dict.fromkeys(wish.bootstrap):
                checks.start_soon(check, text)
        reached = await _reachability(stack.host, reach, wish.listen)
        nursery.cancel_scope.cancel()
    return [*findings, *(finding for found in results.values() for finding in found), *([reached] if listens else [])]


async def _reachability(host: Host, reach: Reach, listen: Sequence[str]) -> CheckResult:
    """Check of this machine's reachability, as the bootstrap peers find by dialing back, with advice."""
    known = trio.Event()
    reach.on_change(lambda finding: known.set() if finding.kind != Kind.UNKNOWN else None)
    outside = any(addr_reach(link.remote) == 2 for link in host.links)
    if outside and reach.finding.kind == Kind.UNKNOWN:
        with trio.move_on_after(VERDICT_S):
            await known.wait()
    found = reach.finding
    relays = sum(HOP in info.protocols for peer in host.connected() if (info := host.info(peer)) is not None)
    words, _, advice_ = advice(found, port_of(host), relays).partition(": ")
    if found.kind == Kind.UNKNOWN:
        return CheckResult("reachability", "warn" if outside else "ok", f"not known: {found.why}")
    if found.kind == Kind.REACHABLE:
        return CheckResult("reachability", "ok", f"reachable: {found.why}")
    if any((place := tcp_place(parse_addr(text))) is not None and place.port == 0 for text in listen):
        advice_ += "; first choose a port that stays the same, as in --listen /ip4/0.0.0.0/tcp/31337"
    verdict = "ok" if found.kind == Kind.KEEPS_PORTS and relays else "warn"
    return CheckResult("reachability", verdict, f"{words}: {found.why}", advice_)


async def _port(text: str, listen: Sequence[str]) -> CheckResult:
    """Try to listen there, for a moment; `listen` are all such addresses."""
    addr = parse_addr(text)
    try:
        listener = await TcpTransport().listen(addr)
    except ConfigError as error:
        if isinstance(error, NoSuchFamily) and other_family(addr) in [parse_addr(other) for other in listen]:
            return CheckResult("listen", "ok", f"this machine has no address of the kind of {text}, and needs none")
        advice = "choose another port with --listen, or stop what uses this one (a peerd daemon of yours, perhaps)"
        return CheckResult("listen", "fail", str(error), advice)
    await listener.aclose()
    return CheckResult("listen", "ok", f"{text} is free")


async def _router(listen: Sequence[str]) -> list[CheckResult]:
    """Check that the home router would open the port; nothing where nobody outside is meant to come in."""
    places = [tcp_place(parse_addr(text)) for text in listen]
    clock = RealClock()
    if not any(place is not None and not place.host.startswith(("127.", "::1")) for place in places):
        return []
    routers = own_routers(clock)
    if not routers:
        return [CheckResult("router", "ok", "not asked for a port; pip install 'peerd[portmap]' would make peerd ask")]
    told = await tried(routers, clock.rng("doctor").randrange(20000, 60000))
    maps = next((text for text in told if " maps " in text), None)
    advice = "" if maps else "if nobody reaches this machine from outside, forward the port in the router's settings"
    return [CheckResult("router", "ok", maps or f"opens no port by itself: {'; '.join(told)}", advice)]


async def _bootstrap(stack: PeerStack, text: str) -> list[CheckResult]:
    """Connect, shake hands, ask what the peer speaks, and measure the round trip."""
    addr = parse_addr(text)
    name = f"bootstrap {text}"
    findings: list[CheckResult] = []
    if split_peer(addr)[1] is None:
        advice = "ask the organizer for the address with /p2p/12D3...; without it anyone could answer in its place"
        findings.append(CheckResult(name, "warn", "the address does not say which peer it is", advice))
    try:
        with trio.fail_after(CONNECT_S):
            peer = await stack.host.connect_addr(addr)
            agent, protocols = await _introduction(stack.host, peer)
            rtt_s = await stack.host.ping(peer)
            skew_s = await _skew(stack.rpc, stack.clock, peer) if DHT_PROTOCOL in protocols else 0.0
    except trio.TooSlowError:
        return [*findings, CheckResult(name, "fail", f"no answer within {CONNECT_S:.0f} s", _advice("no answer"))]
    except RemoteError as error:
        return [*findings, CheckResult(name, "fail", clean(str(error)), _advice(str(error)))]
    if DHT_PROTOCOL not in protocols:
        advice = "it speaks libp2p, but is no peerd: check the port"
        return [*findings, CheckResult(name, "fail", f"reached {clean(agent)}, which is not a peerd", advice)]
    slow = rtt_s > SLOW_RTT_S
    found = f"reached {clean(agent)}, round trip {rtt_s * 1000:.0f} ms"
    findings.append(CheckResult(name, "warn" if slow else "ok", found, "a nearer backbone would help" if slow else ""))
    return [*findings, _clock(skew_s, rtt_s)]


async def _skew(rpc: Rpc, clock: Clock, peer: PeerId) -> float | None:
    """Seconds by which the peer's clock is ahead of ours; None when it answers members of its run only."""
    sent = clock.wall()
    body = PingMessage(HelloMessage([], sent))
    try:
        answer = await rpc.call(peer, "dht/2/ping", body, PongMessage, timeout_s=CONNECT_S)
    except Refused as error:
        if NO_TOKEN in str(error):
            return None
        raise
    hello = answer.body.hello
    return hello.wall - (sent + clock.wall()) / 2 if hello is not None and math.isfinite(hello.wall) else 0.0


def _clock(skew_s: float | None, rtt_s: float) -> CheckResult:
    if skew_s is None:
        return CheckResult("clock", "ok", "not compared: that peer is of a run with tokens and answers members only")
    if abs(skew_s) <= CLOCK_WARN_S + rtt_s:
        return CheckResult("clock", "ok", f"{abs(skew_s):.1f} s from that peer's")
    way = "behind" if skew_s > 0 else "ahead of"
    advice = "one of the two is wrong; let NTP set this machine's (records expire by the clock)"
    return CheckResult("clock", "warn", f"this machine's clock is {abs(skew_s):.1f} s {way} that peer's", advice)


async def _introduction(host: Host, peer: PeerId) -> tuple[str, tuple[str, ...]]:
    """The agent and protocols that the peer names, once it does."""
    info = await host.introduction(peer, IDENTIFY_S)
    return ("a peer that does not introduce itself", ()) if info is None else (info.agent, info.protocols)


_ADVICE: Final = {
    "refused": "nothing listens there: is the backbone running, and is the port right?",
    "no answer": "a firewall or router drops the packets: open the port there, and check the address",
    "timed out": "a firewall or router drops the packets: open the port there, and check the address",
    "expected ": "another peer answers there: ask the organizer for the new join line",
    "resolved": "check the name, and this machine's DNS",
    "unreachable": "this machine has no way there: check its network",
    "no route": "this machine has no way there: check its network",
    "hand-shake": "what answers there is no libp2p peer: check the port",
}


def _advice(reason: str) -> str:
    return next((advice for sign, advice in _ADVICE.items() if sign in reason.lower()), "check address and port")
