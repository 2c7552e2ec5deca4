"""A status snapshot for people: tables in the terminal, once or live.

Knows the snapshot's keys and nothing of the daemon. What a snapshot says may have come from strangers: it is shown
as plain text, never as markup.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

PERIOD_S: Final = 1.0
EVENTS_SHOWN: Final = 8
_TOLD_ELSEWHERE: Final = {"waits_for", "role", "state", "restarts", "failure"}

_WAYS: Final = {"punched": "by hole punching", "relayed": "over relays"}  # the others' names say it

Snapshot = dict[str, Any]


def render(snapshot: Snapshot) -> RenderableType:
    """The whole snapshot, this daemon first, then the swarm as it sees it."""
    parts: list[RenderableType] = [_headline(snapshot), roles_table(snapshot.get("roles", [])), _network(snapshot)]
    if snapshot.get("alone"):
        parts.insert(0, Text(snapshot["alone"], "yellow"))
    fullest = fullest_table(snapshot.get("budgets", []))
    if fullest is not None:
        parts += [Text(""), fullest]
    if (snapshot.get("faults") or {}).get("count"):
        parts.append(faults_line(snapshot["faults"]))
    swarm = snapshot.get("swarm") or {}
    if swarm:
        parts += [Text(""), swarm_line(swarm)]
        if swarm.get("stages"):
            parts.append(peers_table(swarm["stages"]))
    events = snapshot.get("events", [])[-EVENTS_SHOWN:]
    if events:
        parts += [Text(""), *(event_line(event) for event in events)]
    return Group(*parts)


def swarm_of(snapshot: Snapshot) -> Snapshot:
    """The swarm's part of a snapshot; a sentence about why there is none, where there is none."""
    return snapshot.get("swarm") or {"run": snapshot.get("run"), "why": "this daemon has not looked yet, or has no run"}


def render_swarm(swarm: Snapshot) -> RenderableType:
    """A run: its step, the peers of its stages, and each peer's contribution."""
    parts: list[RenderableType] = [swarm_line(swarm)]
    if swarm.get("stages"):
        parts.append(peers_table(swarm["stages"]))
    if swarm.get("contributions"):
        parts += [Text(""), contributions_table(swarm["contributions"])]
    return Group(*parts)


Render = Callable[[Snapshot], RenderableType]


def show(snapshot: Snapshot, render: Render) -> None:
    """Print it once."""
    Console().print(render(snapshot), crop=False)  # addresses may be longer than the screen is wide


def watch(ask: Callable[[], Snapshot], *, as_json: bool, render: Render) -> None:
    """Show it again and again until interrupted; with `as_json` one object per line."""
    snapshots = _again_and_again(ask)
    if as_json:
        for snapshot in snapshots:
            sys.stdout.write(json.dumps(snapshot, ensure_ascii=False) + "\n")
            sys.stdout.flush()
    with Live(render(next(snapshots)), auto_refresh=False, screen=False) as live:
        for snapshot in snapshots:
            live.update(render(snapshot), refresh=True)


def _again_and_again(ask: Callable[[], Snapshot]) -> Iterator[Snapshot]:
    while True:
        yield ask()
        time.sleep(PERIOD_S)  # no loop runs in this process, and Ctrl+C, the only end there is, breaks a sleep off


def _headline(snapshot: Snapshot) -> Text:
    peer = snapshot.get("peer", {})
    text = Text(no_wrap=True, overflow="ignore")  # addresses are there to be copied
    text.append(f"peerd {snapshot.get('version', '?')}", "bold").append(f"  {peer.get('id', '?')}")
    text.append(f"\nup {duration(snapshot.get('uptime_s', 0.0))}, data in {snapshot.get('data_dir', '?')}", "dim")
    reached = snapshot.get("reachability") or {}
    for addr in peer.get("addrs", []):
        text.append(f"\n{_at(addr, reached.get('proven', ()))} {addr}", "dim")
    return text


def _at(addr: str, proven: Iterable[str]) -> str:
    """Words before an address, by the way it can be reached."""
    if "/p2p-circuit" in addr:
        return "over a relay at"
    return "reachable at" if any(addr.startswith(f"{one}/p2p/") for one in proven) else "listening on"


