"""Formats a status snapshot as tables for the terminal, printed once.

Depends on the snapshot's keys only, not on the daemon. Text in a snapshot may come from untrusted peers: it is printed
as plain text, never as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from peerd.commands.status import swarm_words
from peerd.commands.status.network_words import network_parts
from peerd.commands.status.role_words import details, parts_of
from peerd.screen.units import brief, counted, duration, named, number, short, size

EVENTS_SHOWN: Final = 8

_WAYS: Final = {"punched": "by hole punching", "relayed": "over relays"}  # other kinds are shown by name

Snapshot = dict[str, Any]


def render(snapshot: Snapshot) -> RenderableType:
    """Format the whole snapshot: this daemon first, then its view of the swarm."""
    swarm = snapshot.get("swarm") or {}
    parts: list[RenderableType] = [*halt_line(swarm), _headline(snapshot), roles_table(snapshot.get("roles", []))]
    if snapshot.get("alone"):
        parts.insert(0, Text(snapshot["alone"], "yellow"))
    if snapshot.get("no_part_yet"):
        parts.insert(0, Text(f"takes no part yet, waits for: {snapshot['no_part_yet']}", "yellow"))
    parts.append(_network(snapshot))
    fullest = fullest_table(snapshot.get("budgets", []))
    if fullest is not None:
        parts += [Text(""), fullest]
    if (snapshot.get("faults") or {}).get("count"):
        parts.append(faults_line(snapshot["faults"]))
    if swarm:
        parts += [Text(""), swarm_line(swarm)]
        if swarm.get("stages"):
            parts.append(peers_table(swarm))
    events = snapshot.get("events", [])[-EVENTS_SHOWN:]
    if events:
        names = swarm_words.names_of(swarm)
        parts += [Text(""), *(swarm_words.event_line(event, names) for event in events)]
    return Group(*parts)


def swarm_of(snapshot: Snapshot) -> Snapshot:
    """The swarm's part of a snapshot. If there is none, its `why` is the reason."""
    why = "this daemon has not read the directory yet, or has no run"
    return snapshot.get("swarm") or {"run": snapshot.get("run"), "why": why}


def render_swarm(swarm: Snapshot) -> RenderableType:
    """Format a run: its step, the peers of its stages, the network between them, and each peer's contribution."""
    parts: list[RenderableType] = [*halt_line(swarm), swarm_line(swarm)]
    if swarm.get("stages"):
        parts.append(peers_table(swarm))
    if network := network_parts(swarm.get("network"), swarm_words.names_of(swarm), swarm_words.peers_of(swarm)):
        parts += [Text(""), *network]
    if swarm.get("contributions"):
        parts += [Text(""), Text(swarm_words.board_by(swarm), "dim"), contributions_table(swarm)]
    return Group(*parts)


Render = Callable[[Snapshot], RenderableType]


def show(snapshot: Snapshot, render: Render) -> None:
    """Print a snapshot, formatted by `render`."""
    Console().print(render(snapshot), crop=False)  # addresses may be wider than the screen


def _headline(snapshot: Snapshot) -> Text:
    peer = snapshot.get("peer", {})
    text = Text(no_wrap=True, overflow="ignore")  # unwrapped, so that users can copy the addresses
    text.append(f"peerd {snapshot.get('version', '?')}", "bold").append(f"  {peer.get('id', '?')}")
    text.append(f"\nup {duration(snapshot.get('uptime_s', 0.0))}, data in {snapshot.get('data_dir', '?')}", "dim")
    reached = snapshot.get("reachability") or {}
    for addr in peer.get("addrs", []):
        text.append(f"\n{_at(addr, reached.get('proven', ()))} {addr}", "dim")
    return text


def _at(addr: str, proven: Iterable[str]) -> str:
    """Label of an address: proven reachable, over a relay, or only listening."""
    if "/p2p-circuit" in addr:
        return "over a relay at"
    return "reachable at" if any(addr.startswith(f"{one}/p2p/") for one in proven) else "listening on"


