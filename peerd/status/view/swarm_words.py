"""Formats the swarm's part of a snapshot as phrases and table rows, for `peerd status` and `peerd status --watch`.

Text in a snapshot may come from untrusted peers: it is printed as plain text, never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from rich.text import Text

from peerd.screen import units
from peerd.screen.columns import Columns, Row, styled
from peerd.status.swarm_status import ContributionStatus, PeerStatus, SampleCounts, SwarmStatus

SILENT_S: Final = 25.0  # a peer with an older record is shown as silent; peers publish at least every 20 s


def halt(swarm: SwarmStatus) -> Text | None:
    """Why the run stands still, and for how long. Returns None while it moves."""
    still = swarm.standstill
    if still is None:
        return None
    return Text(f"stands still for {units.duration(still.for_s)}: {units.named(still.why, swarm.names())}", "bold red")


def reasons(swarm: SwarmStatus) -> list[Text]:
    """Why the last read failed, and what this peer waits for while the run moves."""
    told = [Text(swarm.why, "yellow")] if swarm.why else []
    if swarm.own_wait and swarm.standstill is None:
        told.append(Text(f"this peer waits: {units.named(swarm.own_wait, swarm.names())}", "yellow"))
    return told


def position(swarm: SwarmStatus) -> str:
    """Phrase on the current step, and the total if there is one."""
    if swarm.step is None:
        return "no step yet"
    return f"step {units.count(swarm.step)}" + (f" of {units.count(swarm.total_steps)}" if swarm.total_steps else "")


def figures(swarm: SwarmStatus) -> list[str]:
    """Phrases on loss, validation, rates, own share, number of trainers and the time to the next step."""
    told = []
    if units.known(swarm.loss) is not None:
        told.append(f"loss {units.loss(swarm.loss)}")
    if units.known(swarm.valid_loss) is not None:
        at = f" at step {units.count(swarm.valid_step)}" if swarm.valid_step else ""
        told.append(f"validation {units.loss(swarm.valid_loss)}{at}")
    if units.known(swarm.samples_per_s) is not None:
        told.append(units.rate(swarm.samples_per_s))
    if swarm.tokens_per_s:
        told.append(units.rate(swarm.tokens_per_s, "tokens"))
    if (part := own_share(swarm)) is not None:
        told.append(f"mine {units.share(part)}")
    told.append(units.counted(len(swarm.trainers), "trainer"))
    if (due_in_s := units.known(swarm.next_step_in_s)) is not None and swarm.standstill is None:
        told.append(f"next step {units.soon(due_in_s)}")
    return told


def own_share(swarm: SwarmStatus) -> float | None:
    """This peer's share of the samples computed; without any, of the samples brought; else of the bytes summed."""
    shares = (units.known(swarm.shares.get(key)) for key in ("samples", "brought", "bytes_aggregated"))
    return next(filter(None, shares), None)


def left(swarm: SwarmStatus) -> str:
    """Phrase on the time left, or "" if it is unknown."""
    if swarm.complete:
        return "complete"
    return f"{units.duration(swarm.left_s)} left" if units.known(swarm.left_s) is not None else ""


def seen(swarm: SwarmStatus) -> str:
    """Phrase on the age of the figures, or "" if it is unknown."""
    age_s = units.known(swarm.age_s)
    return "" if age_s is None else f"seen {units.duration(age_s)} ago" if age_s >= 1 else "seen just now"


def peers(swarm: SwarmStatus) -> Columns:
    """Table with a row for each stage peer and trainer; if a screen is too small for all, a row for each stage."""
    heads, names, rows = ("stage", "peer", "step", "held", "can do", "device", "waits"), swarm.names(), list[Row]()
    for stage in swarm.stages:
        if not stage.peers:
            rows.append([str(stage.stage), Text("no peer", "bold red"), *[""] * 5])
        for peer in stage.peers:
            style = "red" if peer.gone else "dim" if _silent(peer) else ""
            work = [units.count(peer.step), units.count(peer.held), _rate(peer.samples_per_s)]
            rows.append(styled((str(stage.stage), _name(peer, names), *work, peer.device, _state(peer, names)), style))
    for row in swarm.trainers:
        speed = _rate(row.samples_per_s) if units.known(row.samples_per_s) and not _silent(row) else ""
        told = ("-", _name(row, names), units.count(row.step), "", speed, "trainer", _state(row, names))
        rows.append(styled(told, "dim" if _silent(row) else ""))
    return Columns(heads, rows, {2, 3, 4}, _stages(swarm))