def roles_table(roles: Iterable[Snapshot]) -> Table:
    """A row for each role; for one that holds several posts, a row for each of these."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("role", "state", "waits for", "details"):
        table.add_column(name, overflow="fold")
    for role in (each | post for each in roles for post in each.get("posts") or [{}]):
        details = ", ".join(_details(role))
        why = role.get("waits_for") or role.get("failure") or "-"
        state = str(role.get("state", "?")) + (
            f" ({counted(role['restarts'], 'restart')})" if role.get("restarts") else ""
        )
        table.add_row(*map(Text, (str(role.get("role", "?")), state, str(why), details)))
    return table


def _details(role: Snapshot) -> Iterable[str]:
    """Details that fit in a line: plain values and counts. Lists of peers and the like are for `--json`."""
    for key, value in role.items():
        if key in _TOLD_ELSEWHERE or value is None or value is False or value == [] or value == "":
            continue
        if isinstance(value, float) and value != value:  # nothing measured yet
            continue
        if isinstance(value, list) and isinstance(value[0], dict):
            continue
        if key == "next_step_in_s":
            yield f"next step {soon(value)}"
            continue
        name = key.replace("_", " ").replace(" per s", "/s")
        yield f"{name} {brief(value).strip('{}')}" if value is not True else name


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
            state = "connected" if entry.get("connected") else entry.get("problem") or "connecting"
            text.append(f"\nbootstrap {entry.get('addr')}: {state}", "dim" if entry.get("connected") else "yellow")
        for key in ("waits_for", "clock_warning"):
            if dht.get(key):
                text.append(f"\n{'waits for ' if key == 'waits_for' else ''}{dht[key]}", "yellow")
    return text


def _direction(name: str, told: Snapshot | None) -> str:
    """One direction of the line; nothing where nothing is known."""
    if not told or not (told.get("limit_mbit") or told.get("measured_mbit")):
        return ""
    facts = [f"limit {told['limit_mbit']:.4g}"] if told.get("limit_mbit") else []
    facts += [f"up to {told['measured_mbit']:.4g} seen"] if told.get("measured_mbit") else []
    return f"{name} {told.get('now_mbit', 0.0):.3g} Mb/s now ({', '.join(facts)})"


def _ways(reached: Snapshot, peers: Iterable[Snapshot]) -> Text:
    """Reachability of this peer, with advice, and the kinds of way on which peers are connected."""
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
    """Users that have more than half of what they may have, and resources used up by more than half; None: there are
    none.
    """
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
    """Line about faults of peerd's own: worth a report."""
    errors = {one.get("place"): one.get("error") for one in faults.get("places", [])}
    last = faults.get("last")
    told = f"{counted(faults['count'], 'fault')} of peerd's own, the last at {last}: {errors.get(last, '?')}"
    return Text(f"{told}; please report it", "yellow")


def swarm_line(swarm: Snapshot) -> Text:
    if swarm.get("why"):
        return Text(f"swarm: {swarm['why']}", "yellow")
    facts = [f"step {swarm['step']}"] if swarm.get("step") is not None else []
    for key, form in (
        ("loss", "loss {:.3f}"),
        ("valid_loss", "validation {:.3f}"),
        ("samples_per_s", "{:.1f} samples/s"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
    ):
        if isinstance(swarm.get(key), int | float):
            facts.append(form.format(swarm[key]))
    facts.append(counted(len(swarm.get("trainers", [])), "trainer"))
    if isinstance(swarm.get("next_step_in_s"), int | float):
        facts.append(f"next step {soon(swarm['next_step_in_s'])}")
    return Text.assemble((f"run {swarm.get('run', '?')}", "bold"), ": " + ", ".join(facts))


def peers_table(stages: Iterable[Snapshot]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("stage", "right"), ("peer", "left"), ("step", "right"), ("held", "right")):
        table.add_column(name, justify="right" if side == "right" else "left")
    table.add_column("samples/s", justify="right")
    table.add_column("device")
    table.add_column("waits for", overflow="fold")
    for stage in stages:
        if not stage["peers"]:
            table.add_row(str(stage["stage"]), Text("no peer", "red"))
        for peer in stage["peers"]:
            table.add_row(
                str(stage["stage"]),
                Text(short(str(peer.get("peer", "?")))),
                str(peer.get("step", "?")),
                str(peer.get("held", "?")),
                brief(peer.get("samples_per_s", 0.0)),
                Text(str(peer.get("device", "?"))),
                Text(str(peer.get("waits_for") or "-")),
            )
    return table


def contributions_table(rows: Iterable[Snapshot]) -> Table:
    """The leader-board: peers by what they say they gave; a name in it was signed by the organizer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "who", "peer", "samples", "summed for others", "hours", "since"):
        table.add_column(name, justify="left" if name in ("who", "peer") else "right")
    for place, row in enumerate(rows, 1):
        since = time.strftime("%Y-%m-%d", time.localtime(float(row.get("since", 0))))
        table.add_row(
            str(place),
            Text(str(row.get("name") or "-")),
            Text(short(str(row.get("peer", "?")))),
            f"{row.get('samples', 0):,}",
            size(row.get("bytes_aggregated", 0)),
            f"{row.get('hours', 0.0):.1f}",
            since,
        )
    return table


def event_line(event: Snapshot) -> Text:
    facts = " ".join(f"{k}={brief(v)}" for k, v in event.items() if k not in ("time", "level", "name"))
    at = time.strftime("%H:%M:%S", time.localtime(float(event.get("time", 0.0))))
    style = {"warn": "yellow", "error": "red"}.get(str(event.get("level")), "")
    return Text.assemble((f"{at} ", "dim"), (str(event.get("name", "?")), style), f" {facts}")


def short(peer: str) -> str:
    """The eight characters by which people tell peers apart."""
    return "…" + peer[-8:] if peer.startswith("12D3KooW") else peer


def brief(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return short(value)
    if isinstance(value, dict):
        told = [f"{short(key)} {brief(item)}" for key, item in value.items() if item not in (None, {})]
        return "{" + ", ".join(told) + "}"
    if isinstance(value, list):
        return f"[{', '.join(brief(item) for item in value[:6])}{', …' if len(value) > 6 else ''}]"
    return "-" if value is None else str(value)


def soon(seconds: float) -> str:
    """Time until something foretold is due, in words."""
    if seconds < 1:
        return "any moment"
    return f"in about {round(seconds)} s" if seconds < 100 else f"in about {duration(seconds)}"


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def size(count: float) -> str:
    """Bytes in the unit that people read."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