def roles_table(roles: Iterable[Snapshot]) -> Table:
    """Table of the roles, with one row for each post of a role that has several."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("role", "state", "waits", "details"):
        table.add_column(name, overflow="fold")
    for role in (part for each in roles for part in parts_of(each)):
        why = role.get("waits_for") or role.get("failure") or "-"
        state = str(role.get("state", "?")) + (
            f" ({counted(role['restarts'], 'restart')})" if role.get("restarts") else ""
        )
        table.add_row(*map(Text, (str(role.get("role", "?")), state, str(why), ", ".join(details(role)))))
    return table


def _network(snapshot: Snapshot) -> Text:
    net, dht = (snapshot.get(name) or {} for name in ("network", "dht"))
    line = (
        f"{counted(len(net.get('peers', [])), 'peer')} connected, {counted(net.get('streams', 0), 'stream')}; "
        f"in {size(net.get('bytes_in', 0))} ({size(net.get('in_per_s', 0))}/s), "
        f"out {size(net.get('bytes_out', 0))} ({size(net.get('out_per_s', 0))}/s)"
    )
    text = Text(line, no_wrap=True, overflow="ignore")
    text.append_text(_ways(snapshot.get("reachability") or {}, net.get("peers", [])))
    told = "; ".join(filter(None, (_direction(name, net.get("line", {}).get(name)) for name in ("up", "down"))))
    if told:
        text.append(f"\nline: {told}", "dim")
    if (snapshot.get("limits") or {}).get("text"):
        text.append(f"\nlimits: {snapshot['limits']['text']}", "dim")
    if dht:
        known, kept = counted(dht.get("peers", 0), "peer"), counted(dht.get("records_held", 0), "record")
        text.append(f"\ndirectory: {known} known, {kept} kept for others", "dim")
        for entry in dht.get("bootstrap") or []:
            fine = "connected" if entry.get("connected") else "in reserve" if entry.get("in_reserve") else ""
            state = fine or entry.get("problem") or "connecting"
            text.append(f"\nbootstrap {entry.get('addr')}: {state}", "dim" if fine else "yellow")
        for key in ("waits_for", "clock_warning"):
            if dht.get(key):
                text.append(f"\n{'the directory waits: ' if key == 'waits_for' else ''}{dht[key]}", "yellow")
    return text


def _direction(name: str, told: Snapshot | None) -> str:
    """Text on one direction of the internet line. Returns "" if neither a limit nor a rate is known."""
    if not told or not (told.get("limit_mbit") or told.get("measured_mbit")):
        return ""
    facts = [f"limit {number(told['limit_mbit'])}"] if told.get("limit_mbit") else []
    facts += [f"up to {number(told['measured_mbit'])} measured"] if told.get("measured_mbit") else []
    return f"{name} {number(round(told.get('now_mbit', 0.0), 1))} Mb/s now ({', '.join(facts)})"


def _ways(reached: Snapshot, peers: Iterable[Snapshot]) -> Text:
    """Text on the kinds of connections, on this peer's reachability, with advice, and on its work as a relay."""
    text = Text()
    kinds = Counter(str(peer["way"]) for peer in peers if peer.get("way"))
    if kinds:
        told = ", ".join(f"{count} {_WAYS.get(kind, kind)}" for kind, count in sorted(kinds.items()))
        text.append(f"\nconnections: {told}", "dim")
    if reached.get("advice"):
        known = reached.get("for_s") is not None and reached.get("verdict") != "unknown"
        since = f", for {duration(reached['for_s'])}" if known else ""
        text.append(f"\n{reached['advice']}{since}", "dim" if reached.get("verdict") == "reachable" else "yellow")
    if reached.get("relays"):
        relays = [short(str(peer)) for peer in reached["relays"]]
        text.append(f"\nreached over the relay{'s' * (len(relays) > 1)} {', '.join(relays)}", "dim")
    relay = reached.get("carries")
    if relay:
        places = (
            f"{counted(relay.get('circuits', 0), 'circuit')}, {counted(relay.get('reservations', 0), 'reservation')}"
        )
        text.append(f"\nrelay for others: {places}, {size(relay.get('carried_bytes', 0))} carried", "dim")
    return text


def fullest_table(budgets: Iterable[Snapshot]) -> Table | None:
    """Table of the users and resources that are above half of their limit. Returns None if there are none."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("fullest", "left"), ("of", "left"), ("has", "right"), ("may have", "right")):
        table.add_column(name, justify="right" if side == "right" else "left")
    for means in budgets:
        kind = str(means.get("means", "?"))
        users = [("all together", means.get("used", 0), means.get("of", 0))]
        users += [
            (user["who"], user["has"], user["of"]) for user in map(means.get, ("region", "place", "peer")) if user
        ]
        for who, has, most in users:
            if most and 2 * has > most:
                shown = size if kind.startswith("bytes") else brief
                table.add_row(*map(Text, (short(str(who)), kind, shown(has), shown(most))))
    return table if table.row_count else None


def faults_line(faults: Snapshot) -> Text:
    """Line about internal errors, which asks the user to report them."""
    errors = {one.get("place"): one.get("error") for one in faults.get("places", [])}
    last = faults.get("last")
    told = f"{counted(faults['count'], 'internal error')} in peerd, the last at {last}: {errors.get(last, '?')}"
    return Text(f"{told}; please report it", "yellow")


def swarm_line(swarm: Snapshot) -> Text:
    if swarm.get("why") and "stages" not in swarm:
        return Text(f"swarm: {swarm['why']}", "yellow")
    names = swarm_words.names_of(swarm)
    facts = [swarm_words.position(swarm), swarm_words.left(swarm), *swarm_words.figures(swarm), swarm_words.seen(swarm)]
    line = Text.assemble((f"run {swarm.get('run', '?')}", "bold"), ": " + ", ".join(filter(None, facts)))
    if swarm.get("why"):
        line.append(f"\n{swarm['why']}", "yellow")
    if swarm.get("own_wait") and not swarm.get("standstill"):
        line.append(f"\nthis peer waits: {named(str(swarm['own_wait']), names)}", "yellow")
    return line


def halt_line(swarm: Snapshot) -> list[RenderableType]:
    """The first line if the run stands still: for how long, and why. Else []."""
    told = swarm_words.halt(swarm, swarm_words.names_of(swarm))
    return [Text(f"run {swarm.get('run', '?')} ", "bold red") + told] if told is not None else []


def _table(heads: Sequence[str], figures: frozenset[int], rows: Iterable[Sequence[Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, name in enumerate(heads):
        overflow: OverflowMethod = "fold" if column == len(heads) - 1 else "ellipsis"
        table.add_column(name, justify="right" if column in figures else "left", overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def peers_table(swarm: Snapshot) -> Table:
    """Table of the run's peers, with a row for each stage peer and trainer."""
    rows = swarm_words.peer_rows(swarm, swarm_words.names_of(swarm))
    return _table(swarm_words.PEER_HEADS, swarm_words.PEER_FIGURES, rows)


def contributions_table(swarm: Snapshot) -> Table:
    """Table of the leader-board."""
    rows = swarm_words.board_rows(swarm)
    if swarm.get("counted"):
        return _table(swarm_words.COUNTED_HEADS, swarm_words.COUNTED_FIGURES, rows)
    return _table(swarm_words.BOARD_HEADS, swarm_words.BOARD_FIGURES, rows)
