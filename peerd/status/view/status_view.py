"""Formats a status snapshot as tables for the terminal, printed once.

Text in a snapshot may come from untrusted peers: it is printed as plain text, never as markup.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from peerd.screen.columns import Columns, Row
from peerd.screen.units import brief, counted, duration, known, number, short, size
from peerd.status.snapshot import (
    BudgetStatus,
    FaultsStatus,
    RateStatus,
    ReachableStatus,
    StatusSnapshot,
    TrafficStatus,
    decode_status,
)
from peerd.status.swarm_status import SwarmStatus
from peerd.status.view import swarm_words
from peerd.status.view.network_words import network_parts
from peerd.status.view.role_words import RolePart, details, parts_of

EVENTS_SHOWN: Final = 8

_WAYS: Final = {"punched": "by hole punching", "relayed": "over relays"}  # other kinds are shown by name


def render(snapshot: StatusSnapshot) -> RenderableType:
    """Format the whole snapshot: this daemon first, then its view of the swarm."""
    swarm = snapshot.swarm
    parts: list[RenderableType] = []
    if snapshot.no_part_yet:
        parts.append(Text(f"takes no part yet, waits for: {snapshot.no_part_yet}", "yellow"))
    if snapshot.alone:
        parts.append(Text(snapshot.alone, "yellow"))
    parts += [*_halt_line(swarm), _headline(snapshot), roles_table(parts_of(snapshot.roles)), _network(snapshot)]
    if (fullest := _fullest(snapshot.budgets)).rows:
        parts += [Text(""), fullest.table()]
    if snapshot.faults.count:
        parts.append(_faults_line(snapshot.faults))
    if swarm.run is not None:
        parts += [Text(""), *_swarm_lines(swarm)]
    if snapshot.events:
        names = swarm.names()
        parts += [Text(""), *(swarm_words.event_line(event, names) for event in snapshot.events[-EVENTS_SHOWN:])]
    return Group(*parts)


def swarm_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The swarm's part of a snapshot as received. If the swarm is unknown, `why` is the reason."""
    why = "this daemon has not read the directory yet, or has no run"
    return snapshot.get("swarm") or {"run": snapshot.get("run"), "why": why}


def render_swarm(swarm: SwarmStatus) -> RenderableType:
    """Format a run: its step, the peers of its stages, the network between them, and each peer's contribution."""
    parts: list[RenderableType] = [*_halt_line(swarm), *_swarm_lines(swarm)]
    order = [peer.peer for peer in swarm.stage_peers()] + [row.peer for row in swarm.trainers]
    if network := network_parts(swarm.network, swarm.names(), order):
        parts += [Text(""), *network]
    if swarm.contributions:
        parts += [Text(""), Text(swarm_words.board_by(swarm), "dim"), swarm_words.board(swarm).table()]
    return Group(*parts)


def show(told: dict[str, Any], *, swarm: bool) -> None:
    """Print a snapshot as received, or with `swarm` the swarm's part of one."""
    shown = render_swarm(decode_status(told, SwarmStatus)) if swarm else render(decode_status(told, StatusSnapshot))
    Console().print(shown, crop=False)  # addresses may be wider than the screen


def _headline(snapshot: StatusSnapshot) -> Text:
    text = Text(no_wrap=True, overflow="ignore")  # unwrapped, so that users can copy the addresses
    text.append(f"peerd {snapshot.version}", "bold").append(f"  {snapshot.peer.id}")
    text.append(f"\nup {duration(snapshot.uptime_s)}, data in {snapshot.data_dir}", "dim")
    for addr in snapshot.peer.addrs:
        text.append(f"\n{_at(addr, snapshot.reachability.proven)} {addr}", "dim")
    return text


def _at(addr: str, proven: Iterable[str]) -> str:
    """Label of an address: proven reachable, over a relay, or only listening."""
    if "/p2p-circuit" in addr:
        return "over a relay at"
    return "reachable at" if any(addr.startswith(f"{one}/p2p/") for one in proven) else "listening on"


def roles_table(parts: Iterable[RolePart]) -> Table:
    """Table of the roles, with one row for each post of a role that has several."""
    rows = list[Row]()
    for part in parts:
        state = part.state + (f" ({counted(part.restarts, 'restart')})" if part.restarts else "")
        why = part.waits_for or part.failure or "-"
        rows.append([part.role, state, why, ", ".join(details(part.figures))])
    return Columns(("role", "state", "waits", "details"), rows, whole={0, 1, 2}).table()


def _network(snapshot: StatusSnapshot) -> Text:
    net = snapshot.network
    line = (
        f"{counted(len(net.peers), 'peer')} connected, {counted(net.streams, 'stream')}; "
        f"in {size(net.bytes_in)} ({size(net.in_per_s)}/s), out {size(net.bytes_out)} ({size(net.out_per_s)}/s)"
    )
    text = Text(line, no_wrap=True, overflow="ignore")
    for told, style in (*_ways(net), *_reach(snapshot.reachability), *_line(net), *_directory(snapshot)):
        text.append(f"\n{told}", style)
    return text


