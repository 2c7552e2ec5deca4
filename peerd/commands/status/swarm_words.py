"""Formats the swarm's part of a snapshot as phrases and table rows, for `peerd status` and `peerd status --watch`.

Text in a snapshot may come from untrusted peers: it is printed as plain text, never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from peerd.screen import units

Swarm = Mapping[str, Any]

SILENT_S: Final = 25.0  # a peer with an older record is shown as silent; peers publish at least every 20 s
PEER_HEADS: Final = ("stage", "peer", "step", "held", "can do", "device", "waits")
PEER_FIGURES: Final = frozenset({2, 3, 4})
_BOARD_NAMES: Final = ("", "name", "peer")
_BOARD_REST: Final = ("updates", "summed", "hours", "since")
BOARD_HEADS: Final = (*_BOARD_NAMES, "computed", "brought", *_BOARD_REST)
BOARD_FIGURES: Final = frozenset({0, 3, 4, 5, 6})
COUNTED_HEADS: Final = (*_BOARD_NAMES, "computed", "says", "brought", "says", *_BOARD_REST)  # with a conductor's counts
COUNTED_FIGURES: Final = frozenset({0, 3, 4, 5, 6, 7, 8})


def names_of(swarm: Swarm) -> dict[str, str]:
    """Names of the peers, as the organizer signed them, by peer id."""
    rows = [row for stage in swarm.get("stages") or [] for row in stage["peers"]]
    rows += swarm.get("contributions") or []
    return {str(row.get("peer")): str(row["name"]) for row in rows if row.get("name")}


def peers_of(swarm: Swarm) -> list[str]:
    """Ids of the peers, in the order of their rows."""
    rows = [row for stage in swarm.get("stages") or [] for row in stage["peers"]]
    return [str(row.get("peer")) for row in (*rows, *(swarm.get("trainers") or []))]


def halt(swarm: Swarm, names: Mapping[str, str]) -> Text | None:
    """Why the run stands still, and for how long. Returns None while it moves."""
    still = swarm.get("standstill")
    if not still:
        return None
    why = units.named(str(still.get("why")), names)
    return Text(f"stands still for {units.duration(still.get('for_s'))}: {why}", "bold red")


def position(swarm: Swarm) -> str:
    """Phrase on the current step, and the total if there is one."""
    if swarm.get("step") is None:
        return "no step yet"
    total = f" of {units.count(swarm['total_steps'])}" if swarm.get("total_steps") else ""
    return f"step {units.count(swarm['step'])}{total}"


def figures(swarm: Swarm) -> list[str]:
    """Phrases on loss, validation, rates, own share, number of trainers and the time to the next step."""
    told = []
    if units.known(swarm.get("loss")) is not None:
        told.append(f"loss {units.loss(swarm['loss'])}")
    if units.known(swarm.get("valid_loss")) is not None:
        at = f" at step {units.count(swarm['valid_step'])}" if swarm.get("valid_step") else ""
        told.append(f"validation {units.loss(swarm['valid_loss'])}{at}")
    if units.known(swarm.get("samples_per_s")) is not None:
        told.append(units.rate(swarm["samples_per_s"]))
    if swarm.get("tokens_per_s"):
        told.append(units.rate(swarm["tokens_per_s"], "tokens"))
    if (part := own_share(swarm)) is not None:
        told.append(f"mine {units.share(part)}")
    told.append(units.counted(len(swarm.get("trainers") or []), "trainer"))
    if units.known(swarm.get("next_step_in_s")) is not None and not swarm.get("standstill"):
        told.append(f"next step {units.soon(swarm['next_step_in_s'])}")
    return told


def own_share(swarm: Swarm) -> float | None:
    """This peer's share of the samples computed; without any, of the samples brought; else of the bytes summed."""
    shares = swarm.get("shares") or {}
    told = [part for key in ("samples", "brought", "bytes_aggregated") if (part := units.known(shares.get(key)))]
    return told[0] if told else None


def left(swarm: Swarm) -> str:
    """Phrase on the time left, or "" if it is unknown."""
    if swarm.get("complete"):
        return "complete"
    return f"{units.duration(swarm['left_s'])} left" if units.known(swarm.get("left_s")) is not None else ""


def seen(swarm: Swarm) -> str:
    """Phrase on the age of the figures, or "" if it is unknown."""
    age_s = units.known(swarm.get("age_s"))
    return "" if age_s is None else f"seen {units.duration(age_s)} ago" if age_s >= 1 else "seen just now"


def peer_rows(swarm: Swarm, names: Mapping[str, str]) -> list[list[Text]]:
    """A row for each stage peer and trainer, with the columns of PEER_HEADS."""
    rows = []
    for stage in swarm.get("stages") or []:
        number = str(stage.get("stage"))
        if not stage["peers"]:
            rows.append([Text(number), Text("no peer", "bold red"), *[Text("")] * 5])
        rows += [_peer_row(number, peer, names) for peer in stage["peers"]]
    return rows + [_trainer_row(row, names) for row in swarm.get("trainers") or []]


