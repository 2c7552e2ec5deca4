"""The network between the peers of a run as its conductor's map shows it, as plain data for a status snapshot.

What the map says is one peer's word: figures are numbers within bounds, names may be anything.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trio

from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.run.runfile import BYTES_PER_MBIT
from peerd.service.network.link_watch import NamedPair, ReadMap
from peerd.service.run_services import RunServices

Told = Mapping[str, Any]

READ_S: Final = 1.0
PAIRS_TOLD: Final = 512  # in a snapshot; of more, the worst and a summary
WORST: Final = 3  # of each kind of line


async def network_view(services: RunServices, swarm: Told) -> dict[str, Any]:
    """The network by the conductor's map. `swarm`: as the directory shows it, with the conductor's name."""
    conductor = services.following.conductor or _named_conductor(swarm)
    if conductor is None:
        return {"why": "nobody conducts the run"}
    try:
        with trio.fail_after(READ_S):
            read = await services.link_watch.read_map(conductor)
    except trio.TooSlowError:
        return {"why": f"the conductor {conductor.short} did not tell within {READ_S:g} s"}
    except RemoteError as error:
        return {"why": f"the conductor {conductor.short} does not tell: {error}"}
    return {"why": None, **told_of(read)}


def _named_conductor(swarm: Told) -> PeerId | None:
    """The conductor that most stage peers name in their records."""
    named = Counter(row["conductor"] for stage in swarm.get("stages", []) for row in stage["peers"] if row["conductor"])
    for name, _ in named.most_common(1):
        try:
            return PeerId.parse(name)
        except ValueError:
            return None
    return None


def told_of(read: ReadMap) -> dict[str, Any]:
    """A map as plain data: each direction of a pair by itself in the summary, both in `pairs`."""
    rows = [_row(pair) for pair in read.pairs]
    rtts = [row["rtt_ms"] for row in rows if row["rtt_ms"] is not None and not row["rtt_estimated"]]
    lines = [line for row in rows for line in _directions(row)]
    rates = [line["mbit"] for line in lines]
    far = sorted(
        (row for row in rows if row["rtt_ms"] is not None and not row["rtt_estimated"]), key=_rtt, reverse=True
    )
    return {
        "peers": read.total_peers,
        "pairs_measured": len(rtts),
        "rates_measured": len(rates),
        "more": read.more,
        "rtt_ms": _spread(rtts),
        "mbit": _spread(rates),
        "farthest": far[:WORST],
        "slowest": sorted(lines, key=lambda line: float(line["mbit"]))[:WORST],
        "pairs": rows if len(rows) <= PAIRS_TOLD else [],
    }


def _row(pair: NamedPair) -> dict[str, Any]:
    figures = pair.figures
    return {
        "one": pair.one,
        "other": pair.other,
        "rtt_ms": figures.rtt_s * 1000 or None,
        "there_mbit": figures.there_bytes_per_s / BYTES_PER_MBIT or None,
        "back_mbit": figures.back_bytes_per_s / BYTES_PER_MBIT or None,
        "rtt_estimated": figures.rtt_estimated,
        "there_estimated": figures.there_estimated,
        "back_estimated": figures.back_estimated,
        "age_s": figures.age_s,
    }


def _rtt(row: Told) -> float:
    return float(row["rtt_ms"])


def _directions(row: Told) -> list[dict[str, Any]]:
    """The measured directions of a pair."""
    ends = (("there", row["one"], row["other"]), ("back", row["other"], row["one"]))
    return [
        {"from": source, "to": target, "mbit": row[f"{way}_mbit"], "rtt_ms": row["rtt_ms"]}
        for way, source, target in ends
        if row[f"{way}_mbit"] is not None and not row[f"{way}_estimated"]
    ]


def _spread(figures: Sequence[float]) -> dict[str, float] | None:
    if not figures:
        return None
    return {"least": min(figures), "median": statistics.median(figures), "most": max(figures)}