def _stages(swarm: SwarmStatus) -> list[Row]:
    rows = list[Row]()
    for stage in swarm.stages:
        there = [peer for peer in stage.peers if not peer.gone]
        step = units.count(max((peer.step or 0 for peer in there), default=None))
        speed = sum(units.known(peer.samples_per_s) or 0.0 for peer in there)
        work = [step, units.count(sum(peer.held or 0 for peer in there)), f"{units.number(round(speed, 1))}/s"]
        gone = f"{len(stage.peers) - len(there)} gone" if len(there) < len(stage.peers) else ""
        count = Text(units.counted(len(there), "peer"), "" if there else "bold red")
        rows.append([str(stage.stage), count, *work, "", gone])
    if swarm.trainers:
        step = units.count(max(row.step or 0 for row in swarm.trainers))
        rows.append(["-", units.counted(len(swarm.trainers), "trainer"), step, *[""] * 4])
    return rows


def _rate(samples_per_s: object) -> str:
    speed = units.known(samples_per_s)
    return f"{units.number(round(speed, 1))}/s" if speed else units.UNKNOWN


def _name(peer: PeerStatus, names: Mapping[str, str]) -> str:
    return (names.get(peer.peer) or units.short(peer.peer)) + (" (this one)" if peer.own else "")


def _silent(peer: PeerStatus) -> bool:
    return (units.known(peer.age_s) or 0.0) > SILENT_S


def _state(peer: PeerStatus, names: Mapping[str, str]) -> str:
    """State of a peer: "gone", how long it has been silent, or the reason that it waits."""
    if peer.gone:
        return "gone"
    if _silent(peer):
        return f"silent for {units.duration(peer.age_s)}"
    return units.named(peer.waits_for or units.UNKNOWN, names)


def board_by(swarm: SwarmStatus) -> str:
    """Title of the leaderboard, which says whose figures it shows."""
    counted = swarm.counted
    if counted is None:
        return "contributions by the peers' own figures"
    by, since = units.short(counted.by), units.count(counted.since_step)
    told = f"contributions counted by peer {by} since step {since}, beside each peer's own figures"
    return f"{told}; {units.counted(counted.unlisted, 'peer')} with less left out" if counted.unlisted else told


def board(swarm: SwarmStatus) -> Columns:
    """The leaderboard, with a conductor's counts if there are any. Names in it were signed by the organizer."""
    samples = ("computed", "says", "brought", "says") if swarm.counted else ("computed", "brought")
    heads = ("", "name", "peer", *samples, "updates", "summed", "hours", "since")
    rows = [
        _board_row(place, row, counted=swarm.counted is not None) for place, row in enumerate(swarm.contributions, 1)
    ]
    return Columns(heads, rows, {0, *range(3, len(heads) - 2)})


def _board_row(place: int, row: ContributionStatus, *, counted: bool) -> list[str]:
    count = row.counted
    computed, brought = (count.samples, count.brought) if count is not None else (None, None)
    samples = [computed, row.samples, brought, row.brought] if counted else [row.samples, row.brought]
    hours, since = units.known(row.hours), units.known(row.since)
    return [
        *(str(place), row.name or units.UNKNOWN, units.short(row.peer)),
        *map(units.count, samples),
        *(units.count(row.updates), units.size(row.bytes_aggregated)),
        units.UNKNOWN if hours is None else f"{hours:.1f}",
        units.UNKNOWN if since is None else time.strftime("%Y-%m-%d", time.localtime(since)),
    ]


def board_line(row: ContributionStatus, place: int, *, counted: bool) -> Text:
    """One line of the leaderboard. `counted` is True if there are a conductor's counts."""
    gave = _samples(row)
    gave += [f"{units.count(row.updates)} updates of experts"] if row.updates else []
    gave += [f"{units.size(row.bytes_aggregated)} summed"] if row.bytes_aggregated else []
    hours = units.known(row.hours)
    own = ", ".join([*(gave or ["nothing yet"]), *([f"{hours:.1f} hours"] if hours is not None else [])])
    name = row.name or units.short(row.peer)
    if not counted:
        return Text(f"{place}. {name}: {own}")
    by_count = ", ".join(_samples(row.counted)) if row.counted is not None else "not counted"
    return Text(f"{place}. {name}: {by_count}; says {'nothing' if hours is None else own}")


def _samples(figures: ContributionStatus | SampleCounts) -> list[str]:
    told = [f"{units.count(figures.samples)} computed"] if figures.samples else []
    return told + ([f"{units.count(figures.brought)} brought"] if figures.brought else [])


def event_line(event: Mapping[str, Any], names: Mapping[str, str]) -> Text:
    """Line on an event of this daemon: time, name, facts."""
    facts = " ".join(
        f"{key}={units.named(units.brief(value), names)}"
        for key, value in event.items()
        if key not in ("time", "level", "name") and units.brief(value) != units.UNKNOWN
    )
    at = time.strftime("%H:%M:%S", time.localtime(float(event.get("time", 0.0))))
    style = {"warn": "yellow", "error": "red"}.get(str(event.get("level")), "")
    return Text.assemble((f"{at} ", "dim"), (str(event.get("name", "?")), style), f" {facts}")