def stage_rows(swarm: Swarm) -> list[list[Text]]:
    """A row for each stage, for screens without room for all peers."""
    rows = []
    for stage in swarm.get("stages") or []:
        there = [peer for peer in stage["peers"] if not peer.get("gone")]
        steps = sorted({peer.get("step") or 0 for peer in there})
        gone = f"{len(stage['peers']) - len(there)} gone" if len(there) < len(stage["peers"]) else ""
        told = [Text(units.counted(len(there), "peer"), "" if there else "bold red")]
        told.append(Text(units.count(steps[-1]) if steps else units.UNKNOWN))
        told.append(Text(units.count(sum(peer.get("held") or 0 for peer in there))))
        speed = sum(units.known(peer.get("samples_per_s")) or 0.0 for peer in there)
        told += [Text(f"{units.number(round(speed, 1))}/s"), Text(""), Text(gone)]
        rows.append([Text(str(stage.get("stage"))), *told])
    if trainers := swarm.get("trainers"):
        told = [Text("-"), Text(units.counted(len(trainers), "trainer"))]
        rows.append([*told, Text(units.count(max(row.get("step") or 0 for row in trainers))), *[Text("")] * 4])
    return rows


def _peer_row(stage: str, peer: Swarm, names: Mapping[str, str]) -> list[Text]:
    style = "red" if peer.get("gone") else "dim" if _silent(peer) else ""
    speed = units.known(peer.get("samples_per_s"))
    cells = [
        stage,
        _name(peer, names),
        units.count(peer.get("step")),
        units.count(peer.get("held")),
        units.UNKNOWN if not speed else f"{units.number(round(speed, 1))}/s",
        str(peer.get("device", "?")),
        _state(peer, names),
    ]
    return [Text(cell, style) for cell in cells]


def _trainer_row(row: Swarm, names: Mapping[str, str]) -> list[Text]:
    speed = units.known(row.get("samples_per_s"))
    told = ["-", _name(row, names), units.count(row.get("step")), "", "", "trainer", _state(row, names)]
    if speed and not _silent(row):
        told[4] = f"{units.number(round(speed, 1))}/s"
    return [Text(cell, "dim" if _silent(row) else "") for cell in told]


def _name(peer: Swarm, names: Mapping[str, str]) -> str:
    told = str(peer.get("peer", "?"))
    return (names.get(told) or units.short(told)) + (" (this one)" if peer.get("own") else "")


def _silent(peer: Swarm) -> bool:
    return (units.known(peer.get("age_s")) or 0.0) > SILENT_S


def _state(peer: Swarm, names: Mapping[str, str]) -> str:
    """State of a peer: "gone", how long it has been silent, or the reason that it waits."""
    if peer.get("gone"):
        return "gone"
    if _silent(peer):
        return f"silent for {units.duration(peer['age_s'])}"
    return units.named(str(peer.get("waits_for") or units.UNKNOWN), names)


def board_by(swarm: Swarm) -> str:
    """Title of the leader-board, which says whose figures it shows."""
    counted = swarm.get("counted")
    if not counted:
        return "contributions by the peers' own figures"
    by, since = units.short(str(counted.get("by", "?"))), units.count(counted.get("since_step"))
    told = f"contributions counted by peer {by} since step {since}, beside each peer's own figures"
    unlisted = counted.get("unlisted")
    return f"{told}; {units.counted(unlisted, 'peer')} with less left out" if unlisted else told


def board_rows(swarm: Swarm) -> Iterator[Sequence[Text]]:
    """Rows of the leader-board: columns COUNTED_HEADS if there are a conductor's counts, else BOARD_HEADS.

    Names in it were signed by the organizer.
    """
    for place, row in enumerate(swarm.get("contributions") or [], 1):
        told = [str(place), str(row.get("name") or units.UNKNOWN), units.short(str(row.get("peer", "?")))]
        counts = row.get("counted") or {}
        for key in ("samples", "brought"):
            told += [units.count(counts.get(key))] if swarm.get("counted") else []
            told.append(units.count(row.get(key, 0)))
        told += [units.count(row.get("updates", 0)), units.size(row.get("bytes_aggregated", 0))]
        hours, since = units.known(row.get("hours", 0.0)), units.known(row.get("since", 0))
        told.append(units.UNKNOWN if hours is None else f"{hours:.1f}")
        told.append(units.UNKNOWN if since is None else time.strftime("%Y-%m-%d", time.localtime(since)))
        yield [Text(cell) for cell in told]


def board_line(row: Swarm, place: int, *, counted: bool) -> Text:
    """One line of the leader-board. `counted` is True if there are a conductor's counts."""
    name = str(row.get("name") or units.short(str(row.get("peer", "?"))))
    gave = _samples(row)
    gave += [f"{units.count(row['updates'])} updates of experts"] if row.get("updates") else []
    gave += [f"{units.size(row['bytes_aggregated'])} summed"] if row.get("bytes_aggregated") else []
    hours = units.known(row.get("hours"))
    own = ", ".join([*(gave or ["nothing yet"]), *([f"{hours:.1f} hours"] if hours is not None else [])])
    if not counted:
        return Text(f"{place}. {name}: {own}")
    by_count = ", ".join(_samples(row["counted"])) if row.get("counted") else "not counted"
    return Text(f"{place}. {name}: {by_count}; says {'nothing' if hours is None else own}")


def _samples(figures: Swarm) -> list[str]:
    told = [f"{units.count(figures['samples'])} computed"] if figures.get("samples") else []
    return told + ([f"{units.count(figures['brought'])} brought"] if figures.get("brought") else [])


def event_line(event: Swarm, names: Mapping[str, str]) -> Text:
    """Line on an event of this daemon: time, name, facts."""
    facts = " ".join(
        f"{key}={units.named(units.brief(value), names)}"
        for key, value in event.items()
        if key not in ("time", "level", "name") and units.brief(value) != units.UNKNOWN
    )
    at = time.strftime("%H:%M:%S", time.localtime(float(event.get("time", 0.0))))
    style = {"warn": "yellow", "error": "red"}.get(str(event.get("level")), "")
    return Text.assemble((f"{at} ", "dim"), (str(event.get("name", "?")), style), f" {facts}")