Lines = Iterator[tuple[str, str]]  # text, style


def _ways(net: TrafficStatus) -> Lines:
    """Line with the number of connections of each kind."""
    kinds = Counter(peer.way for peer in net.peers if peer.way)
    if kinds:
        told = ", ".join(f"{count} {_WAYS.get(kind, kind)}" for kind, count in sorted(kinds.items()))
        yield f"connections: {told}", "dim"


def _reach(reached: ReachableStatus) -> Lines:
    """This peer's reachability, with advice, and its work as a relay."""
    if reached.advice:
        since = f", for {duration(reached.for_s)}" if reached.for_s is not None and reached.verdict != "unknown" else ""
        yield f"{reached.advice}{since}", "dim" if reached.verdict == "reachable" else "yellow"
    if reached.relays:
        yield f"reached over the relay{'s' * (len(reached.relays) > 1)} {', '.join(map(short, reached.relays))}", "dim"
    if (relay := reached.carries) is not None:
        places = f"{counted(relay.circuits, 'circuit')}, {counted(relay.reservations, 'reservation')}"
        yield f"relay for others: {places}, {size(relay.carried_bytes)} carried", "dim"


def _line(net: TrafficStatus) -> Lines:
    """The internet connection, in each direction whose limit or rate is known."""
    told = [_direction(name, net.line[name]) for name in ("up", "down") if name in net.line]
    if any(told):
        yield f"internet: {'; '.join(filter(None, told))}", "dim"


def _direction(name: str, rate: RateStatus) -> str:
    facts = [f"limit {number(rate.limit_mbit)}"] if rate.limit_mbit else []
    facts += [f"up to {number(rate.measured_mbit)} measured"] if rate.measured_mbit else []
    return f"{name} {number(round(known(rate.now_mbit) or 0.0, 1))} Mb/s now ({', '.join(facts)})" if facts else ""


def _directory(snapshot: StatusSnapshot) -> Lines:
    """The limits, the directory, the bootstrap peers, and what is wrong with them."""
    if snapshot.limits.text:
        yield f"limits: {snapshot.limits.text}", "dim"
    if (dht := snapshot.dht) is None:
        return
    yield f"directory: {counted(dht.peers, 'peer')} known, {counted(dht.records_held, 'record')} kept for others", "dim"
    for entry in dht.bootstrap:
        fine = "connected" if entry.connected else "in reserve" if entry.in_reserve else ""
        yield f"bootstrap {entry.addr}: {fine or entry.problem or 'connecting'}", "dim" if fine else "yellow"
    if dht.waits_for:
        yield f"the directory waits: {dht.waits_for}", "yellow"
    if dht.clock_warning:
        yield dht.clock_warning, "yellow"


def _fullest(budgets: Iterable[BudgetStatus]) -> Columns:
    """Table of the users and resources that are above half of their limit."""
    rows = list[Row]()
    for means in budgets:
        users = [("all together", means.used, means.of)]
        users += [(user.who, user.has, user.of) for user in (means.region, means.place, means.peer) if user is not None]
        shown = size if means.means.startswith("bytes") else brief
        rows += [
            (short(who), means.means, shown(has), shown(most))
            for who, has, most in users
            if 2 * (known(has) or 0) > (known(most) or math.inf)
        ]
    return Columns(("fullest", "of", "has", "may have"), rows, {2, 3})


def _faults_line(faults: FaultsStatus) -> Text:
    """Line about internal errors, which asks the user to report them."""
    error = next((one.error for one in faults.places if one.place == faults.last), "?")
    told = f"{counted(faults.count, 'internal error')} in peerd, the last at {faults.last}: {error}"
    return Text(f"{told}; please report it", "yellow")


def _swarm_lines(swarm: SwarmStatus) -> list[RenderableType]:
    """The run's figures, and the table of its peers."""
    if swarm.unread:
        return [Text(f"swarm: {swarm.why}", "yellow")]
    facts = [swarm_words.position(swarm), swarm_words.left(swarm), *swarm_words.figures(swarm), swarm_words.seen(swarm)]
    line = Text.assemble((f"run {swarm.run or '?'}", "bold"), ": " + ", ".join(filter(None, facts)))
    lines: list[RenderableType] = [line, *swarm_words.reasons(swarm)]
    return [*lines, swarm_words.peers(swarm).table()] if swarm.stages else lines


def _halt_line(swarm: SwarmStatus) -> list[RenderableType]:
    """The first line if the run stands still: for how long, and why. Else []."""
    told = swarm_words.halt(swarm)
    return [Text(f"run {swarm.run or '?'} ", "bold red") + told] if told is not None else []
